"""What the clients of a chunk work on at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Minibatch:
    """One minibatch of several clients.

    Attributes:
        data: Leaves ``(clients, batch, ...)``.
        sizes: Real samples per client, int64 ``(clients,)`` on the CPU.
        mask: Which samples are real, float ``(clients, batch)``; None if all are.
        features: Cached backbone features ``(clients, batch, ...)``; None without a cache.
        number: The minibatch's number within the phase, were all steps complete: the number of its
            step times minibatches per step, and so the same for all clients of a tick. It is the
            step's ``batch_idx``, and random numbers follow from it.
        size: Samples of every client's minibatch; None if they differ.
        gather: Gives the samples where ``data`` holds features in their place; else None.
    """

    data: Any
    sizes: Tensor
    mask: Tensor | None = None
    features: Tensor | None = None
    number: int = 0
    size: int | None = None
    gather: Callable[[], Any] | None = None

    def samples(self) -> Any:
        """The samples themselves, leaves ``(clients, batch, ...)``."""
        return self.data if self.gather is None else self.gather()


@dataclass
class Tick:
    """One optimizer step of some clients of the chunk.

    Attributes:
        rows: Which clients: None for all, else a slice or positions.
        minibatches: The step's minibatches.
    """

    rows: slice | Tensor | None
    minibatches: list[Minibatch]


def tick_rows(rows: Tensor, clients: int, device: torch.device) -> slice | Tensor | None:
    """None for all clients, a slice for the first ones, else the positions, beside the models."""
    if len(rows) == clients:
        return None
    if int(rows[-1]) == len(rows) - 1:
        return slice(0, len(rows))
    return rows.to(device)
