"""What a client received stays what it was, however its training goes on from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Tree, sub, tmap
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import QuadraticModule, local_round, quadratic_clients

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
