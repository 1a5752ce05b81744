"""Which process works on which clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SLACK = 0.05
"""Fraction of its part of the work that a process may have more, before states move."""


def deal_evenly(num_samples: Tensor, size: int) -> Tensor:
    """Deal all clients to processes so that each has about as many clients and samples.

    From most samples to fewest, back and forth: 0, 1, 1, 0, 0, 1, ...

    Args:
        num_samples: Samples of each client, int64 ``(clients,)``.
        size: Number of processes.

    Returns:
        The rank of each client, int64 ``(clients,)``.

    Example:
        >>> deal_evenly(torch.tensor([5, 9, 1, 7]), 2)
        tensor([1, 0, 0, 1])
    """
    order = torch.argsort(num_samples, descending=True, stable=True)
    turn = torch.arange(len(order)) % (2 * size)
    owners = torch.empty_like(order)
    owners[order] = turn.minimum(2 * size - 1 - turn)
    return owners


def deal(costs: Sequence[float], size: int, homes: Sequence[int] | None = None) -> list[int]:
    """Deal clients to processes so that each has about as much to do.

    Most expensive clients come first. One stays at home while this process then has at most
    :data:`SLACK` more than its part; the others go to the process with least to do.

    Args:
        costs: What each client costs, in any unit.
        size: Number of processes.
        homes: The processes that have the clients' states; None: no client has one.

    Returns:
        The rank of each client.

    Example:
        >>> deal([1.0, 1.0, 1.0, 1.0], 2, homes=[0, 0, 0, 1])
        [0, 0, 1, 1]
    """
    load, count, owners = [0.0] * size, [0] * size, [0] * len(costs)

    def take(client: int, rank: int) -> None:
        owners[client] = rank
        load[rank] += costs[client]
        count[rank] += 1

    part = (1 + SLACK) * max(sum(costs) / size, max(costs, default=0.0))
    rest = []
    for client in sorted(range(len(costs)), key=lambda client: -costs[client]):
        if homes is not None and load[homes[client]] + costs[client] <= part:
            take(client, homes[client])
        else:
            rest.append(client)
    for client in rest:
        take(client, min(range(size), key=lambda rank: (load[rank], count[rank])))
    return owners
