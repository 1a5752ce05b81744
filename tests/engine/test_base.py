"""What both engines require of a method."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.tree import Tree
from lightning_pfl.methods import FedAvg
from lightning_pfl.methods.base import LocalStep, Method
from lightning_pfl.testing import QuadraticModule, local_round, quadratic_clients
from lightning_pfl.testing.rounds import EngineName


class Adds(FedAvg):
    """Keeps the last gradient, which a client without a step wouldn't have."""

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        return {**state, "gradient": client.grad(state["model"], minibatches)}


class Removes(FedAvg):
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        return {}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("method", "entries"),
    [(Adds(), "'gradient', 'model'"), (Removes(), "")],
    ids=["adds", "removes"],
)
def test_a_step_that_changes_the_states_entries_is_refused(
    method: Method, entries: str, engine: EngineName
) -> None:
    match = (
        rf"`client_step` of {type(method).__name__} .* entries \['model'\], but got \[{entries}\]"
    )
    with pytest.raises(ClientError, match=match):
        local_round(method, QuadraticModule(), quadratic_clients([1.0, 2.0], [0.0, 1.0]), engine)
