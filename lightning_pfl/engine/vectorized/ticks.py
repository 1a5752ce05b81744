"""The units of work of a chunk's clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send
from lightning_pfl.data.batch import batch_leaves


@dataclass
class Minibatch:
    """One minibatch of several clients.

    Attributes:
        data: Leaves ``(clients, batch, ...)``.
        sizes: Real samples per client, int64 ``(clients,)`` on the CPU.
        mask: Mask of real samples, float ``(clients, batch)``; None if all are.
        features: Cached backbone features ``(clients, batch, ...)``; None without a cache.
        number: The minibatch's number within the phase if all steps were complete: the step's
            number times minibatches per step, equal for all clients of a tick. It is ``batch_idx``
            and determines random numbers.
        size: Samples of every client's minibatch; None if they differ.
        gather: Returns the samples if ``data`` has features instead; else None.
        key: Keys of the clients' random numbers, int64 ``(clients,)``; None until they are made.
    """

    data: Any
    sizes: Tensor
    mask: Tensor | None = None
    features: Tensor | None = None
    number: int = 0
    size: int | None = None
    gather: Callable[[], Any] | None = None
    key: Tensor | None = None

    @property
    def width(self) -> int:
        """Samples of a client with those that fill up."""
        return int(next(batch_leaves(self.data)).shape[1])

    def samples(self) -> Any:
        """Return the samples, leaves ``(clients, batch, ...)``."""
        return self.data if self.gather is None else self.gather()

    def tensors(self, device: torch.device) -> dict[str, Any]:
        """Return all that a step reads, on a device; see :meth:`on`."""
        found = {"data": self.data, "mask": self.mask, "features": self.features, "key": self.key}
        sizes = send(self.sizes, device) if self.size is None else None
        return {**found, "size": self.size, "sizes": sizes}

    def on(self, tensors: dict[str, Any], device: torch.device, gathers: bool) -> Minibatch:
        """Return the minibatch with what :meth:`tensors` gave, which may be copied.

        Args:
            tensors: What :meth:`tensors` gave.
            device: Their device.
            gathers: Whether a step may read samples that have features in their place.
        """
        known = gathers or self.gather is None
        new = replace(self, **tensors, gather=self.gather if known else _refuse)
        if self.size is not None:
            new.sizes = torch.full(self.sizes.shape, self.size, device=device)
        return new


def _refuse() -> Any:
    raise TypeError("it reads samples beside cached features")


@dataclass
class Tick:
    """One optimizer step of some clients of the chunk.

    Attributes:
        rows: Positions of the clients: None for all, else a slice or a tensor.
        minibatches: The step's minibatches.
        counted: Samples of each client that count, int64 ``(clients,)`` on the CPU, 0 of clients
            that are done and go along; None if all do.
        leaving: Positions of the clients that go along from this step on.
    """

    rows: slice | Tensor | None
    minibatches: list[Minibatch]
    counted: Tensor | None = None
    leaving: Tensor | None = None


def rounded_up(clients: int) -> int:
    """Round a number of clients up to a power of two, or to one and a half of one.

    Example:
        >>> [rounded_up(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17)]
        [1, 2, 3, 4, 6, 6, 8, 8, 12, 16, 24]
    """
    power = 1 << (clients - 1).bit_length()
    return min(n for n in (power * 3 // 4, power) if n >= clients)


def active_rows(steps: Tensor, step: int) -> Sequence[int]:
    """Find the clients that take a step: the first ones, if they are sorted by their steps.

    Args:
        steps: Steps of each client, int64 ``(clients,)``.
        step: Number of the step.
    """
    active = steps > step
    count = int(active.sum())
    return range(count) if active[:count].all() else active.nonzero().flatten().tolist()


def tick_rows(rows: Tensor, clients: int, device: torch.device) -> slice | Tensor | None:
    """Return None for all clients, a slice for the first ones, else positions on the device."""
    if len(rows) == clients:
        return None
    if int(rows[-1]) == len(rows) - 1:
        return slice(0, len(rows))
    return send(rows, device)
