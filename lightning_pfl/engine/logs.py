"""Averages of what clients log, kept on the device: one running sum and weight per name and client."""

from __future__ import annotations

import torch
from torch import Tensor

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

    def add(
        self,
        values: dict[str, Tensor],
        sizes: Tensor,
        rows: slice | Tensor | None,
        reductions: dict[str, str] | None = None,
    ) -> None:
        """Take in one minibatch's values.

        Args:
            values: Per name a value for each client, ``(clients,)``.
            sizes: Samples in each client's minibatch, ``(clients,)``: the weights of means.
            rows: Which clients these are; None for all.
            reductions: ``reduce_fx`` by name; a mean where nothing is said.
        """
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
        """The reduced values, float64 ``(clients,)``; NaN for clients that logged nothing."""
        results = {}
        for name, total in self._sums.items():
            weight = self._weights[name]
            value = total / weight if self._reductions[name] == "mean" else total
            results[name] = torch.where(weight > 0, value, torch.nan)
        return results


def _reduce(reduction: str, old: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    if reduction == "mean":
        return old + value * weights
    if reduction == "sum":
        return old + value
    return torch.minimum(old, value) if reduction == "min" else torch.maximum(old, value)
