"""Averages of what clients log, kept on the device.

One running sum and weight per name and client.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOSS = "loss*"
"""Name under which the engines keep the training loss, beside what the user logs."""
DEFERRED = 256
"""Minibatches whose values are kept before they are summed up."""
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
        self._reductions: dict[str, str] = {}
        self._pending: list[dict[str, Tensor]] = []
        self._pending_size = 0

    def add(
        self,
        values: dict[str, Tensor],
        sizes: Tensor,
        rows: slice | Tensor | None,
        reductions: dict[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        """Take in one minibatch's values.

        Args:
            values: Per name a value for each client, ``(clients,)``.
            sizes: Samples in each client's minibatch, ``(clients,)``: the weights of means.
            rows: Which clients these are; None for all.
            reductions: ``reduce_fx`` by name; a mean where nothing is said.
            size: The one number in ``sizes``; None if they differ.
        """
        if rows is None and size is not None and _all_means(reductions):
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
        reductions: dict[str, str] | None,
    ) -> None:
        index = slice(None) if rows is None else rows
        weights = sizes.to(self.device, torch.float64, non_blocking=True)
        for name, value in values.items():
            reduction = (reductions or {}).get(name, "mean")
            if name not in self._sums:
                start = torch.full((self.clients,), _START[reduction], dtype=torch.float64)
                self._sums[name] = start.to(self.device)
                self._weights[name] = torch.zeros_like(self._sums[name])
                self._reductions[name] = reduction
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
            value = total / weight if self._reductions[name] == "mean" else total
            if name == LOSS:
                value = torch.where(value.isfinite(), value, torch.inf)
            results[name] = torch.where(weight > 0, value, torch.nan)
        return results


def _all_means(reductions: dict[str, str] | None) -> bool:
    return all(reduction == "mean" for reduction in (reductions or {}).values())


def _reduce(reduction: str, old: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    if reduction == "mean":
        return old + value * weights
    if reduction == "sum":
        return old + value
    return torch.minimum(old, value) if reduction == "min" else torch.maximum(old, value)
