"""Steps are called with the arguments that they take, however they are written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.program import call_step
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import local_round


def passing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as users write them."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Steps:
    def batch(self, batch: Any) -> Any:
        return (batch,)

    def both(self, batch: Any, batch_idx: int) -> Any:
        return batch, batch_idx

    def other_names(self, sample: Any, i: int = 9) -> Any:
        return sample, i

    def any_arguments(self, *args: Any) -> Any:
        return args

    def keyword_only(self, batch: Any, *, batch_idx: int) -> Any:
        return batch, batch_idx

    def keyword_of_another_name(self, batch: Any, *, flag: int = 9) -> Any:
        return (batch, flag)

    def any_keywords(self, batch: Any, **kwargs: Any) -> Any:
        return (batch, *kwargs.values())

    @torch.no_grad()
    def without_gradient(self, batch: Any) -> Any:
        return (batch,)

    @passing
    @torch.no_grad()
    def decorated_twice(self, batch: Any) -> Any:
        return (batch,)

    @passing
    def decorated(self, batch: Any, batch_idx: int) -> Any:
        return batch, batch_idx

    @staticmethod
    def static(batch: Any) -> Any:
        return (batch,)

    @classmethod
    def of_class(cls, batch: Any, batch_idx: int) -> Any:
        return batch, batch_idx

    partial_method = functools.partialmethod(both, batch_idx=5)

    def __call__(self, batch: Any) -> Any:
        return (batch,)


STEPS = Steps()
EXPECTED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (STEPS.batch, ("b",)),
    (STEPS.both, ("b", 3)),
    (STEPS.other_names, ("b", 3)),
    (STEPS.any_arguments, ("b", 3)),
    (STEPS.keyword_only, ("b", 3)),
    (STEPS.keyword_of_another_name, ("b", 9)),
    (STEPS.any_keywords, ("b",)),
    (STEPS.without_gradient, ("b",)),
    (STEPS.decorated_twice, ("b",)),
    (STEPS.decorated, ("b", 3)),
    (STEPS.static, ("b",)),
    (STEPS.of_class, ("b", 3)),
    (STEPS.partial_method, ("b", 3)),
    (STEPS, ("b",)),
    (functools.partial(lambda k, b, i: (k, b, i), 1), (1, "b", 3)),
    (functools.partial(lambda k, b: (k, b), 1), (1, "b")),
    (lambda b, i: (b, i), ("b", 3)),
]


@pytest.mark.parametrize(("step", "expected"), EXPECTED, ids=[str(k) for k in range(len(EXPECTED))])
def test_arguments(step: Callable[..., Any], expected: tuple[Any, ...]) -> None:
    for _ in range(2):  # the second call finds what the first has read
        assert call_step(step, "b", 3)() == expected


class Decorated(L.LightningModule):
    """A point pulled to the samples, with decorated steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    @passing
    def training_step(self, batch: Any) -> Tensor:
        x: Tensor = batch[0]
        return ((self.w - x) ** 2).mean() / 2

    @torch.no_grad()
    def validation_step(self, batch: Any) -> None:
        self.log("val_x", batch[0].mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_decorated_steps_run_in_both_engines(engine: Any) -> None:
    """From 0 one step with rate 1/2 goes half of the way to the mean."""
    x = torch.tensor([[1.0], [3.0], [8.0]], dtype=torch.float64)
    data = FederatedTensorDataset((x,), [[0, 1], [2]], batch_size=2)
    outcome = local_round(FedAvg(), Decorated(), data, engine)
    assert outcome.models["w"].tolist() == [[1.0], [4.0]]
    module, kind = Decorated(), SequentialEngine if engine == "sequential" else VectorizedEngine
    runner: Any = kind(module, ParameterSplit(module), EngineSettings())
    found = runner.evaluate(
        EvaluationWork(outcome.models, torch.arange(2), data, "validation_step")
    )
    assert found.values["val_x"].tolist() == [2.0, 8.0]
