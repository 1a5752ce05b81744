"""Federated runs through ``Trainer.fit`` without output and files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lightning_pfl.contract.callback import FederatedCallback, require_federation
from lightning_pfl.contract.records import Round
from lightning_pfl.core.mixture import is_mixed
from lightning_pfl.core.tree import Model, Tree, tmap
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.federation import Federation
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.quadratic import QuadraticModule
from lightning_pfl.trainer.strategy import FederatedStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Flags of a Trainer on the CPU that prints nothing and writes no file."""


class Recorder(FederatedCallback):
    """Keeps copies of the trees of each round.

    Attributes:
        rounds: The rounds, as they were after the server's update.
        banks: All clients' states before round 0 and after each round, ``(num_clients, ...)``.
        servers: The server's tree before round 0 and after each round.
    """

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.banks: list[Tree] = []
        self.servers: list[Tree] = []

    def on_round_start(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Keep the state before the first round."""
        if not self.banks:
            self._record(trainer)

    def on_round_end(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Keep the round and the state after it."""
        received = tmap(torch.clone, round.received or {})
        uploads = tmap(torch.clone, round.uploads or {})
        kept = Round(
            round.number, round.info, received, uploads, dict(round.rejected), dict(round.metrics)
        )
        kept.bytes_down, kept.bytes_up = round.bytes_down, round.bytes_up
        kept.bytes_exchanged = round.bytes_exchanged
        self.rounds.append(kept)
        self._record(trainer)

    def _record(self, trainer: L.Trainer) -> None:
        federation = require_federation(trainer, self)
        self.banks.append(tmap(torch.clone, federation.client_states.tree))
        self.servers.append(tmap(torch.clone, federation.server))


@dataclass
class Fit:
    """The results of a run.

    Attributes:
        trainer, module, strategy: The objects that took part.
        recorder: What went through each round.
    """

    trainer: L.Trainer
    module: L.LightningModule
    strategy: FederatedStrategy
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def federation(self) -> Federation:
        """The federation of the run."""
        return self.strategy.federation

    @property
    def server(self) -> Tree:
        """The server's tree."""
        return self.federation.server

    @property
    def client_state(self) -> Tree:
        """All clients' states, ``(num_clients, ...)``."""
        return self.federation.client_states.tree

    @property
    def models(self) -> Model:
        """All clients' personal models, ``(num_clients, ...)``; with the others of a mixture."""
        models = personal_models(self.federation, torch.arange(self.federation.num_clients))
        if is_mixed(models):
            return models
        each = [self.federation.client_state_dict(name) for name in self.federation.client_names]
        return {name: torch.stack([one[name] for one in each]) for name in each[0]}

    @property
    def metrics(self) -> dict[str, float]:
        """The final values of ``trainer.callback_metrics``."""
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def save(self, path: Path) -> Path:
        """Write a checkpoint and return its path."""
        with quiet():
            self.trainer.save_checkpoint(path)
        return path


def fit(
    method: Method,
    data: FederatedDataset | L.LightningDataModule,
    module: L.LightningModule | None = None,
    rounds: int = 1,
    engine: str = "vectorized",
    participation: float | int = 1.0,
    seed: int = 0,
    val_data: FederatedDataset | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Path | None = None,
    options: dict[str, Any] | None = None,
    **flags: Any,
) -> Fit:
    """Train for some rounds, on the CPU by default.

    Args:
        method: The method.
        data: The training split, or a data module.
        module: The user's module; None for ``QuadraticModule()``.
        rounds: Communication rounds, counted from round 0 also for a resumed run.
        engine: As of :class:`~lightning_pfl.FederatedStrategy`.
        participation: Clients per round: a fraction or a count.
        seed: The run's seed.
        val_data: The validation split; None for no validation.
        callbacks: Further callbacks.
        ckpt_path: A checkpoint to go on from.
        options: Further arguments of :class:`~lightning_pfl.FederatedStrategy`.
        **flags: Flags of the Trainer, which override the quiet ones.
    """
    module = QuadraticModule() if module is None else module
    strategy = FederatedStrategy(method, participation, engine, seed, **(options or {}))  # type: ignore[arg-type]
    recorder = Recorder()
    flags = {"num_sanity_val_steps": 0, **flags}
    with quiet():
        trainer = quiet_trainer(strategy, rounds, callbacks=[recorder, *callbacks], **flags)
        trainer.fit(module, data, val_data, ckpt_path=ckpt_path)
    return Fit(trainer, module, strategy, recorder)


def quiet_trainer(strategy: FederatedStrategy, rounds: int, **flags: Any) -> L.Trainer:
    """Make a Trainer on the CPU that writes no file and prints nothing.

    Args:
        strategy: The federated strategy.
        rounds: Communication rounds.
        **flags: Flags of the Trainer, which override these.
    """
    return L.Trainer(max_epochs=rounds, strategy=strategy, **{**QUIET, **flags})


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's log lines and its advice for runs without validation."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for text in (
                ".*but have no `val_dataloader`.*",
                ".*are never sampled.*",
                ".*take part without local steps.*",
                ".*have a model in eval mode.*",
                ".*in eval mode at the start of training.*",
            ):
                warnings.filterwarnings("ignore", message=text)
            yield
    finally:
        logger.setLevel(level)
