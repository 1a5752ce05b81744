"""What loggers learn about a run when its fit begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pfl.data import ClassesPerClient, Digits, FederatedDataModule
from lightning_pfl.methods import FedRep
from lightning_pfl.models import MLP
from lightning_pfl.results.settings import read_settings
from tests.trainer.setting import Quadratic, points, trainer


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


def test_tensorboards_metric_is_the_mean_of_the_last_rounds(tmp_path: Path) -> None:
    sent: list[Any] = []
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics = lambda metrics, step=None: sent.append(dict(metrics))  # type: ignore
    run = trainer(logger=logger, max_epochs=3)
    run.fit(Quadratic(), points(), points())
    values = [metrics["hp_metric"] for metrics in sent if "hp_metric" in metrics]
    assert values[-1] == pytest.approx(float(run.callback_metrics["last10/val_loss"]), rel=1e-6)
