"""The server of a deployment: an ordinary ``Trainer.fit`` whose clients are elsewhere."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from lightning_pfl._lightning import connected
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import (
    ClientInfo,
    Evaluation,
    LocalResult,
    LogOptions,
    OnClients,
    Round,
)
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, rows, tmap
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.deploy import recipe
from lightning_pfl.deploy.data import CountedDataModule, Counts
from lightning_pfl.deploy.node import write_atomically
from lightning_pfl.deploy.nodes import Answer, Line, Nodes
from lightning_pfl.deploy.packet import HEADER, Packet, PacketError
from lightning_pfl.deploy.states import NONE
from lightning_pfl.deploy.wire import (
    Form,
    Writer,
    form_nbytes,
    form_of,
    read_counts,
    read_form,
    read_numbers,
    unflatten,
)
from lightning_pfl.federation.architectures import Architecture
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.cohort import Cohort
from lightning_pfl.federation.evaluate import GLOBAL
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.gate import MaxNorm, Verdict
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.methods.fedavg import FedAvg
from lightning_pfl.models.client_modules import ClientModules
from lightning_pfl.trainer.strategy import FederatedStrategy

LARGEST = 1e12
"""A logged value with a larger absolute value is taken for a lie."""
VALUES = 100
"""Values that a node logs at most."""
ROUNDS = 64
"""Rounds in which a method is expected to show all kinds of its rounds."""
READS_STATES = ("LinearFedRep",)
"""Methods whose server measures the client states."""


class ServerFederation(Federation):
    """The federation of a deployment: its client states are on the nodes.

    In the place of a client's state it holds the version of it that counts, so that leaving out a
    client, saving and resuming work as they do where states are here.

    Attributes:
        nodes: The nodes.
        id: Names the federation on the nodes' disks.
        durable: The versions that the last checkpoint counts on, int64 ``(clients,)``.
    """

    nodes: Nodes
    id: str
    durable: Tensor

    def _begin_client_states(
        self,
        architecture: Architecture,
        method: Method,
        row: Tree,
        device: torch.device,
        everyone: ClientInfo,
    ) -> None:
        architecture.method = method
        version = {"version": torch.tensor(NONE)}
        architecture.client_states = ClientStateStore(version, self.num_clients)
        self.durable = self.versions.clone()

    @property
    def versions(self) -> Tensor:
        """The version of every client's state that counts, int64 ``(clients,)``."""
        versions: Tensor = self.client_states.tree["version"]
        return versions

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        super().load_state_dict(saved)
        self.durable = self.versions.clone()

    def cohort(self, info: ClientInfo, received: Tree, phases: tuple[Phase, ...]) -> Cohort:
        """Begin the clients' side of a round, on the nodes."""
        return RemoteCohort(self, info, received, phases)

    def writer(self, received: Tree) -> Writer:
        """Begin a message that brings clients what the server sends them, ``(clients, ...)``."""
        writer = Writer()
        writer.add_rows(received, "received")
        return writer

    def head(self, info: ClientInfo, names: Sequence[str]) -> dict[str, Any]:
        """Make the part that all questions share.

        Args:
            info: The clients that are asked.
            names: Their names.
        """
        versions, durable = self.versions[info.index].tolist(), self.durable[info.index].tolist()
        template = self.architectures[0].optimizer
        groups = [] if template is None else template.param_groups
        return {
            "federation": self.id,
            "round": info.round,
            "rounds": self.rounds,
            "clients": list(names),
            "num_samples": info.num_samples.tolist(),
            "steps": info.steps.tolist(),
            "weights": info.weights.tolist(),
            "optimizer": [{k: v for k, v in group.items() if _plain(v)} for group in groups],
            "versions": dict(zip(names, versions, strict=True)),
            "keep": {n: [v, d] for n, v, d in zip(names, versions, durable, strict=True)},
        }

    def names_of(self, clients: Tensor) -> list[str]:
        """Name clients by their ids."""
        return [self.client_names[client] for client in clients.tolist()]

    def evaluate(
        self,
        clients: Tensor,
        rows_of: Tensor,
        data: FederatedDataset,
        step: str,
        limit: float | int,
        on_clients: OnClients | None = None,
    ) -> dict[str, Evaluation]:
        """Let the nodes evaluate the personal models, and the global one if there is one."""
        info = self.info(clients, max(self.rounds - 1, 0))
        received, names = self.download(info), self.names_of(clients)
        position = {name: at for at, name in enumerate(names)}
        shared = self.global_model()
        kind = "none" if shared is None else "sent"
        if shared is not None and _is_sent(received.get("model", {}), shared):
            kind = "received"
        split = "test" if step == "test_step" else "val"
        said = {"split": split, "step": step, "limit": limit}

        def question(some: list[str]) -> Packet:
            at = torch.tensor([position[name] for name in some])
            writer = self.writer(rows(received, at))
            if kind == "sent" and shared is not None:
                writer.add_tree(shared, "global")
            return writer.packet(
                "evaluate", {**self.head(info.rows(at), some), **said, "global": kind}
            )

        found: dict[str, _Values] = {}
        for answer in self.nodes.ask("evaluate", names, question, lambda count: HEADER):
            try:
                results = self._read_evaluation(answer, data, shared is not None)
            except (PacketError, ValueError, TypeError, KeyError, RecursionError) as error:
                self.nodes.say(f"Evaluation without {', '.join(answer.clients)}: {error}.")
                continue
            at = torch.tensor([position[name] for name in answer.clients])
            for prefix, (counts, values) in results.items():
                found.setdefault(prefix, _Values(len(names))).add(at, values, counts)
            if on_clients is not None:
                on_clients(at.tolist())
        merged = {prefix: values.evaluation() for prefix, values in found.items()}
        merged.setdefault("", _Values(len(names)).evaluation())
        if shared is not None:
            merged.setdefault(GLOBAL, merged[""])
        return merged

    def _read_evaluation(
        self, answer: Answer, data: FederatedDataset, has_global: bool
    ) -> dict[str, tuple[list[int], dict[str, tuple[list[float], LogOptions]]]]:
        packet, count = _require(answer, "evaluated"), len(answer.clients)
        packet.require({"federation": str, "rounds": int, "clients": list, "results": dict})
        _compare(packet, federation=self.id, rounds=self.rounds, clients=answer.clients)
        prefixes = packet.meta["results"].keys()
        if "" not in prefixes or prefixes - {"", *([GLOBAL] if has_global else [])}:
            raise PacketError(f"results are of {', '.join(map(repr, prefixes))}")
        held = dict(zip(data.names, data.num_samples.tolist(), strict=True))
        limits = {name: held.get(name, 0) for name in answer.clients}
        return {
            prefix: (
                read_counts(result["counts"], limits, "counts"),
                _read_values(result["values"], count),
            )
            for prefix, result in packet.meta["results"].items()
        }

    def finish(self) -> None:
        """Send the nodes what their clients' personal models are made of."""
        info = self.info(torch.arange(self.num_clients), max(self.rounds - 1, 0))
        received, names = self.download(info), list(self.client_names)
        position = {name: at for at, name in enumerate(names)}

        def question(some: list[str]) -> Packet:
            at = torch.tensor([position[name] for name in some])
            return self.writer(rows(received, at)).packet("finish", self.head(info.rows(at), some))

        for answer in self.nodes.ask("query", names, question, lambda count: HEADER):
            if answer.packet is None or answer.packet.kind != "finished":
                reason = answer.reason or f"answer is {getattr(answer.packet, 'kind', None)!r}"
                self.nodes.say(f"{', '.join(answer.clients)} missed the end: {reason}.")

    def _personal_model(self, client: int | str) -> Model:
        raise RuntimeError(
            f"Expected a client whose state is here, but that of {client!r} is on its node. Run "
            "`lightning-pfl deploy export` there."
        )


class RemoteCohort(Cohort):
    """The clients of a round, on their nodes."""

    federation: ServerFederation

    def __init__(
        self,
        federation: ServerFederation,
        info: ClientInfo,
        received: Tree,
        phases: tuple[Phase, ...],
    ) -> None:
        super().__init__(federation, info, received, phases)
        self.failed: dict[int, str] = {}

    def form(self) -> Form:
        """Say what an upload is made of: that of a client that takes no step, without data."""
        method, info = self.federation.method, self.info.rows(slice(0, 1))
        model = tmap(
            lambda leaf: leaf.to(self.device),
            self.federation.architectures[0].parameter_split.model(),
        )
        state = tmap(lambda leaf: leaf[None].clone(), method.init_client_state(model))
        state = method.init_client_state_rows(state, model, info)
        kept = {name: leaf for name, leaf in state.items() if name not in method.edge_state}
        received = tmap(torch.clone, rows(self.received, slice(0, 1)))
        if method.measures_travel:
            info = replace(info, travel=torch.ones(1, dtype=torch.float64))
        begun = method.client_init(received, kept, info)
        return form_of(method.client_final(received, kept, begun, info)[0], "upload")

    def train(
        self,
        data: FederatedDataset,
        on_clients: OnClients,
        validation: FederatedDataset | None = None,
    ) -> LocalResult:
        """Let the nodes train; a client without a good answer is named in ``failed``."""
        federation, count = self.federation, len(self.info)
        names = federation.names_of(self.info.index)
        position = {name: at for at, name in enumerate(names)}
        form = self.form() if count else {}
        uploads = unflatten(
            (
                (path, torch.zeros(count, *shape, dtype=getattr(torch, dtype)) if dtype else None)
                for path, (shape, dtype) in form.items()
            ),
            "upload",
        )
        loss = torch.full((count,), torch.nan, dtype=torch.float64)
        logged, size = _Values(count), form_nbytes(form)
        batch = self.batches[0]
        version = batch.client_state["version"].clone()

        def question(some: list[str]) -> Packet:
            at = torch.tensor([position[name] for name in some])
            head = federation.head(self.info.rows(at), some)
            return federation.writer(rows(self.received, at)).packet("train", head)

        for answer in federation.nodes.ask(
            "train", names, question, lambda some: HEADER + some * size
        ):
            at = torch.tensor([position[name] for name in answer.clients])
            ids = self.info.index[at].tolist()
            try:
                upload, losses, values, sane = self._read(answer, self.info.rows(at), form)
            except (PacketError, ValueError, TypeError, KeyError, RecursionError) as error:
                self.failed |= dict.fromkeys(ids, str(error))
                continue
            _write_rows(uploads, at, upload)
            loss[at] = torch.tensor(losses, dtype=torch.float64)
            logged.add(at, values)
            version[at] = self.info.round
            self.failed |= {
                k: "client state is not finite"
                for k, fine in zip(ids, sane, strict=True)
                if not fine
            }
            on_clients(at.tolist())
        loss[[position[federation.client_names[k]] for k in self.failed]] = (
            torch.inf
        )  # for the gate
        batch.client_state = {"version": version}
        uploads = tmap(lambda leaf: leaf.to(self.device), uploads)
        found = logged.evaluation()
        batch.work = LocalResult(
            uploads, batch.client_state, found.values, found.options, loss.to(self.device)
        )
        return batch.work

    def _read(
        self, answer: Answer, info: ClientInfo, form: Form
    ) -> tuple[Tree, list[float], dict[str, tuple[list[float], LogOptions]], list[bool]]:
        packet, count = _require(answer, "trained"), len(info)
        packet.require({"federation": str, "round": int, "clients": list, "steps": list})
        packet.require({"loss": list, "sane": list, "logs": dict})
        _compare(
            packet,
            federation=self.federation.id,
            round=info.round,
            clients=answer.clients,
            steps=info.steps.tolist(),
        )
        sane = packet.meta["sane"]
        if len(sane) != count or not all(type(fine) is bool for fine in sane):
            raise PacketError("'sane' isn't true or false for each client")
        losses = read_numbers(packet.meta["loss"], count, "loss", float("inf"))
        return (
            read_form(packet, "upload", form, count),
            losses,
            _read_values(packet.meta["logs"], count),
            sane,
        )

    def accept_uploads(self, work: LocalResult, max_norm: MaxNorm) -> Verdict:
        """Decide whose work counts: of those who answered well, whom the gate accepts."""
        verdict = super().accept_uploads(work, max_norm)
        verdict.rejected |= self.failed
        return verdict


def _write_rows(tree: Tree, at: Tensor, new: Tree) -> None:
    """Write some clients' rows of a ``(clients, ...)`` tree, in place."""
    tmap(lambda all, some: all.index_copy_(0, at, some), tree, new)


class _Values:
    """Logged values of a cohort, as they come from node to node.

    A name counts if at least half of the nodes give it: one node alone can't invent a value that
    stops a run or picks its best checkpoint.
    """

    def __init__(self, clients: int) -> None:
        self.clients, self.nodes = clients, 0
        self.counts = torch.zeros(clients, dtype=torch.int64)
        self.values: dict[str, Tensor] = {}
        self.options: dict[str, Counter[tuple[bool, bool, bool | None]]] = {}

    def add(
        self,
        at: Tensor,
        values: Mapping[str, tuple[list[float], LogOptions]],
        counts: Sequence[int] = (),
    ) -> None:
        """Add the values of the clients of one node."""
        self.nodes += 1
        if counts:
            self.counts[at] = torch.tensor(counts)
        for name, (numbers, options) in values.items():
            gap = torch.full((self.clients,), torch.nan, dtype=torch.float64)
            self.values.setdefault(name, gap)[at] = torch.tensor(numbers, dtype=torch.float64)
            said = (options.prog_bar, options.logger, options.higher_is_better)
            self.options.setdefault(name, Counter())[said] += 1

    def evaluation(self) -> Evaluation:
        """Give the values that count."""
        known = [n for n, said in self.options.items() if 2 * said.total() >= self.nodes]
        return Evaluation(
            {name: self.values[name] for name in known},
            self.counts,
            {name: LogOptions(*self.options[name].most_common(1)[0][0]) for name in known},
        )


def _read_values(found: Any, clients: int) -> dict[str, tuple[list[float], LogOptions]]:
    """Read logged values by name."""
    if not isinstance(found, dict) or len(found) > VALUES:
        raise PacketError(f"logged values aren't at most {VALUES} by name")
    read = {}
    for name, said in found.items():
        if len(name) > VALUES or not name.isprintable():
            raise PacketError("a logged value has a name of another form")
        match said["options"]:
            case [bool(prog_bar), bool(logger), bool() | None as better]:
                options = LogOptions(prog_bar, logger, better)
            case _:
                raise PacketError(f"options of {name!r} are of another form")
        read[name] = (read_numbers(said["values"], clients, name, LARGEST), options)
    return read


def _require(answer: Answer, kind: str) -> Packet:
    if answer.packet is None:
        raise PacketError(answer.reason)
    if answer.packet.kind != kind:
        raise PacketError(f"answer is {answer.packet.kind!r}, not {kind!r}")
    return answer.packet


def _compare(packet: Packet, **expected: Any) -> None:
    for name, value in expected.items():
        if packet.meta[name] != value:
            raise PacketError(f"answer has {name} {str(packet.meta[name])[:100]}, not {value}")


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float))


def _is_sent(received: Tree, shared: Model) -> bool:
    """Whether the global model is what clients receive anyway."""
    return received.keys() == shared.keys() and all(
        leaf.data_ptr() == shared[name].data_ptr() and leaf.shape[1:] == shared[name].shape
        for name, leaf in received.items()
    )


class ServerStrategy(FederatedStrategy):
    """The strategy of a server whose clients are elsewhere."""

    federation_class: ClassVar[type[Federation]] = ServerFederation

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; from then on nodes must keep the versions that it counts on."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        assert isinstance(self.federation, ServerFederation)
        self.federation.durable = self.federation.versions.clone()


class LastRound(Checkpoint):
    """Writes a checkpoint after every round, in the place of the last one.

    Args:
        path: Where to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write it."""
        trainer.save_checkpoint(self.path, weights_only=False)


class Progress(FederatedCallback):
    """Writes a line about every round, and keeps ``status.json`` for ``deploy status``."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self.folder, self.nodes, self.began = folder, nodes, time.monotonic()

    def on_round_start(self, trainer: Any, module: Any, round: Round) -> None:
        """Start the clock."""
        self.began = time.monotonic()

    def on_round_end(self, trainer: Any, module: Any, round: Round) -> None:
        """Print the result of the round."""
        names, seconds = self.nodes.names, time.monotonic() - self.began
        rejected = {names[client]: reason for client, reason in round.rejected.items()}
        values = ", ".join(f"{name} {value:.4g}" for name, value in round.metrics.items())
        self.nodes.say(
            f"Round {round.number + 1} of {trainer.max_epochs}: {len(round.info)} clients"
            f"{''.join(f', without {name} ({why})' for name, why in rejected.items())}"
            f"{', ' if values else ''}{values}, {seconds:.1f} s."
        )
        self.write(trainer, rejected)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the values of the evaluation."""
        found = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if "/" not in name and not name.startswith("train")
        }
        if found:
            said = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            self.nodes.say(f"Evaluation: {said}.")

    def write(self, trainer: Any, rejected: Mapping[str, str], state: str = "running") -> None:
        """Write the status."""
        federation: ServerFederation = trainer.strategy.federation
        status = {
            "state": state,
            "federation": federation.id,
            "rounds": federation.rounds,
            "of": trainer.max_epochs,
            "clients": {
                name: {
                    "here": name in self.nodes.home,
                    "samples": self.nodes.counts[name]["train"].samples,
                    "last_round": int(version),
                    "left_out": rejected.get(name, ""),
                }
                for name, version in zip(self.nodes.names, federation.versions, strict=True)
            },
        }
        write_atomically(self.folder / "status.json", json.dumps(status, indent=1).encode())


def serve(
    settings: Mapping[str, Any],
    line: Line,
    folder: str | Path,
    clients: Mapping[str, str] | Sequence[str],
    timeout: float | None = 600.0,
    max_samples: int = 10**7,
    pause: float = 0.1,
) -> L.Trainer:
    """Fit a recipe on nodes; a run that was interrupted in the same folder is resumed.

    Args:
        settings: The recipe as plain values; its ``data`` aren't used.
        line: The network.
        folder: Where the server keeps checkpoints, logs and the status.
        clients: The federation's clients, in the order of their ids; a mapping says the name of
            the node that may speak for each.
        timeout: Seconds that a question waits for its answer, before the round goes on without the
            client; None for ever.
        max_samples: Samples that a client may have at most.
        pause: Seconds between two looks at the network.

    Raises:
        MisconfigurationException: If the recipe can't be deployed; names the reason.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(text: str) -> None:
        line = f"[{time.monotonic() - began:8.1f} s] {text}"
        print(line, flush=True)
        with (folder / "progress.log").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    bare = {name: value for name, value in settings.items() if name != "data"}
    root = {"default_root_dir": str(folder), "num_sanity_val_steps": 0, "devices": 1}
    begun = _begin_federation(folder, recipe.choose_seed(settings), list(clients))
    cli = recipe.make(bare, f"{__name__}.ServerStrategy", begun["seed"], **root)
    trainer, module = connected(cli.trainer), cli.model
    federation = cast("ServerFederation", cast("ServerStrategy", trainer.strategy).federation)
    method = check_deployable(module, trainer.callbacks)
    owners = clients if isinstance(clients, Mapping) else {}
    names = list(clients)
    nodes = Nodes(line, names, owners, recipe.digest(cli), timeout, max_samples, pause, say)
    federation.nodes, federation.id = nodes, begun["id"]
    last, known = folder / "last.ckpt", folder / "counts.json"
    if known.is_file():
        nodes.counts = _read_counts(known)
    nodes.wait()
    kept = {n: {s: asdict(c) for s, c in splits.items()} for n, splits in nodes.counts.items()}
    write_atomically(known, json.dumps(kept).encode())
    said = {key: begun[key] for key in ("seed", "names")} | {"federation": federation.id}
    if method.needs_sample_counts:
        said["num_samples"] = [nodes.counts[name]["train"].samples for name in names]
    joined = Writer()
    joined.add_tree(ParameterSplit(module).model(), "model")
    join = joined.packet("join", {**said, "digest": nodes.digest})
    nodes.join = lambda: join
    val_split = str(settings.get("data", {}).get("init_args", {}).get("val_split", "train"))
    data = CountedDataModule(names, nodes.counts, val_split)
    progress = Progress(folder, nodes)
    trainer.callbacks += [progress, LastRound(last)]
    if resumed := last.is_file():
        say("Resuming from the last checkpoint.")
    trainer.fit(module, datamodule=data, ckpt_path=str(last) if resumed else None)
    federation.finish()
    progress.write(trainer, {}, "finished")
    say(f"Finished after {federation.rounds} rounds.")
    return trainer


def _begin_federation(folder: Path, seed: int, names: list[str]) -> dict[str, Any]:
    """Begin a federation, or go on with the one of the folder: its id, seed and clients."""
    path = folder / "federation.json"
    if not path.is_file():
        begun = {"id": secrets.token_hex(8), "seed": seed, "names": names}
        write_atomically(path, json.dumps(begun).encode())
        return begun
    found: dict[str, Any] = json.loads(path.read_text())
    if found["names"] != names:
        raise MisconfigurationException(
            f"Expected the clients of the federation in {str(folder)!r}, {found['names']}, but got "
            f"{names}. Take another folder for another federation."
        )
    return found


def _read_counts(path: Path) -> dict[str, dict[str, Counts]]:
    return {
        name: {split: Counts(**numbers) for split, numbers in splits.items()}
        for name, splits in json.loads(path.read_text()).items()
    }


def check_deployable(module: Any, callbacks: Sequence[Any]) -> Method:
    """Refuse what a deployment can't run, and find the method among the callbacks.

    Args:
        module: The recipe's module.
        callbacks: The Trainer's callbacks.

    Raises:
        MisconfigurationException: Names the reason.
    """
    method: Method = next((c for c in callbacks if isinstance(c, Method)), FedAvg())
    name = type(method).__name__
    if isinstance(module, ClientModules):
        raise MisconfigurationException(
            "Expected one module for all clients, but got ClientModules, whose nodes would have to "
            "know each other's modules. Simulate it, or deploy one module."
        )
    if any(method.exchanges(round) for round in range(ROUNDS)):
        raise MisconfigurationException(
            f"Expected a method whose clients talk to the server alone, but those of {name} write "
            "to each other: every message would pass through the server, which isn't meant to read "
            "it. Simulate it, or deploy a method with a server, such as FedU or FedMAP."
        )
    if name in READS_STATES:
        raise MisconfigurationException(
            f"Expected a method whose server needs no client states, but {name} measures them "
            "every round, and they stay on the nodes. Simulate it, or deploy FedRep."
        )
    return method
