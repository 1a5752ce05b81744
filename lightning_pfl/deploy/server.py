"""The server of a deployment: an ordinary ``Trainer.fit`` whose clients are elsewhere."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, cast

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint

from lightning_pfl._lightning import connected
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import Round
from lightning_pfl.core.files import write_atomically
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.deploy import recipe
from lightning_pfl.deploy.data import CountedDataModule, Counts
from lightning_pfl.deploy.nodes import Line, Nodes
from lightning_pfl.deploy.packet import Packet
from lightning_pfl.deploy.remote import ServerFederation
from lightning_pfl.deploy.wire import Writer
from lightning_pfl.federation.federation import Federation
from lightning_pfl.methods.base import Method
from lightning_pfl.methods.fedavg import FedAvg
from lightning_pfl.models.client_modules import ClientModules
from lightning_pfl.trainer.strategy import FederatedStrategy

ROUNDS = 64
"""Rounds in which a method is expected to show all kinds of its rounds."""


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
    secure: float | None = None,
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
        secure: The clipping range of secure aggregation, which needs to know the nodes of
            ``clients``; None for models as they are.

    Raises:
        MisconfigurationException: If the recipe can't be deployed; names the reason.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    say = _teller(folder / "progress.log")
    bare = {name: value for name, value in settings.items() if name != "data"}
    root = {"default_root_dir": str(folder), "num_sanity_val_steps": 0, "devices": 1}
    begun = _begin_federation(folder, recipe.choose_seed(settings), list(clients))
    cli = recipe.make(bare, f"{__name__}.ServerStrategy", begun["seed"], **root)
    trainer, module = connected(cli.trainer), cli.model
    federation = cast("ServerFederation", cast("ServerStrategy", trainer.strategy).federation)
    method = check_deployable(module, trainer.callbacks)
    _check_settings(federation, method, secure)
    owners = clients if isinstance(clients, Mapping) else {}
    names = list(clients)
    nodes = Nodes(
        line,
        names,
        owners,
        recipe.digest_sections(cli),
        timeout=timeout,
        max_samples=max_samples,
        needs_labels=method.needs_label_counts,
        pause=pause,
        say=say,
    )
    federation.nodes, federation.id, federation.secure = nodes, begun["id"], secure
    last, known = folder / "last.ckpt", folder / "counts.json"
    if known.is_file():
        _read_numbers(known, nodes)
    nodes.wait()
    _write_numbers(known, nodes)
    join = _invitation(begun, module, method, nodes)
    nodes.join = lambda: join
    val_split = str(settings.get("data", {}).get("init_args", {}).get("val_split", "train"))
    data = CountedDataModule(names, nodes.counts, nodes.labels, val_split)
    progress = Progress(folder, nodes)
    trainer.callbacks += [progress, LastRound(last)]
    if resumed := last.is_file():
        say("Resuming from the last checkpoint.")
    trainer.fit(module, datamodule=data, ckpt_path=str(last) if resumed else None)
    federation.finish()
    progress.write(trainer, {}, "finished")
    say(f"Finished after {federation.rounds} rounds.")
    return trainer


def _teller(path: Path) -> Callable[[str], None]:
    """Return a function that prints a text with the seconds so far, and adds it to a file."""
    began = time.monotonic()

    def say(text: str) -> None:
        line = f"[{time.monotonic() - began:8.1f} s] {text}"
        print(line, flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    return say


def _check_settings(federation: ServerFederation, method: Method, secure: float | None) -> None:
    """Raise an error for settings of a recipe that can't be deployed."""
    if secure is not None and not method.averages_models:
        raise MisconfigurationException(
            f"Expected a method whose server uses the mean of the uploaded models alone, but got "
            f"{type(method).__name__} with `secure_aggregation`. Use FedAvg, FedRep or Ditto, say, "
            "or remove `secure_aggregation`."
        )
    if federation.keeps_optimizers:
        raise MisconfigurationException(
            "Expected keep_optimizer_state=False in a deployment, whose nodes keep client states "
            "alone, but got True. Leave it out."
        )
    if federation.overlaps_evaluation:
        raise MisconfigurationException(
            "Expected overlap_evaluation=False in a deployment, whose nodes evaluate and train, "
            "but got True. Leave it out."
        )


def _invitation(
    begun: Mapping[str, Any], module: L.LightningModule, method: Method, nodes: Nodes
) -> Packet:
    """Make the message by which a node joins: the initial model, and what clients must know."""
    said = {"seed": begun["seed"], "names": begun["names"], "federation": begun["id"]}
    if method.needs_sample_counts:
        said["num_samples"] = [nodes.counts[name]["train"].samples for name in nodes.names]
    if nodes.labels:
        classes = max(map(len, nodes.labels.values()))
        held = [nodes.labels[name] for name in nodes.names]
        said["labels"] = [some + [0] * (classes - len(some)) for some in held]
    joined = Writer()
    joined.add_tree(ParameterSplit(module).model(), "model")
    return joined.packet("join", {**said, "digest": nodes.digest})


def _begin_federation(folder: Path, seed: int, names: list[str]) -> dict[str, Any]:
    """Begin a federation, or go on with the one of the folder: its id, seed and clients."""
    path = folder / "federation.json"
    if not path.is_file():
        if (folder / "last.ckpt").is_file():
            raise MisconfigurationException(
                f"Expected {str(path)!r} beside last.ckpt, as nodes know the federation by its id, "
                "but there is none. Bring it back, or take another folder for another federation."
            )
        begun = {"id": secrets.token_hex(8), "seed": seed, "names": names}
        write_atomically(path, json.dumps(begun).encode())
        return begun
    found = _read_json(path, "Bring it back from a copy")
    if found["names"] != names:
        raise MisconfigurationException(
            f"Expected the clients of the federation in {str(folder)!r}, {found['names']}, but got "
            f"{names}. Take another folder for another federation."
        )
    return found


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    """Read a file of this folder.

    Raises:
        ValueError: If it is damaged; says what to do.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"Expected {str(path)!r} to be as it was written, but it is damaged: {error}. {advice}."
        ) from error
    return found


def _write_numbers(path: Path, nodes: Nodes) -> None:
    """Keep the numbers of the nodes' data, for a server that starts again."""
    counts = {n: {s: asdict(c) for s, c in splits.items()} for n, splits in nodes.counts.items()}
    write_atomically(path, json.dumps({"counts": counts, "labels": nodes.labels}).encode())


def _read_numbers(path: Path, nodes: Nodes) -> None:
    """Undo :func:`_write_numbers`."""
    found = _read_json(path, "Remove it: the nodes say their numbers again")
    nodes.labels = found["labels"]
    nodes.counts = {
        name: {split: Counts(**numbers) for split, numbers in splits.items()}
        for name, splits in found["counts"].items()
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
    if method.needs_public_data:
        raise MisconfigurationException(
            f"Expected a method without public samples, but {name} needs them on the server and "
            "all nodes. Simulate it, or deploy FedRep."
        )
    if method.measures_client_states:
        raise MisconfigurationException(
            f"Expected a method whose server needs no client states, but {name} measures them "
            "every round, and they stay on the nodes. Simulate it, or deploy FedRep."
        )
    for callback in callbacks:
        if getattr(callback, "reads_clients", False):
            raise MisconfigurationException(
                f"Expected callbacks that need no samples and states of clients, but got "
                f"{type(callback).__name__}, and these stay on the nodes. Remove it from the "
                "recipe, or simulate."
            )
    return method
