"""Minibatches of an evaluation: cuts of each client's samples, in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.steps import Limits
from lightning_pfl.engine.vectorized.evaluation import samples_at_once
from lightning_pfl.engine.vectorized.ordered import OrderedBatches

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("drop_last", [False, True, "single"])
def test_minibatches_of_an_evaluation_are_the_clients_samples_in_order(drop_last: Any) -> None:
    """Against a plain cut of each client's positions, with padding and without."""
    sizes = (5, 0, 4, 1, 9, 0)
    positions = [torch.randperm(50)[:size] for size in sizes]
    data = FederatedTensorDataset(torch.arange(50), positions, batch_size=4, drop_last=drop_last)
    least = {False: 1, True: 4, "single": 2}[drop_last]
    clients = torch.tensor([4, 5, 0, 3, 2])
    for pad in (False, True):
        for limit in (1.0, 2, 0.5):
            batches = OrderedBatches(data, clients, Limits(1, limit), pad, 4)
            found: list[list[list[int]]] = [[] for _ in clients]
            for number in range(int(batches.steps.max())):
                for tick in batches.at(number):
                    rows = torch.arange(len(clients))
                    rows = rows if tick.rows is None else rows[tick.rows]
                    (minibatch,) = tick.minibatches
                    assert minibatch.number == number
                    for at, row in enumerate(rows.tolist()):
                        real = minibatch.data[at]
                        if minibatch.mask is not None:
                            real = real[minibatch.mask[at] > 0]
                        assert len(real) == minibatch.sizes[at]
                        found[row].append(real.tolist())
            for row, client in enumerate(clients.tolist()):
                cut = [some.tolist() for some in positions[client].split(4)]
                cut = [some for some in cut if len(some) >= least]
                few = limit if isinstance(limit, int) else int(len(cut) * limit)
                assert found[row] == cut[:few]


@pytest.mark.parametrize(
    ("shape", "dtype", "count"),
    [
        ((1, 28, 28), torch.float32, 768),
        ((3, 32, 32), torch.uint8, 768 * 784 // 3072),
        ((60,), torch.float64, 3072),
        ((32,), torch.int64, 768),
        ((3, 1000, 1000), torch.float32, 1),
    ],
)
def test_a_program_has_fewer_samples_of_larger_ones(
    shape: tuple[int, ...], dtype: torch.dtype, count: int
) -> None:
    data = FederatedTensorDataset((torch.zeros(2, *shape, dtype=dtype), torch.zeros(2)), [[0, 1]])
    assert samples_at_once(data) == count
