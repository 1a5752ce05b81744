"""A name that a step logs more than once: as Lightning's value of an epoch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_pfl.core.errors import ClientError
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.fitting import QUIET, fit, quiet
from lightning_pfl.testing.rounds import local_round

SIZES, BATCH = (5, 4), 2
ENGINES = ["sequential", "vectorized"]


class Again(L.LightningModule):
    """Logs every value twice, and in the first batch a third time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.metric = MeanMetric()

    def log_all(self, batch: Any, number: int, **how: Any) -> None:
        x: Tensor = batch[0]
        for kind in ("mean", "sum", "min", "max"):
            for value in (x.mean(), 2 * x.max(), x.min())[: 3 if number == 0 else 2]:
                self.log(kind, value, reduce_fx=kind, batch_size=len(x), **how)
        self.log("weighted", x.mean(), batch_size=3, **how)
        self.log("weighted", x.max(), batch_size=1, **how)
        self.log("partly", x.mean(), batch_size=3, **how)
        self.log("partly", x.max(), batch_size=len(x), **how)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_all(batch, batch_idx, on_step=False, on_epoch=True)
        return self.w * 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def data() -> FederatedTensorDataset:
    x = torch.arange(1.0, 1 + sum(SIZES)) ** 2
    return FederatedTensorDataset((x,), torch.arange(sum(SIZES)).split(SIZES), batch_size=BATCH)


def plain(step: str) -> list[dict[str, float]]:
    """What plain Lightning makes of each client's data."""
    found, pool = [], data()
    for owned in pool.indices:
        loader = DataLoader(TensorDataset(pool.fields[0][owned]), BATCH)
        module = Again()
        with quiet():
            trainer = L.Trainer(max_epochs=1, **QUIET)
            if step == "training":
                trainer.fit(module, loader)
            else:
                trainer.validate(module, loader, verbose=False)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return found


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*number of training batches.*")
@pytest.mark.parametrize("engine", ENGINES)
def test_training(engine: Any) -> None:
    logs = local_round(FedAvg(), Again(), data(), engine).result.logs
    for client, expected in enumerate(plain("training")):
        assert {n: float(v[client]) for n, v in logs.items()} == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_evaluation(engine: str) -> None:
    run = fit(FedAvg(), data(), Again(), 1, engine, val_data=data())
    values = run.federation.client_results["val"].evaluations[""].values
    for client, expected in enumerate(plain("validation")):
        found = {name: float(value[client]) for name, value in values.items()}
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_metric_has_taken_in_both() -> None:
    """(1 + 3) / 2."""

    class Twice(Again):
        def log_all(self, batch: Any, number: int, **how: Any) -> None:
            for value in (1.0, 3.0):
                self.metric.update(value)
                self.log("metric", self.metric)

    logs = local_round(FedAvg(), Twice(), data(), "sequential").result.logs
    assert logs["metric"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_kinds_under_one_name_are_refused(engine: Any) -> None:
    class Mixed(Again):
        def log_all(self, batch: Any, number: int, **how: Any) -> None:
            self.log("x", batch[0].mean())
            self.log("x", batch[0].mean(), reduce_fx="max")

    match = r"Expected self.log\('x', ...\) to log one kind .* but got a mean and then a max. Log"
    with pytest.raises(ClientError, match=match):
        local_round(FedAvg(), Mixed(), data(), engine)


def test_a_metric_and_a_number_under_one_name_are_refused() -> None:
    class Mixed(Again):
        def log_all(self, batch: Any, number: int, **how: Any) -> None:
            self.log("x", self.metric)
            self.log("x", batch[0].mean())

    with pytest.raises(ClientError, match=r"but got a MeanMetric and then a mean. Log them under"):
        local_round(FedAvg(), Mixed(), data(), "sequential")
