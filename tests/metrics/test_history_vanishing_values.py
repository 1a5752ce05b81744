"""A value that the newest evaluation doesn't have is not kept from an older one.

CFL has a global model as long as it has one cluster; here it splits in the third round.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lightning_pfl.methods import CFL, FedAvg
from lightning_pfl.testing import QuadraticModule, quadratic_clients
from tests.callbacks.setting import trainer

CENTERS = torch.tensor([[1.0], [-1.0], [1.1], [-0.9], [1.2], [-1.2]], dtype=torch.float64)
SPLIT = 2


class Names(L.Callback):
    """Which values a callback may look at after each round, and what the loggers get next."""

    def __init__(self) -> None:
        self.rounds: list[set[str]] = []
        self.logged: list[set[str]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rounds.append(set(trainer.callback_metrics))
        self.logged.append(set(trainer.logged_metrics))


def fit(method: Any, rounds: int, *callbacks: Any, path: Any = None, **flags: Any) -> Any:
    run = trainer(method, *callbacks, max_epochs=rounds, **flags)
    data = quadratic_clients([1.0] * len(CENTERS), CENTERS)
    run.fit(QuadraticModule(lr=0.1), data, data, ckpt_path=path)
    return run


def cfl() -> CFL:
    return CFL(0.05, 0.05, start_round=SPLIT)


def of_global(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith(("global/", "last10/global/"))}


def test_the_global_model_of_one_cluster_is_not_reported_of_many() -> None:
    names = Names()
    run = fit(cfl(), 4, names)
    for each in (names.rounds, names.logged):
        assert ["global/val_loss" in found for found in each] == [True, True, False, False]
        assert all("val_loss" in found for found in each)
        assert of_global(each[SPLIT]) == set()
    metrics = run.callback_metrics
    assert of_global(set(metrics)) == set()
    assert {"val_loss", "last10/val_loss", "best/val_loss"} <= set(metrics)
    whole = Names()
    fit(FedAvg(), 4, whole)
    assert all("global/val_loss" in found for found in whole.rounds)


def test_a_resumed_run_does_not_bring_it_back(tmp_path: Path) -> None:
    fit(cfl(), SPLIT).save_checkpoint(tmp_path / "one.ckpt")
    names = Names()
    run = fit(cfl(), 4, names, path=tmp_path / "one.ckpt")
    assert [of_global(found) for found in names.rounds] == [set(), set()]
    assert of_global(set(run.callback_metrics)) == set()


def test_nothing_stops_by_a_number_that_is_no_more() -> None:
    stop = EarlyStopping("global/val_loss", patience=100)
    with pytest.raises(RuntimeError, match="`global/val_loss` which is not available"):
        fit(cfl(), 4, stop)


def test_the_table_of_clients_has_the_rounds_that_had_it(tmp_path: Path) -> None:
    run = fit(cfl(), 4, logger=L.pytorch.loggers.CSVLogger(tmp_path), log_every_n_steps=1)
    with (Path(run.log_dir) / "clients_val.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["round"] for row in rows if row["global/val_loss"]} == {"0", "1"}
