"""Averages of what clients log, kept on the device.

One running sum and weight per name and client.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOSS = "loss*"
"""Name under which the engines keep the training loss, beside what the user logs."""
DEFERRED = 256
"""Minibatches whose values are kept before they are summed up."""


class Reduction(NamedTuple):
    """How a client's logged values become one.

    Attributes:
        kind: ``reduce_fx``: one of mean, sum, min, max.
        weight: ``batch_size`` of ``self.log``: what the value counts in a mean; None for the
            number of samples in its minibatch.
    """

    kind: str = "mean"
    weight: float | None = None


_MEAN = Reduction()
_START = {"mean": 0.0, "sum": 0.0, "min": torch.inf, "max": -torch.inf}


class ClientLogs:
    """Running reductions of logged values, one per client.

    Args:
        clients: Number of clients.
        device: Where the sums live; nothing is copied to the host before :meth:`compute`.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients, self.device = clients, device
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}
        self._pending: list[dict[str, Tensor]] = []
        self._pending_size = 0

    def add(
        self,
        values: dict[str, Tensor],
        sizes: Tensor,
        rows: slice | Tensor | None,
        reductions: dict[str, Reduction] | None = None,
        size: int | None = None,
    ) -> None:
        """Take in one minibatch's values.

        Args:
            values: Per name a value for each client, ``(clients,)``.
            sizes: Samples in each client's minibatch, ``(clients,)``: the weights of means.
            rows: Which clients these are; None for all.
            reductions: By name; a mean over samples where nothing is said.
            size: The one number in ``sizes``; None if they differ.
        """
        if rows is None and size is not None and _plain_means(values, reductions):
            self._defer(values, size)
            return
        self._take_in(values, sizes, rows, reductions)

    def _defer(self, values: dict[str, Tensor], size: int) -> None:
        """The usual case, minibatches of one size for all clients, is summed up many at a time."""
        if self._pending and (
            size != self._pending_size
            or values.keys() != self._pending[0].keys()
            or len(self._pending) == DEFERRED
        ):
            self._flush()
        self._pending.append(values)
        self._pending_size = size

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        weights = torch.full((self.clients,), self._pending_size * len(pending))
        means = {
            name: torch.stack([values[name] for values in pending]).double().mean(0)
            for name in pending[0]
        }
        self._take_in(means, weights, None, None)

    def _take_in(
        self,
        values: dict[str, Tensor],
        sizes: Tensor,
        rows: slice | Tensor | None,
        reductions: dict[str, Reduction] | None,
    ) -> None:
        index = slice(None) if rows is None else rows
        samples = sizes.to(self.device, torch.float64, non_blocking=True)
        for name, value in values.items():
            reduction, weight = (reductions or {}).get(name, _MEAN)
            weights = samples if weight is None else torch.full_like(samples, weight)
            if name not in self._sums:
                start = torch.full((self.clients,), _START[reduction], dtype=torch.float64)
                self._sums[name] = start.to(self.device)
                self._weights[name] = torch.zeros_like(self._sums[name])
                self._kinds[name] = reduction
            value = value.to(self.device, torch.float64)
            old = self._sums[name][index]
            self._sums[name][index] = _reduce(reduction, old, value, weights)
            self._weights[name][index] += weights

    def compute(self) -> dict[str, Tensor]:
        """The reduced values, float64 ``(clients,)``; NaN for clients that logged nothing.

        A loss that wasn't finite is Inf, so that it differs from no loss at all.
        """
        self._flush()
        results = {}
        for name, total in self._sums.items():
            weight = self._weights[name]
            value = total / weight if self._kinds[name] == "mean" else total
            if name == LOSS:
                value = torch.where(value.isfinite(), value, torch.inf)
            results[name] = torch.where(weight > 0, value, torch.nan)
        return results


def _plain_means(values: dict[str, Tensor], reductions: dict[str, Reduction] | None) -> bool:
    return not reductions or all(reductions.get(name, _MEAN) == _MEAN for name in values)


def _reduce(reduction: str, old: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    if reduction == "mean":
        return old + value * weights
    if reduction == "sum":
        return old + value
    return torch.minimum(old, value) if reduction == "min" else torch.maximum(old, value)
