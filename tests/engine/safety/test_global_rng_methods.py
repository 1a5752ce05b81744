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

DRAWS: dict[str, Callable[[], Any]] = {
    "torch's": lambda: torch.rand(()),
    "Python's": random.random,
    "NumPy's": np.random.rand,
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


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class NoisyServer(FedAvg):
    """Adds a number of each global generator to the server's model, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, ...]] = []

    def server_update(self, server: Tree, uploads: Tree, info: Any) -> Tree:
        new = super().server_update(server, uploads, info)
        self.drawn.append(tuple(float(draw()) for draw in DRAWS.values()))
        noise = sum(self.drawn[-1]) / 100
        return {**new, "model": {name: leaf + noise for name, leaf in new["model"].items()}}


def test_a_server_draws_the_numbers_of_its_seed_and_round() -> None:
    """Whatever the generators are at, which stay there: in a resumed run and in every process."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(0)
        module, method = cnn(), NoisyServer()
        seed_all(seed)
        server = fit(method, image_clients(), module, 3, "sequential").server["model"]
        runs.append((method.drawn, server))
        left = [float(draw()) for draw in DRAWS.values()]
        seed_all(seed)
        assert left == [float(draw()) for draw in DRAWS.values()]
    (drawn, server), (again, other) = runs
    assert len(set(drawn)) == 3
    assert drawn == again
    assert_trees_equal(server, other)
