"""What a client received stays what it was, however its training goes on from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Tree, repeat, sub, tmap
from lightning_pfl.methods import FedAvg, LocalOnly
from lightning_pfl.methods.base import LocalStep, Method
from lightning_pfl.testing import QuadraticModule, fit, local_round, q2, quadratic_clients

CENTRES = [1.0, -2.0, 5.0]


class SendsTheChange(FedAvg):
    """Each client gets a start of its own, trains it, and sends the difference to it."""

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        starts = info.index.double().view(-1, 1)
        return {"model": tmap(lambda leaf: leaf + starts, server["model"])}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        return {"model": sub(state["model"], received["model"])}, {}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_does_not_write_into_what_was_received(engine: Any) -> None:
    """One step from x with rate 1/4 on (w - c)^2 / 2 moves by (c - x) / 4."""
    module = QuadraticModule(lr=0.25, start=0.0)
    data = quadratic_clients([1.0, 1.0, 1.0], CENTRES)
    result = local_round(SendsTheChange(local_epochs=None, local_steps=1), module, data, engine)
    starts = torch.arange(3.0, dtype=torch.float64).view(-1, 1)
    assert torch.equal(result.received["model"]["w"], starts)
    moved = (torch.tensor(CENTRES, dtype=torch.float64).view(-1, 1) - starts) / 4
    torch.testing.assert_close(result.result.uploads["model"]["w"], moved)


class PullsToItsAnchor(Method):
    """FedProx with weight 1; the anchor is the very tensor that training begins at."""

    def __init__(self, rows: bool) -> None:
        super().__init__(local_epochs=None, local_steps=10)
        self.rows = rows

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        return {} if self.rows else {"model": server["model"]}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        return {"model": repeat(server["model"], len(info))} if self.rows else {}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        return {"model": received["model"], "anchor": received["model"]}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        model = state["model"]
        grads = client.grad(model, minibatches)
        pulled = {name: g + model[name] - state["anchor"][name] for name, g in grads.items()}
        return {**state, "model": client.update(model, pulled)}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("rows", [False, True])
def test_an_anchor_stays_where_it_was(rows: bool, engine: str) -> None:
    """The proximal steps written out: y <- y - 0.1 (a (y - c) + y - x), ten a round."""
    x = 0.0
    for _ in range(3):
        ends = []
        for a, c in ((1.0, 0.0), (3.0, 1.0)):
            y = x
            for _ in range(10):
                y -= 0.1 * (a * (y - c) + y - x)
            ends.append(y)
        x = sum(ends) / 2
    run = fit(PullsToItsAnchor(rows), q2(), rounds=3, module=QuadraticModule(), engine=engine)
    assert run.server["model"]["w"].item() == pytest.approx(x, rel=1e-12)


class SendsItsOwnChange(LocalOnly):
    """Each client goes on from its own model, and sends how far it went from there."""

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        moved = sub(state["model"], client_state["model"])
        return {"model": {}, "moved": moved}, {"model": state["model"]}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_does_not_write_into_client_states(engine: Any) -> None:
    module = QuadraticModule(lr=0.25, start=0.0)
    data = quadratic_clients([1.0, 1.0, 1.0], CENTRES)
    method = SendsItsOwnChange(local_epochs=None, local_steps=1)
    result = local_round(method, module, data, engine)
    moved = torch.tensor(CENTRES, dtype=torch.float64).view(-1, 1) / 4
    torch.testing.assert_close(result.result.uploads["moved"]["w"], moved)
