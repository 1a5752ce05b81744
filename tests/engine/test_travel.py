"""How far a constant gradient would move a client, against torch's SGD on such a gradient."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Tree
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.testing import QuadraticModule, local_round, quadratic_clients

STEPS = (2, 0, 8, 3)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.5, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.5},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "maximize": True},
]


class SendsTravel(Method):
    """Sends how far it went, in one phase or in two of which the second has another rate."""

    measures_travel: ClassVar[bool] = True

    def __init__(self, second: float | None = None) -> None:
        super().__init__()
        self.second = second

    def phases(self, round: int) -> tuple[Phase, ...]:
        once = Phase("all", epochs=1)
        looks = Phase(epochs=1, evaluate_only=True, name="look")
        return (once,) if self.second is None else (once, looks, Phase("all", 2, lr=self.second))

    def client_step(self, state: Tree, minibatches: Any, client: Any) -> Tree:
        return state if client.phase == "look" else super().client_step(state, minibatches, client)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        upload, kept = super().client_final(received, client_state, state, info)
        assert info.travel is not None
        return {**upload, "travel": info.travel}, kept


class Optimized(QuadraticModule):
    """A quadratic with another optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), **self.options)


def travelled(method: Method, module: QuadraticModule, engine: Any, chunk: int | None) -> Tensor:
    data = quadratic_clients([1.0] * 4, [0.0, 1.0, 2.0, 3.0], STEPS, batch_size=1)
    settings = EngineSettings(chunk_size=chunk)
    run = local_round(method, module, data, engine, settings=settings)
    found: Tensor = run.result.uploads["travel"]
    return found


def brute_force(steps: int, start: float = 0.0, lr: float = 0.1, **options: Any) -> float:
    """The way of torch's SGD from ``start`` along the gradient 1, by the learning rate."""
    x = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=lr, **options)
    sign = -1 if options.get("maximize") else 1
    for _ in range(steps):
        x.grad = torch.ones_like(x)
        optimizer.step()
    return sign * (start - x.item()) / lr


@pytest.mark.parametrize(
    ("engine", "chunk"), [("vectorized", None), ("vectorized", 1), ("sequential", None)]
)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_it_is_the_way_of_torchs_sgd(options: Any, engine: str, chunk: int | None) -> None:
    module = Optimized(torch.optim.SGD, lr=0.1, **options)
    found = travelled(SendsTravel(), module, engine, chunk)
    wanted = [brute_force(steps, **options) for steps in STEPS]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_published_values_with_momentum(engine: str) -> None:
    r"""FedNova's (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)."""
    module = Optimized(torch.optim.SGD, lr=0.1, momentum=0.9)
    found = travelled(SendsTravel(), module, engine, None)
    rho = 0.9
    formula = [(t - rho * (1 - rho**t) / (1 - rho)) / (1 - rho) for t in STEPS]
    assert found.tolist() == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_phases_add_up_each_in_units_of_its_rate(engine: str) -> None:
    module = Optimized(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    found = travelled(SendsTravel(second=0.2), module, engine, None)
    wanted = []
    for steps in STEPS:
        first = brute_force(steps, weight_decay=0.5)
        wanted.append(first + brute_force(2 * steps, -0.1 * first, 0.2, weight_decay=0.5))
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_another_optimizer_is_refused(engine: str) -> None:
    with pytest.raises(ValueError, match=r"Expected torch.optim.SGD .* but got Adam\. Return such"):
        travelled(SendsTravel(), Optimized(torch.optim.Adam, lr=0.1), engine, None)


class TwoRates(QuadraticModule):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": [self.w]}, {"params": [self.other], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1)


def test_groups_with_other_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"but got SGD with 2 sets of options\."):
        travelled(SendsTravel(), TwoRates(), "vectorized", None)
