"""The user's optimizer on stacked parameters: each row steps as it would alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import expand, is_expanded
from lightning_pfl.engine.optimizer import ClientOptimizer, clip
from lightning_pfl.engine.optimizer_options import (
    ELEMENTWISE,
    FUSED,
)
from lightning_pfl.methods import FedAvg
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from tests.methods.quadratics import LR, SAMPLES, A, C, close, mean, ragged

CLIENTS = 3


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return {
        "w": torch.randn(CLIENTS, 2, 3, **draw),
        "b": torch.randn(CLIENTS, 3, **draw),
        "s": torch.randn(CLIENTS, **draw),
    }


@pytest.mark.parametrize("value", [0.1, 2.0, 100.0])
def test_norm_clipping_is_torchs_for_each_client(value: float) -> None:
    clipped = clip(gradients(), value, "norm")
    for client in range(CLIENTS):
        alone = [nn.Parameter(torch.zeros_like(g[client])) for g in gradients().values()]
        for parameter, grad in zip(alone, gradients().values(), strict=True):
            parameter.grad = grad[client].clone()
        nn.utils.clip_grad_norm_(alone, value)
        for parameter, name in zip(alone, clipped, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(clipped[name][client], parameter.grad, rtol=1e-14, atol=0)


def test_value_clipping_is_elementwise() -> None:
    clipped = clip(gradients(), 0.5, "value")
    assert all(torch.equal(clipped[n], g.clamp(-0.5, 0.5)) for n, g in gradients().items())


def make(**settings: Any) -> tuple[ParameterSplit, torch.optim.Optimizer]:
    module = nn.Linear(3, 2).double()
    return ParameterSplit(module), torch.optim.SGD(
        module.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings}
    )


def test_the_rate_of_a_phase_is_that_of_all_parameter_groups() -> None:
    module = nn.Linear(3, 2).double()
    groups = [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.2}]
    template, parameter_split = torch.optim.SGD(groups), ParameterSplit(module)
    start = parameter_split.model()
    grads = {n: torch.ones(CLIENTS, *leaf.shape).double() for n, leaf in start.items()}
    for rate, steps in ((None, {"weight": 0.1, "bias": 0.2}), (0.5, {"weight": 0.5, "bias": 0.5})):
        optimizer = ClientOptimizer(template, parameter_split, CLIENTS, rate)
        new = optimizer.update(expand(start, CLIENTS), grads)
        for name, step in steps.items():
            torch.testing.assert_close(new[name], (start[name] - step).expand_as(new[name]))


def test_shared_leaves_are_copied_before_they_train() -> None:
    parameter_split, template = make()
    start = parameter_split.model()
    model = expand(start, CLIENTS)
    grads = {n: torch.ones(CLIENTS, *leaf.shape).double() for n, leaf in start.items()}
    new = ClientOptimizer(template, parameter_split, CLIENTS).update(model, grads)
    assert not any(is_expanded(leaf) for leaf in new.values())
    for name, leaf in parameter_split.model().items():
        assert torch.equal(start[name], leaf)
        torch.testing.assert_close(new[name], (start[name] - 0.1).expand_as(new[name]))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_views_of_another_tensor_train_like_tensors(momentum: float) -> None:
    """The rows of a flat vector per client, which a method has worked on; fused kernels would
    write between them."""
    parameter_split, template = make(momentum=momentum)
    flat = torch.arange(8.0 * CLIENTS, dtype=torch.float64).view(CLIENTS, 8)
    grads = {"weight": flat[:, :6].reshape(CLIENTS, 2, 3) + 1, "bias": flat[:, 6:] - 2}
    weight, bias = flat.clone().split([6, 2], 1)
    model = {"weight": weight.view(CLIENTS, 2, 3), "bias": bias}
    new = ClientOptimizer(template, parameter_split, CLIENTS).update(model, grads)
    close(new["weight"], flat[:, :6].reshape(CLIENTS, 2, 3) - 0.1 * grads["weight"])
    close(new["bias"], flat[:, 6:] - 0.1 * grads["bias"])


def test_slots_have_states_of_their_own() -> None:
    parameter_split, template = make()
    grads = {
        n: torch.ones(CLIENTS, *leaf.shape).double() for n, leaf in parameter_split.model().items()
    }

    def fresh() -> dict[str, Tensor]:
        return {n: torch.zeros_like(g) for n, g in grads.items()}

    optimizer = ClientOptimizer(template, parameter_split, CLIENTS)
    first, second = fresh(), fresh()
    for _ in range(2):
        first = optimizer.update(first, grads, "first")
    second = optimizer.update(second, grads, "second")
    # Momentum: the second step is 1 + 0.9 times the gradient.
    torch.testing.assert_close(first["bias"], torch.full_like(first["bias"], -0.1 * (1 + 1.9)))
    torch.testing.assert_close(second["bias"], torch.full_like(second["bias"], -0.1))


def test_the_template_is_left_alone() -> None:
    parameter_split, template = make()
    before = {k: v for k, v in template.param_groups[0].items() if k != "params"}
    optimizer = ClientOptimizer(template, parameter_split, CLIENTS, lr=5.0)
    grads = {
        n: torch.ones(CLIENTS, *leaf.shape).double() for n, leaf in parameter_split.model().items()
    }
    optimizer.update(expand(parameter_split.model(), CLIENTS), grads)
    assert optimizer.lr == 5.0
    assert {k: v for k, v in template.param_groups[0].items() if k != "params"} == before
    assert not template.state
    assert all(p.grad is None for p in parameter_split.module.parameters())


def test_a_scheduler_changes_the_rate_of_later_rounds() -> None:
    parameter_split, template = make()
    scheduler = torch.optim.lr_scheduler.StepLR(template, 1, gamma=0.5)
    assert ClientOptimizer(template, parameter_split, CLIENTS).lr == 0.1
    grads = {
        n: torch.ones(CLIENTS, *leaf.shape).double() for n, leaf in parameter_split.model().items()
    }
    template.step()
    scheduler.step()
    halved = ClientOptimizer(template, parameter_split, CLIENTS)
    assert halved.lr == 0.05
    new = halved.update(expand(parameter_split.model(), CLIENTS), grads)
    torch.testing.assert_close(new["bias"][0], parameter_split.model()["bias"] - 0.05)


class HeavyBall(QuadraticModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)


class Twice(Method):
    """The same parameters train in both phases."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (Phase("all", steps=3), Phase("all", steps=2))


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_every_phase_of_every_round_begins_without_momentum(engine: Any) -> None:
    """Rounds of 3 and 2 steps of v <- 0.9 v + a (w - c), w <- w - lr v, each from v = 0."""
    run = fit(Twice(), ragged(), HeavyBall(2, LR, 0.5), 2, engine)
    start = torch.full((2,), 0.5, dtype=torch.float64)
    for _ in range(2):
        w = start.expand(4, 2)
        for steps in (3, 2):
            v = torch.zeros_like(w)
            for _ in range(steps):
                v = 0.9 * v + A[:, None] * (w - C)
                w = w - LR * v
        start = mean(w, SAMPLES)
    close(run.server["model"]["w"], start)


def test_one_rate_is_required_where_a_method_uses_it() -> None:
    module = nn.Linear(3, 2)
    groups = [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.2}]
    optimizer = ClientOptimizer(torch.optim.SGD(groups), ParameterSplit(module), CLIENTS)
    with pytest.raises(
        ValueError,
        match=r"Expected one learning rate for all parameter groups, but got \[0.1, 0.2\]",
    ):
        _ = optimizer.lr


# --- recorded steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=repr))
def test_a_replayed_step_is_the_step(kind: Any, stacked: bool) -> None:
    """For two clients, one after the other, with two slots that take turns, as in Ditto."""
    module = nn.Linear(3, 2).double()
    groups = [{"params": [module.weight]}, {"params": [module.bias], "weight_decay": 0.1}]
    template, parameter_split = kind(groups, lr=0.1), ParameterSplit(module)
    recordings: dict[Any, Any] = {}
    clients = CLIENTS if stacked else 1

    def run(recordings: dict[Any, Any] | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(2):
            optimizer = ClientOptimizer(
                template, parameter_split, clients, stacked=stacked, recordings=recordings
            )
            model = expand(parameter_split.model(), clients)
            for slot in ("model",) * 4 + ("personal",) * 3 + ("model",):
                grads = {
                    name: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
                    for name, leaf in model.items()
                }
                model = optimizer.update(model, grads, slot)
                found += [leaf.clone() for leaf in model.values()]
        return found

    plain, recorded = run(None), run(recordings)
    assert len(recordings) > 0
    assert all(torch.equal(a, b) for a, b in zip(recorded, plain, strict=True))
    if kind in FUSED:
        assert all(recordings.values())


def test_a_recorded_step_is_that_of_its_options() -> None:
    recordings: dict[Any, Any] = {}
    for rate in (0.1, 0.3):
        parameter_split, template = make(lr=rate, momentum=0.0)
        optimizer = ClientOptimizer(template, parameter_split, CLIENTS, recordings=recordings)
        model = expand(parameter_split.model(), CLIENTS)
        grads = {name: torch.ones(leaf.shape).double() for name, leaf in model.items()}
        start = {name: leaf.clone() for name, leaf in model.items()}
        for _ in range(4):
            model = optimizer.update(model, grads)
        close(model["bias"], start["bias"] - 4 * rate)
    assert len(recordings) == 2


class Begun(torch.optim.Optimizer):
    """Adagrad as torch had it: the constructor makes the state."""

    def __init__(self, params: Any, lr: float, initial_accumulator_value: float) -> None:
        super().__init__(params, {"lr": lr})
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.full_like(param, initial_accumulator_value)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        with torch.no_grad():
            for param in group["params"]:
                total = self.state[param]["sum"]
                total += param.grad**2
                param -= group["lr"] * param.grad / total.sqrt()


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("kind", [partial(torch.optim.Adagrad, eps=0.0), Begun])
def test_a_client_begins_with_the_state_of_the_constructor(kind: Any, engine: str) -> None:
    """In every round, as its optimizer is a fresh one."""

    class Accumulated(QuadraticModule):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.1, initial_accumulator_value=0.2)

    curvatures, centers = (1.0, 3.0), (1.0, 4.0)
    data = quadratic_clients(curvatures, centers)
    run = fit(FedAvg(local_steps=2), data, Accumulated(), 2, engine)
    server = 0.0
    for _ in range(2):
        found = []
        for curvature, center in zip(curvatures, centers, strict=True):
            w, total = server, 0.2
            for _ in range(2):
                gradient = curvature * (w - center)
                total += gradient**2
                w -= 0.1 * gradient / math.sqrt(total)
            found.append(w)
        server = sum(found) / 2
    assert float(run.server["model"]["w"]) == pytest.approx(server, rel=1e-12)
