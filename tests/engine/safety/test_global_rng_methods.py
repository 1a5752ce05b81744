"""Methods that draw from global generators, which a resumed run has elsewhere: refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.contract.local import recordable
from lightning_pfl.core.tree import Tree, add, select
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal
from tests.engine.nets import cnn, image_clients

DRAWS: dict[str, Callable[[], object]] = {
    "torch's": lambda: torch.rand(()),
    "Python's": random.random,
    "NumPy's": lambda: np.random.rand(1),
}


class Draws(FedAvg):
    """Draws from a global generator in one of its functions."""

    def __init__(self, function: str, draw: Callable[[], object]) -> None:
        super().__init__()
        self.function, self.draw = function, draw

    def _draw(self, function: str) -> None:
        if function == self.function:
            self.draw()

    def client_init(self, received: Tree, client_state: Tree, info: Any) -> Tree:
        self._draw("client_init")
        return super().client_init(received, client_state, info)

    @recordable("function", "draw")
    def client_step(self, state: Tree, minibatches: Any, client: Any) -> Tree:
        self._draw("client_step")
        return FedAvg.client_step(self, state, minibatches, client)

    def client_final(self, received: Tree, client_state: Tree, state: Tree, info: Any) -> Any:
        self._draw("client_final")
        return super().client_final(received, client_state, state, info)


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "auto"])
@pytest.mark.parametrize("generator", DRAWS)
@pytest.mark.parametrize("function", ["client_init", "client_step", "client_final"])
def test_a_method_that_draws_without_keys_is_refused(
    function: str, generator: str, engine: str
) -> None:
    whose = "torch's" if generator == "torch's" else "Python's or NumPy's"
    match = f"Expected Draws to draw by keys.*for a client uses {whose}. Draw by `client.noise"
    with pytest.raises(ValueError, match=match):
        fit(Draws(function, DRAWS[generator]), image_clients(), cnn(), 2, engine)


class Noisy(FedAvg):
    def client_step(self, state: Tree, minibatches: Any, client: Any) -> Tree:
        new = super().client_step(state, minibatches, client)
        weights = select(new["model"], self.parameter_split.trainable)
        return {**new, "model": {**new["model"], **add(weights, client.noise(weights))}}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_method_that_draws_by_keys_is_not(dropout: float) -> None:
    found = []
    for engine, seed in (("reference", 1), ("sequential", 2), ("vectorized", 3)):
        torch.manual_seed(seed)
        run = fit(Noisy(), image_clients(), cnn(dropout=dropout), 2, engine)
        found.append(run.server["model"])
    assert_trees_equal(found[0], found[1])
    assert_trees_close(found[0], found[2])
