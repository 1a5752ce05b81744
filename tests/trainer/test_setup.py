"""What loggers learn about a run when its fit begins."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pfl.contract.records import ClientResults, Evaluation
from lightning_pfl.data import ClassesPerClient, Digits, FederatedDataModule
from lightning_pfl.methods import FedAvg, FedRep, LocalOnly
from lightning_pfl.methods.base import Method
from lightning_pfl.models import MLP
from lightning_pfl.results.scalars import read_scalars
from lightning_pfl.results.settings import read_settings
from lightning_pfl.trainer.board_layout import add_layout
from tests.inspect.board import Board
from tests.trainer.setting import SIZES, Quadratic, points, trainer


def test_hyper_parameters_tell_runs_apart(tmp_path: Path) -> None:
    data = FederatedDataModule(
        Digits(), ClassesPerClient(2), num_clients=5, val_fraction=0.2, seed=4
    )
    logger = CSVLogger(tmp_path)
    method = FedRep(head_epochs=2, body_steps=3, body_epochs=None)
    run = trainer(method, logger=logger, participation=0.5, max_epochs=1)
    run.fit(MLP([64, 10], lr=0.25), data)
    saved = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    expected = {
        "lr": 0.25,
        "method": "FedRep",
        "model": "MLP",
        "trainer.max_epochs": 1,
        "method.head_epochs": 2,
        "method.body_epochs": None,
        "method.body_steps": 3,
        "method.personal": "head",
        "trainer.strategy.participation": 0.5,
        "trainer.strategy.seed": 3,
        "data.num_clients": 5,
        "data.source": "Digits",
        "data.partition": "ClassesPerClient",
        "data.partition.classes_per_client": 2,
        "data.seed": 4,
    }
    assert {name: saved.get(name, "missing") for name in expected} == expected
    settings = read_settings(Path(logger.log_dir))
    assert (settings.method, settings.seed, settings.data_seed) == ("FedRep", 3, 4)


class EveryoneFirst(FedAvg):
    """All clients take part in the first round."""

    def full_participation(self, round: int) -> bool:
        return round == 0


@pytest.mark.parametrize(
    ("method", "participation", "said"),
    [
        (LocalOnly, 0.5, "LocalOnly trains all clients in every round, not participation=0.5."),
        (LocalOnly, 1, "LocalOnly trains all clients in every round, not participation=1."),
        (LocalOnly, 1.0, ""),
        (LocalOnly, len(SIZES), ""),
        (EveryoneFirst, 2, "EveryoneFirst trains all clients in round 0, not participation=2."),
        (FedAvg, 2, ""),
    ],
)
def test_the_log_says_where_participation_does_nothing(
    method: type[Method], participation: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        run = trainer(method(), participation=participation, max_epochs=1)
        run.fit(Quadratic(), points(), points())
    found = [text for text in caplog.messages if "trains all clients" in text]
    assert found == [said] * bool(said)


def test_tensorboard_has_curves_alone_and_settings_beside_their_newest_values(
    tmp_path: Path,
) -> None:
    logger = TensorBoardLogger(tmp_path)
    run = trainer(logger=logger, max_epochs=3)
    run.fit(Quadratic(), points(), points())
    board = Board(run)
    scalars = board.scalars()
    assert {"val_loss", "val_loss/worst_decile", "round/bytes_total"} <= set(scalars)
    # No `hp_metric`, no line of `epoch`, no chart with a dot for a value of the end.
    assert {tag for tag, steps in scalars.items() if set(steps) != {0, 1, 2}} == set()
    last10 = float(run.callback_metrics["last10/val_loss"])
    assert f"| last10/val_loss | {last10:.4g} |" in board.text("summary")
    names = {"val_loss", "val_loss/worst_decile"}
    shown = board.values_beside_settings()
    assert set(shown) == names | {f"global/{name}" for name in names}
    assert read_scalars(Path(logger.log_dir)).ended


def test_accuracies_stand_before_losses_beside_the_settings(tmp_path: Path) -> None:
    """A window shows the first columns alone."""
    logger = TensorBoardLogger(tmp_path)
    run = L.Trainer(logger=logger, accelerator="cpu")
    values = {"val_loss": torch.zeros(1), "val_acc": torch.zeros(1)}
    found = {prefix: Evaluation(values, torch.ones(1)) for prefix in ("", "global/")}
    add_layout(run, ClientResults("val", 0, ("a",), found))
    logger.experiment.close()
    shown = Board(run).values_beside_settings()
    pairs = [f"{prefix}{name}" for name in ("val_acc", "val_loss") for prefix in found]
    assert shown == [each + end for each in pairs for end in ("", "/worst_decile")]
