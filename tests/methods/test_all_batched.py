"""A cohort's steps are one call of ``client_step`` each, whatever a method does in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.probe import PROBED_CLIENTS
from lightning_pfl.engine.vectorized.chunk import Chunk
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.cases import CASES, PROBLEMS

CLIENTS = 4


def equal_clients() -> FederatedTensorDataset:
    positions = torch.arange(4 * CLIENTS).split([4] * CLIENTS)
    return FederatedTensorDataset(small_clients().fields, positions, batch_size=2, shuffle=True)


def ragged_clients() -> FederatedTensorDataset:
    return small_clients().subset([0, 2, 3, 4])


def cohort_sizes(method: Method, data: FederatedTensorDataset, module: Any) -> list[int]:
    """Clients in each call of ``client_step`` in round 0, without those of the engine's probe."""
    sizes: list[int] = []
    step = method.client_step

    def counted(state: Any, minibatches: Any, client: Any) -> Any:
        if type(client).__name__ == "VectorizedLocalStep" and not probing:
            _, real = client.samples(
                minibatches[0] if isinstance(minibatches, tuple) else minibatches
            )
            sizes.append(len(real))
        return step(state, minibatches, client)

    init, probing = method.client_init, False

    def watched(received: Any, client_state: Any, info: ClientInfo) -> Any:
        nonlocal probing
        # A probe may have each of its clients twice.
        probing = len(info.index.unique()) < len(info)
        return init(received, client_state, info)

    method.client_init = watched  # type: ignore[method-assign]
    method.client_step = counted  # type: ignore[method-assign]
    # A step that is recorded calls it once more, and a replay doesn't.
    with patch.object(Chunk, "_whole_context", return_value=None):
        fit(method, data, module)
    return [size for size in sizes if size != PROBED_CLIENTS]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", CASES)
def test_equal_clients_step_together(name: str) -> None:
    make: Callable[[], Any] = PROBLEMS.get(name, {}).get("make_module", small_module)
    method: Any = CASES[name]()
    sizes = cohort_sizes(method, equal_clients(), make())
    assert sizes
    assert set(sizes) == {CLIENTS}
    phases = method.phases(0)
    # Two minibatches an epoch, and public ones of three samples.
    public = -(-(method.public_samples or 0) // 3)
    minibatches = [public if p.data == "public" else 1 if p.full_batch else 2 for p in phases]
    steps = sum(
        p.steps or -(-(p.epochs or 0) * count // p.batches_per_step)
        for p, count in zip(phases, minibatches, strict=True)
    )
    assert len(sizes) == steps


def test_ragged_clients_solve_their_duals_together() -> None:
    """Filled up with samples that don't count."""
    make = PROBLEMS["MOCHA"]["make_module"]
    assert cohort_sizes(CASES["MOCHA"](), ragged_clients(), make()) == [CLIENTS]
