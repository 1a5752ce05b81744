"""``self.log(..., batch_size=n)``: a value counts n in the client's mean, as in plain Lightning."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.client_logs import ClientLogs, Reduction
from lightning_pfl.engine.logs import LogCapture
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import local_round

SIZES = (9, 4, 6)
ENGINES = {"sequential": SequentialEngine, "vectorized": VectorizedEngine}


class Logging(L.LightningModule):
    """Logs the batch's mean with several weights; the batch's number is its first one's."""

    def __init__(self, batch_size: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.batch_size = batch_size

    def log_all(self, batch: Any, number: int) -> None:
        x: Tensor = batch[0]
        self.log("samples", x.mean())
        self.log("own samples", x.mean(), batch_size=len(x))
        self.log("batches", x.mean(), batch_size=1)
        self.log("rising", x.mean(), batch_size=number + 1)
        self.log("sum", x.mean(), reduce_fx="sum", batch_size=7)
        if self.batch_size is not None:
            self.log("given", x.mean(), batch_size=self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_all(batch, batch_idx)
        return self.w * 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def data() -> FederatedTensorDataset:
    x = torch.arange(1.0, 1 + sum(SIZES), dtype=torch.float64) ** 2
    return FederatedTensorDataset((x,), torch.arange(sum(SIZES)).split(SIZES), batch_size=4)


def expected() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {
        name: [] for name in ("samples", "own samples", "batches", "rising", "sum")
    }
    for owned in data().indices:
        batches = [(part.double() + 1).square().numpy() for part in owned.split(4)]
        means, sizes = [b.mean() for b in batches], [len(b) for b in batches]
        for name in ("samples", "own samples"):
            found[name].append(np.average(means, weights=sizes))
        found["batches"].append(np.mean(means))
        found["rising"].append(np.average(means, weights=range(1, len(means) + 1)))
        found["sum"].append(np.sum(means))
    return found


def evaluate(engine: str, module: Logging) -> Evaluation:
    kind: Any = ENGINES[engine]
    runner = kind(module, ParameterSplit(module), EngineSettings())
    models = {"w": torch.zeros(len(SIZES), dtype=torch.float64)}
    found: Evaluation = runner.evaluate(
        EvaluationWork(models, torch.arange(len(SIZES)), data(), "validation_step")
    )
    return found


@pytest.mark.parametrize("engine", ENGINES)
class TestWeights:
    def test_training(self, engine: Any) -> None:
        logs = local_round(FedAvg(), Logging(), data(), engine).result.logs
        for name, values in expected().items():
            np.testing.assert_allclose(logs[name].numpy(), values, rtol=1e-12, err_msg=name)

    def test_evaluation(self, engine: Any) -> None:
        found = evaluate(engine, Logging()).values
        for name, values in expected().items():
            np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-12, err_msg=name)

    @pytest.mark.parametrize("wrong", [0, -2, float("nan"), float("inf")])
    def test_weights_are_positive(self, engine: Any, wrong: Any) -> None:
        with pytest.raises(
            ClientError, match=r"`batch_size` of self.log\('given'\) to be a positive number"
        ):
            evaluate(engine, Logging(wrong))

    def test_a_tensor_is_a_weight(self, engine: Any) -> None:
        found = evaluate(engine, Logging(torch.tensor(5))).values
        np.testing.assert_allclose(found["given"].numpy(), expected()["batches"], rtol=1e-12)


def test_equal_minibatches_with_and_without_weights() -> None:
    """Values that wait to be summed up stay with their weights: (1 * 4 + 5 * 1 + 3 * 4) / 9."""
    logs = ClientLogs(1, torch.device("cpu"))
    for value, weight in ((1.0, None), (5.0, 1.0), (3.0, None)):
        reductions = {"x": Reduction(weight=weight), "other": Reduction("sum")}
        logs.add({"x": torch.tensor([value])}, 4, None, reductions)
    assert float(logs.compute()["x"]) == pytest.approx(21 / 9, rel=1e-15)


class Weighted(Logging):
    """Logs with whatever weight is set."""

    def log_all(self, batch: Any, number: int) -> None:
        self.log("x", batch[0].mean(), batch_size=self.batch_size(len(batch[0])))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_that_happens_to_be_the_number_of_samples(engine: Any) -> None:
    """4 for every batch, of which the last holds 1, 0 or 2: not the samples, but all alike."""
    logs = local_round(FedAvg(), Weighted(lambda samples: 4), data(), engine).result.logs
    np.testing.assert_allclose(logs["x"].numpy(), expected()["batches"], rtol=1e-12)
    logs = local_round(FedAvg(), Weighted(lambda samples: samples), data(), engine).result.logs
    np.testing.assert_allclose(logs["x"].numpy(), expected()["samples"], rtol=1e-12)


def test_a_weight_that_is_the_number_of_samples_costs_nothing() -> None:
    """Such values can wait to be summed up, and steps that log them can be recorded."""
    captured = LogCapture()
    for samples in (4, 3):
        captured.begin((torch.zeros(samples, 2),))
        captured("x", torch.zeros(()), batch_size=samples)
        assert captured.reductions == {"x": Reduction()}
        captured.begin((torch.zeros(samples, 2),))
        captured("x", torch.zeros(()), batch_size=samples + 1)
        assert captured.reductions == {"x": Reduction(weight=samples + 1)}
