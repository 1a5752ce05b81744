"""Optimizers that draw from global generators: keyed, so that nothing else counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.core.tree import Tree
from lightning_pfl.methods import Ditto, FedAvg, PFedMe
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_equal
from tests.engine.nets import cnn, image_clients


class Own(FedAvg):
    """A method of a user's, which may not draw itself."""

    def client_step(self, state: Tree, minibatches: Any, client: Any) -> Tree:
        return {**state, "model": client.train(state["model"], minibatches)}


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "Python": random.random,
    "NumPy": lambda: float(np.random.rand()),
}
METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: FedAvg(local_epochs=2),
    "Ditto": lambda: Ditto(0.5),
    "PFedMe": lambda: PFedMe(),
    "a method of a user's": lambda: Own(local_epochs=2),
}


class Noisy(torch.optim.SGD):
    """Scales each step by a random number, and keeps all of these."""

    def __init__(self, params: Any, draw: Callable[[], float]) -> None:
        super().__init__(params, lr=0.1)
        self.draw, self.drawn = draw, list[float]()

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.drawn.append(self.draw())
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(param.grad, alpha=-self.drawn[-1])


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _run(
    draw: str,
    method: str,
    engine: str,
    number: int = 0,
    rounds: int = 2,
    hook: bool = False,
    path: Path | None = None,
) -> tuple[Fit, list[float]]:
    module, drawn = cnn(dropout=0.3), list[float]()

    def optimizer() -> torch.optim.Optimizer:
        made = Noisy(module.parameters(), DRAWS[draw])
        made.drawn = drawn
        return made

    module.configure_optimizers = optimizer  # type: ignore[method-assign]
    if hook:  # in Lightning's own loop
        module.on_before_zero_grad = lambda optimizer: None  # type: ignore[method-assign]
    _seed(number)
    data = image_clients((5, 0, 9))
    found = fit(METHODS[method](), data, module, rounds, engine, ckpt_path=path)
    return found, drawn


@pytest.mark.sweep(12)
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("engine", ["reference", "sequential"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_draws_the_same_whatever_ran_before(
    method: str, draw: str, engine: str, hook: bool
) -> None:
    one, two = (_run(draw, method, engine, number, hook=hook)[0] for number in (1, 2))
    assert_trees_equal(one.server, two.server)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_resumed_optimizer_draws_on(draw: str, tmp_path: Path) -> None:
    whole = _run(draw, "FedAvg", "auto", rounds=3)[0]
    path = _run(draw, "FedAvg", "auto", rounds=1)[0].save(tmp_path / "run.ckpt")
    assert_trees_equal(_run(draw, "FedAvg", "auto", 5, 3, path=path)[0].server, whole.server)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_draws_other_numbers_in_each_step(method: str, draw: str) -> None:
    drawn = _run(draw, method, "reference")[1]
    assert len({*drawn}) == len(drawn) > 4
