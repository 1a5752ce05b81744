"""A node: local training, evaluation and client states, where the data are."""

from __future__ import annotations

import hashlib
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch import Tensor

from lightning_pfl import __version__
from lightning_pfl._lightning import set_rounds
from lightning_pfl.contract.records import ClientInfo, Evaluation, LogOptions
from lightning_pfl.core.files import write_atomically
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.core.tree import Model, finite, tmap
from lightning_pfl.data.datasets import FederatedDataset, as_federated, label_counts
from lightning_pfl.deploy import recipe
from lightning_pfl.deploy.data import SPLITS, NodeDataModule, count, in_federation
from lightning_pfl.deploy.node_federation import NodeFederation, NodeStrategy
from lightning_pfl.deploy.packet import Packet, PacketError
from lightning_pfl.deploy.privacy import add_noise, check_privacy
from lightning_pfl.deploy.secure import Masks, average, from_bytes, to_bytes
from lightning_pfl.deploy.states import LostStateError
from lightning_pfl.deploy.wire import Writer, read_rows, read_tree
from lightning_pfl.engine.minibatches import count_ready_batches
from lightning_pfl.engine.optimizer_options import learning_rates
from lightning_pfl.engine.watching import in_mode
from lightning_pfl.federation.evaluate import GLOBAL
from lightning_pfl.methods.base import Method
from lightning_pfl.methods.fedavg import FedAvg
from lightning_pfl.trainer.data import EvaluationSets, move_to_device

PROTOCOL = 1
"""The version of what server and nodes say to each other."""
FEDERATION = re.compile(r"[0-9a-f]{16}")
"""A federation's id; it names a folder, so nothing else is taken for one."""
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "callbacks": [],
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "devices": 1,
    "num_nodes": 1,
    "min_epochs": None,
    "max_time": None,
}
"""Flags of a node's Trainer: the server logs, validates and writes checkpoints."""

log = logging.getLogger(__name__)


class RefusedError(RuntimeError):
    """A request of the server that a node can't fulfil; the text goes to the server."""


class _SetupAlone(Callback):
    """Ends a fit before its first round."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


class Node:
    """The handling of messages on a node, from bytes to bytes.

    Args:
        settings: The recipe as plain values; its ``data`` are this node's.
        folder: Where the node keeps its clients' states.
        clients: Its clients, by the names that the server knows.
        share: Names of the logged values that leave the node; None for all of them.
        privacy: Noise for uploads, as for :func:`~lightning_pfl.deploy.privacy.check_privacy`;
            None for no noise.
        secure: Whether it trains with secure aggregation alone.

    Attributes:
        finished: Whether the server has said that it has finished, and hasn't greeted since.

    Raises:
        ValueError: If the data have no such clients, or if the method can't use the noise.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        folder: str | Path,
        clients: Sequence[str],
        share: Sequence[str] | None = None,
        privacy: Mapping[str, float] | None = None,
        secure: bool = False,
    ) -> None:
        self.privacy, self.secure = privacy, secure
        self.settings, self.folder, self.clients = dict(settings), Path(folder), list(clients)
        self.share = None if share is None else frozenset(share)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        cli = self._make()
        self.digest = recipe.digest_sections(cli)
        method = next((c for c in cli.trainer.callbacks if isinstance(c, Method)), FedAvg())
        if privacy is not None:
            check_privacy(privacy, method)
        self._splits = self._load(cli)
        self._rows = self._find(self._splits["train"])
        self._labels = self._count_labels(method) if method.needs_label_counts else None
        self._placed: dict[str, FederatedDataset] = {}
        self._fresh: Any = cli  # for the first federation
        self.federation: NodeFederation | None = None
        self.id = ""
        self.finished = False
        self._masks: Masks | None = None

    def _make(self) -> Any:
        return recipe.make(self.settings, f"{NodeStrategy.__module__}.NodeStrategy", 0, **QUIET)

    @staticmethod
    def _load(cli: Any) -> dict[str, FederatedDataset]:
        module = cli.datamodule
        module.prepare_data()
        module.setup("fit")
        found = {}
        for split in SPLITS:
            try:
                source = getattr(module, f"{split}_dataloader")()
            except MisconfigurationException:  # Lightning's way to say that there is none
                continue
            what = f"{split}_dataloader"
            if split != "train":
                sets = EvaluationSets.from_any(source, what)
                if sets.further or sets.central:
                    raise ValueError(
                        f"Expected `{what}` to return one DataLoader per client, as a node "
                        "evaluates one set of each split, but got several sets or central samples. "
                        "Return the clients' own set; evaluate others after the run."
                    )
            found[split] = as_federated(source, what=what)
        return {**found, "train": count_ready_batches(found["train"])}

    def _find(self, data: FederatedDataset) -> dict[str, int]:
        """Rows of this node's clients: by their names, or one after another."""
        if all(name in data.names for name in self.clients):
            return {name: data.names.index(name) for name in self.clients}
        if data.num_clients == len(self.clients):
            return {name: row for row, name in enumerate(self.clients)}
        raise ValueError(
            f"Expected the data to hold the clients {', '.join(self.clients)}, but got "
            f"{data.num_clients} clients: {', '.join(data.names[:5])}. Name the node's clients as "
            "the data do, or give data that hold as many clients as the node has."
        )

    def _count_labels(self, method: Method) -> dict[str, list[int]]:
        """Count each client's training samples by class."""
        held = label_counts(self._splits["train"])
        if held is None:
            raise ValueError(
                f"Expected training data whose classes can be counted, as {type(method).__name__} "
                "needs each client's number of samples by class, but got other data. Use "
                "FederatedDataModule."
            )
        return {name: held[row].tolist() for name, row in self._rows.items()}

    # --- messages ---------------------------------------------------------------------------------

    def handle(self, data: bytes) -> bytes:
        """Answer a message; of a failure, give the reason and nothing of the data."""
        try:
            packet = Packet.from_bytes(data)
            answers: dict[str, Callable[[Packet], Packet | bytes]] = {
                "hello": self.hello,
                "join": lambda packet: self.join(packet, data),
                "mask": self.mask,
                "train": lambda packet: self.train(packet, data),
                "evaluate": lambda packet: self.evaluate(packet, data),
                "finish": lambda packet: self.finish(packet, data),
            }
            if packet.kind not in answers:
                raise RefusedError(f"no answer to {packet.kind!r}")
            answer: Packet | bytes = answers[packet.kind](packet)
        except (RefusedError, LostStateError, PacketError) as error:
            answer = self._refuse(str(error))
        except Exception as error:
            # The text of an error may quote data: it stays in this node's log.
            log.exception("A message of the server failed.")
            answer = self._refuse(f"{type(error).__name__} in this node; its log says more")
        return answer if isinstance(answer, bytes) else answer.to_bytes()

    def _refuse(self, reason: str) -> Packet:
        log.warning("Refused: %s.", reason)
        return Packet("refused", {"reason": reason})

    def hello(self, packet: Packet) -> Packet:
        """Send the names and numbers of samples of this node's clients."""
        self.finished = False  # it goes on, or has lost the last answer and will ask again
        counts = {
            name: {
                split: vars(count(self._splits.get(split), self._rows[name])) for split in SPLITS
            }
            for name in self.clients
        }
        said = {"protocol": PROTOCOL, "version": __version__, "digest": self.digest}
        labels = {} if self._labels is None else {"labels": self._labels}
        return Packet("hello", {**said, "counts": counts, **labels})

    def join(self, packet: Packet, data: bytes) -> Packet:
        """Become part of a federation, with the initial model that its server sends."""
        packet.require({"federation": str, "names": list, "seed": int, "digest": dict})
        meta = packet.meta
        if not FEDERATION.fullmatch(meta["federation"]):
            raise RefusedError("the federation's id isn't 16 hexadecimal digits")
        if wrong := [k for k, v in meta["digest"].items() if self.digest.get(k) != v]:
            raise RefusedError(f"this node has another recipe: {', '.join(wrong)} differs")
        if missing := [name for name in self.clients if name not in meta["names"]]:
            raise RefusedError(f"the federation has no client {missing[0]!r}")
        folder = self.folder / meta["federation"]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._set_up(packet, folder)
        write_atomically(folder / "join.bin", data)
        self.id = meta["federation"]
        return Packet("joined", {"federation": self.id})

    def resume(self, federation: str) -> None:
        """Go on after a restart of this node, with what the server sent when the node joined."""
        path = self.folder / federation / "join.bin"
        if not FEDERATION.fullmatch(federation) or not path.is_file():
            raise RefusedError(f"this node hasn't joined the federation {federation!r}")
        data = path.read_bytes()
        self._set_up(Packet.from_bytes(data), path.parent)
        self.id = federation

    def _set_up(self, packet: Packet, folder: Path) -> None:
        meta = packet.meta
        cli, self._fresh = self._fresh or self._make(), None
        trainer, module = cli.trainer, cli.model
        trainer.strategy.take_seed(int(meta["seed"]))
        federation: NodeFederation = trainer.strategy.federation
        federation.folder = folder
        if (samples := meta.get("num_samples")) is not None:
            federation.everybodys_samples = torch.tensor(samples)
        load_model(module, read_tree(packet, "model"))
        names = [str(name) for name in meta["names"]]
        self._placed = {
            split: in_federation(data, names, self._rows) for split, data in self._splits.items()
        }
        trainer.callbacks.append(_SetupAlone())
        with warnings.catch_warnings():
            # They are the clients of other nodes.
            warnings.filterwarnings("ignore", message="Clients without training samples")
            trainer.fit(module, datamodule=NodeDataModule(self._placed))
        self._placed = {
            split: move_to_device(data, trainer) for split, data in self._placed.items()
        }
        train = self._placed["train"]
        federation.training_data = lambda: train
        if (labels := meta.get("labels")) is not None:
            known = federation.method.known.has_training_data
            federation.know_data(known, torch.tensor(labels))
        self.trainer, self.module, self.federation = trainer, module, federation
        self.names = names

    def _begin(self, packet: Packet) -> tuple[NodeFederation, ClientInfo]:
        """Take over the facts of a message about the round and its clients."""
        packet.require({"federation": str, "round": int, "rounds": int, "clients": list})
        packet.require({"num_samples": list, "steps": list, "weights": list, "optimizer": list})
        packet.require({"versions": dict, "keep": dict})
        meta = packet.meta
        if meta["federation"] != self.id or self.federation is None:
            self.resume(meta["federation"])
        federation = self.federation
        assert federation is not None
        if strangers := [name for name in meta["clients"] if name not in self.clients]:
            raise RefusedError(f"client {strangers[0]!r} isn't here")
        ids = torch.tensor([self.names.index(name) for name in meta["clients"]])
        architecture = federation.architectures[0]
        assert architecture.optimizer is not None  # the fit has made it
        _set_optimizer(architecture.optimizer, meta["optimizer"])
        self.module.to(federation.settings.device)
        set_rounds(self.trainer.fit_loop, finished=meta["round"], begun=meta["round"])
        federation.rounds, federation.clients = meta["rounds"], ids
        device = federation.settings.device
        received = read_rows(packet, "received", len(ids))
        federation.received = tmap(lambda leaf: leaf.to(device), received)
        ids_of = {name: self.names.index(name) for name in meta["clients"]}
        federation.states.versions = {ids_of[k]: int(v) for k, v in meta["versions"].items()}
        federation.states.forget(
            {ids_of[k]: [int(version) for version in v] for k, v in meta["keep"].items()}
        )
        return federation, ClientInfo(
            ids,
            torch.tensor(meta["num_samples"]),
            torch.tensor(meta["steps"]),
            torch.tensor(meta["weights"], dtype=torch.float64),
            meta["round"],
            len(self.names),
            learning_rates(architecture.optimizer),
        )

    def mask(self, packet: Packet) -> Packet:
        """Answer a stage of secure aggregation."""
        self._begin(packet)
        arrays = {"record": self._answer_masked(packet, None)}
        return Packet("masked", {"federation": self.id}, arrays)

    def _answer_masked(
        self, packet: Packet, model: Callable[[], tuple[Tensor, float]] | None
    ) -> NDArray[Any]:
        packet.require({"parties": dict, "clients": list})
        if "record" not in packet.arrays:
            raise PacketError("'record' is missing")
        if self._masks is None:
            self._masks = Masks()
        party = packet.meta["parties"][packet.meta["clients"][0]]
        record = from_bytes(packet.arrays["record"])
        return to_bytes(self._masks.answer(int(party), record, model))

    def train(self, packet: Packet, data: bytes) -> Packet | bytes:
        """Train the clients, keep their states as versions of this round, and send the uploads.

        The same question again gets the same answer.
        """
        question = hashlib.sha256(data).hexdigest()
        federation, info = self._begin(packet)
        answered = federation.folder / "answer.bin"
        if answered.is_file() and (known := answered.read_bytes())[:64] == question.encode():
            return known[64:]
        masked = "record" in packet.arrays
        if self.secure and not masked:
            raise RefusedError("this node trains with secure aggregation alone")
        phases, train = federation.method.phases(info.round), self._placed["train"]
        info.steps = federation.count_steps(train, info.index, phases)
        cohort = federation.cohort(info, federation.received, phases)
        with torch.enable_grad():
            work = cohort.train(train, lambda *_: None, self._placed.get("val"))
        federation.states.next = info.round
        cohort.store()
        sane = torch.ones(len(info), dtype=torch.bool) & finite(work.client_state).cpu()
        writer = Writer()
        uploads = work.uploads
        if self.privacy is not None:
            uploads = add_noise(uploads, federation.received, self.privacy)
        if masked:
            if not bool(sane.all()):
                raise RefusedError("client state is not finite")
            model, weights = uploads["model"], info.weights
            record = self._answer_masked(packet, lambda: average(model, weights))
            writer.arrays["record"] = record
            integers = {n: leaf for n, leaf in model.items() if not leaf.is_floating_point()}
            uploads = {"model": integers}
        writer.add_tree(uploads, "upload")
        answer = writer.packet(
            "trained",
            {
                "federation": self.id,
                "round": info.round,
                "clients": packet.meta["clients"],
                "steps": info.steps.tolist(),
                "loss": work.loss.double().cpu().tolist(),
                "sane": sane.tolist(),
                "logs": self._shared(work.logs, work.options),
            },
        ).to_bytes()
        write_atomically(answered, question.encode() + answer)
        return answer

    def evaluate(self, packet: Packet, data: bytes) -> Packet:
        """Evaluate the personal models, and the global one if there is one."""
        packet.require({"split": str, "step": str, "limit": (int, float), "global_model": str})
        federation, info = self._begin(packet)
        write_atomically(federation.folder / "latest.bin", data)
        if (split := self._placed.get(packet.meta["split"])) is None:
            raise RefusedError(f"this node has no {packet.meta['split']} data")
        received = federation.received.get("model", {})
        device = federation.settings.device
        match packet.meta["global_model"]:
            case "received":
                federation.everybodys = {name: leaf[0] for name, leaf in received.items()}
            case "sent":
                shared = read_tree(packet, "global")
                federation.everybodys = tmap(lambda leaf: leaf.to(device), shared)
            case _:
                federation.everybodys = None
        key = derive(federation.seed, "evaluation", federation.rounds)
        with in_mode(self.module, training=False), torch.no_grad(), seeded(key):
            found = federation.evaluate(
                info.index, info.index, split, packet.meta["step"], packet.meta["limit"]
            )
        if found.get(GLOBAL) is found[""]:  # nothing travels twice
            del found[GLOBAL]
        answer = {"federation": self.id, "rounds": packet.meta["rounds"]}
        results = {prefix: self._result(result) for prefix, result in found.items()}
        said = {**answer, "clients": packet.meta["clients"], "results": results}
        return Packet("evaluated", said)

    def finish(self, packet: Packet, data: bytes) -> Packet:
        """Keep what the server sends last; personal models are made of it."""
        federation, _ = self._begin(packet)
        write_atomically(federation.folder / "latest.bin", data)
        self.finished = True
        return Packet("finished", {"federation": self.id})

    def _shared(
        self, values: Mapping[str, Tensor], options: Mapping[str, LogOptions]
    ) -> dict[str, Any]:
        """Select the values that may leave this node, with the options of their logging."""
        return {
            name: {
                "values": value.double().cpu().tolist(),
                "options": list(vars(options.get(name, LogOptions())).values()),
            }
            for name, value in values.items()
            if self.share is None or name in self.share
        }

    def _result(self, result: Evaluation) -> dict[str, Any]:
        return {
            "counts": result.counts.tolist(),
            "values": self._shared(result.values, result.options),
        }

    # --- what the node's owner asks for -----------------------------------------------------------

    def personal_model(self, client: str, federation: str) -> dict[str, Any]:
        """Make a client's personal model, as a ``state_dict`` of the user's module.

        Args:
            client: Its name.
            federation: The federation's id.

        Raises:
            RefusedError: If the server hasn't sent the federation's model for it yet.
        """
        latest = self.folder / federation / "latest.bin"
        if not latest.is_file():
            raise RefusedError(f"the server hasn't finished or evaluated {federation!r} yet")
        found, _ = self._begin(Packet.from_bytes(latest.read_bytes()))
        return found.client_state_dict(client)


def load_model(module: torch.nn.Module, model: Model) -> None:
    """Write an initial model into a module, in place.

    Raises:
        PacketError: If an entry is missing, or of another shape or dtype.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in model.items():
        if name not in state or state[name].shape != value.shape:
            raise PacketError(f"the initial model has {name!r} {tuple(value.shape)}")
        state[name].data.copy_(value)


def _set_optimizer(template: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give the clients' optimizer the settings that the server's schedulers have left."""
    for group, theirs in zip(template.param_groups, groups, strict=True):
        for name, value in theirs.items():
            group[name] = tuple(value) if isinstance(value, list) else value
