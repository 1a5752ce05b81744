"""Resuming with other settings: refused where the server's state depends on them, else said. And
what a round had logged before the run was interrupted inside it."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_pfl.errors import CheckpointMismatchError
from lightning_pfl.methods import SCAFFOLD, FedAvg, FedProx
from lightning_pfl.methods.base import Method
from tests.loop.setting import Quadratic, points, trainer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "None": None,
    "SGD": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def saved(method: Method, folder: Path) -> str:
    path = str(folder / "round1.ckpt")
    run = trainer(method, max_epochs=1)
    run.fit(Quadratic(), points(), points())
    run.save_checkpoint(path)
    return path


def resume(method: Method, path: str) -> Any:
    run = trainer(method, max_epochs=2)
    run.fit(Quadratic(), points(), points(), ckpt_path=path)
    return run


@pytest.mark.parametrize(
    ("before", "now"),
    [(a, b) for a in OPTIMIZERS for b in OPTIMIZERS if a != b],
)
def test_another_server_optimizer_is_refused(before: str, now: str, tmp_path: Path) -> None:
    path = saved(FedAvg(server_optimizer=OPTIMIZERS[before]), tmp_path)
    match = rf"run with server_optimizer={now}, but .* run with server_optimizer={before}\."
    with pytest.raises(CheckpointMismatchError, match=match):
        resume(FedAvg(server_optimizer=OPTIMIZERS[now]), path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_server_optimizer_goes_on_silently(name: str, tmp_path: Path) -> None:
    path = saved(FedAvg(server_optimizer=OPTIMIZERS[name]), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*other settings.*")
        resumed = resume(FedAvg(server_optimizer=OPTIMIZERS[name]), path)
    whole = trainer(FedAvg(server_optimizer=OPTIMIZERS[name]), max_epochs=2)
    whole.fit(Quadratic(), points(), points())
    assert torch.equal(whole.strategy.server["model"]["w"], resumed.strategy.server["model"]["w"])


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (FedProx(0.5), FedProx(0.25), "of FedProx .* prox_weight was 0.5, is 0.25"),
        (FedAvg(), FedAvg(local_epochs=3), "local_epochs was 1, is 3"),
        (SCAFFOLD(server_lr=1.0), SCAFFOLD(server_lr=0.5), "server_lr was 1.0, is 0.5"),
        (
            FedAvg(server_optimizer=OPTIMIZERS["Adam"]),
            FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=0.3)),
            r"server_optimizer.lr was 0.1, is 0.3\.",
        ),
    ],
)
def test_other_settings_are_said(before: Method, now: Method, said: str, tmp_path: Path) -> None:
    path = saved(before, tmp_path)
    with pytest.warns(UserWarning, match=f"continues with other settings .*{said}"):
        assert resume(now, path).strategy.rounds == 2


class Stop(Callback):
    """Ends the run before the validation of a round."""

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 2 and not trainer.sanity_checking:
            raise InterruptedError


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_resumed_inside_a_round_logs_what_the_round_had_logged(tmp_path: Path) -> None:
    def run(name: str, *callbacks: Callback, **settings: Any) -> dict[int, dict[str, str]]:
        logger = CSVLogger(tmp_path, name)
        folder = tmp_path / f"checkpoints of the {'whole' if name == 'whole' else 'parts'}"
        saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
        new = trainer(
            max_epochs=4,
            logger=logger,
            enable_checkpointing=True,
            callbacks=[*callbacks, saver],
        )
        with suppress(InterruptedError):
            new.fit(Quadratic(), points(), points(), **settings)
        logger.save()
        with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
            found = [row for row in csv.DictReader(file) if row.get("train_loss")]
        names = ("step", "train_loss", "round/clients", "round/bytes_up")
        return {int(row["epoch"]): {name: row[name] for name in names} for row in found}

    whole = run("whole")
    first = run("first", Stop())
    second = run("second", ckpt_path="last")
    assert [(round, row["step"]) for round, row in whole.items()] == [(k, str(k)) for k in range(4)]
    assert len({row["train_loss"] for row in whole.values()}) == 4
    assert {**first, **second} == whole
    assert list(second) == [2, 3]


class More(FedProx):
    """Has the name of a method and another server."""

    def init_server(self, model: Any) -> Any:
        return {**super().init_server(model), "extra": torch.zeros(2)}


def test_another_kind_of_server_is_refused(tmp_path: Path) -> None:
    path = saved(FedProx(), tmp_path)
    More.__name__ = "FedProx"
    with pytest.raises(CheckpointMismatchError, match=r"server that holds \['extra', 'model'\], "):
        resume(More(), path)
