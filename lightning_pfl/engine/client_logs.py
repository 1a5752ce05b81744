"""Sums, minima and maxima of what clients log, for many of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send

REDUCTIONS = ("mean", "sum", "min", "max")
JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
LOSS = "loss*"
"""Name of the training loss among the logged values."""
DEFERRED = 256
"""Number of minibatches whose values are summed at once."""
IN_TURN = 2**14
"""Number of values, of clients one after another, that are added at once."""


class Reduction(NamedTuple):
    """The reduction of a client's logged values to one.

    Attributes:
        kind: ``reduce_fx``: one of mean, sum, min, max.
        weight: ``batch_size`` of ``self.log``, the value's weight in a mean; None for the number of
            samples in its minibatch.
    """

    kind: str = "mean"
    weight: float | None = None


_MEAN = Reduction()
_EXTREMES = {"min": "amin", "max": "amax"}
_START = {"mean": 0.0, "sum": 0.0, "min": torch.inf, "max": -torch.inf}


class ClientLogs:
    """Running reductions of logged values, one per client.

    Args:
        clients: Number of clients.
        device: Device of the sums; nothing is copied to the host before :meth:`compute`.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients, self.device = clients, device
        self._reduced: dict[str, _Reduced] = {}
        self._pending: list[dict[str, Tensor]] = []
        self._sizes: list[Any] = []
        self._kind: tuple[bool, int | None] = True, None

    def add(
        self,
        values: dict[str, Tensor],
        sizes: Tensor | int,
        rows: slice | Tensor | None,
        reductions: dict[str, Reduction] | None = None,
    ) -> None:
        """Add one minibatch's values.

        Args:
            values: Per name a value for each client, ``(clients,)``.
            sizes: Samples in each client's minibatch, ``(clients,)`` or one number for all: the
                weights of means. Values of a client with 0 don't count.
            rows: Positions of these clients; None for all.
            reductions: By name; default: a mean over samples.
        """
        if not values:  # a step without a loss that logs nothing
            return
        leading = rows is None or (isinstance(rows, slice) and not rows.start)
        empty = isinstance(sizes, int) and not sizes
        if leading and not empty and _plain_means(values, reductions):
            self._defer(values, sizes, rows.stop if isinstance(rows, slice) else None)
            return
        clients = len(next(iter(values.values())))
        each = sizes if isinstance(sizes, Tensor) else torch.full((clients,), sizes)
        self._take_in(values, each, rows, reductions)

    def _defer(self, values: dict[str, Tensor], size: Tensor | int, rows: int | None) -> None:
        """Queue minibatches to sum many at once.

        Of one size for the first clients each, or all, or with a size of each of some first
        clients.
        """
        kind = (True, rows) if isinstance(size, int) else (False, None)
        if self._pending and (
            kind != self._kind
            or values.keys() != self._pending[0].keys()
            or len(self._pending) == DEFERRED
        ):
            self._flush()
        self._pending.append(values)
        self._sizes.append(size)
        self._kind = kind

    def _flush(self) -> None:
        if not self._pending:
            return
        one_size, rows = self._kind
        if not one_size:
            sums, weights = self._weighted_sums()
            for name, total in sums.items():
                self._of(name, "mean").join(total, weights, slice(len(total)))
        else:
            means = self._means()
            clients = self.clients if rows is None else rows
            weights = torch.full((clients,), sum(self._sizes))
            self._take_in(means, weights, None if rows is None else slice(rows), None)
        self._pending, self._sizes = [], []

    def _weighted_sums(self) -> tuple[dict[str, Tensor], Tensor]:
        """Sum the queued minibatches by their sizes, float64 ``(clients,)``, and these."""
        names, sizes = list(self._pending[0]), self._sizes
        if len({size.device for size in sizes}) > 1:
            sizes = [send(size, self.device) for size in sizes]
        lengths = torch.tensor([*map(len, sizes)])
        given = send(torch.arange(int(lengths.max())) < lengths.unsqueeze(1), self.device)

        def padded(each: list[Tensor], times: int) -> Tensor:
            shape = (times, *given.shape)
            zeros = torch.zeros(shape, dtype=torch.float64, device=self.device)
            found = send(torch.cat(each), self.device, zeros.dtype)
            return zeros.masked_scatter(given.expand(shape), found)

        weights = padded(sizes, 1)
        found = [values[name].to(self.device) for name in names for values in self._pending]
        # Values that don't count may be anything.
        sums = torch.where(weights > 0, padded(found, len(names)) * weights, 0).sum(1)
        return dict(zip(names, sums.unbind(), strict=True)), weights[0].sum(0)

    def _means(self) -> dict[str, Tensor]:
        """Average the queued minibatches, float64 ``(clients,)``."""
        names, count = list(self._pending[0]), len(self._pending)
        found = [values[name].to(self.device) for name in names for values in self._pending]
        values = torch.cat(found).double().view(len(names), count, -1)
        if len(set(self._sizes)) == 1:
            means = values.mean(1)
        else:
            sizes = torch.tensor(self._sizes, dtype=torch.float64, device=self.device)
            means = (values * sizes.unsqueeze(1)).sum(1) / sum(self._sizes)
        return dict(zip(names, means.unbind(), strict=True))

    def _take_in(
        self,
        values: dict[str, Tensor],
        sizes: Tensor,
        rows: slice | Tensor | None,
        reductions: dict[str, Reduction] | None,
    ) -> None:
        index: slice | Tensor = rows if isinstance(rows, slice) else slice(None)
        if isinstance(rows, Tensor):
            index = send(rows, self.device)
        samples = send(sizes, self.device, torch.float64)
        for name, value in values.items():
            kind, weight = (reductions or {}).get(name, _MEAN)
            weights = samples if weight is None else weight * (samples > 0).double()
            self._of(name, kind).add(value.to(self.device, torch.float64), weights, index)

    def _of(self, name: str, kind: str) -> _Reduced:
        if name not in self._reduced:
            self._reduced[name] = _Reduced(kind, self.clients, self.device)
        return self._reduced[name]

    def compute(self) -> dict[str, Tensor]:
        """Return the reduced values, float64 ``(clients,)``; NaN for clients that logged nothing.

        A loss that wasn't finite is Inf, which distinguishes it from no loss.
        """
        if self._pending and not self._reduced and self._kind == (True, None):
            return {name: _with_inf(name, mean) for name, mean in self._means().items()}
        self._flush()
        return {name: reduced.compute(name) for name, reduced in self._reduced.items()}


class LogsOfSteps:
    """The values that one client logs, step by step.

    Attributes:
        entries: Of each value its name, how it is reduced, and its weight.
        numbers: These values in this order, as tensors with one axis.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, float]] = []
        self.numbers: list[Tensor] = []

    def add(
        self,
        values: dict[str, Tensor],
        size: int,
        rows: None = None,
        reductions: dict[str, Reduction] | None = None,
    ) -> None:
        """Add one minibatch's values, as of :meth:`ClientLogs.add`."""
        self.add_joined(values, list(values.values()), size, reductions or {})

    def add_joined(
        self,
        names: Iterable[str],
        numbers: list[Tensor],
        size: int,
        reductions: dict[str, Reduction],
    ) -> None:
        """Add one minibatch's values, of which tensors may have several."""
        for name in names:
            kind, weight = reductions.get(name, _MEAN)
            self.entries.append((name, kind, size if weight is None or not size else weight))
        self.numbers += numbers

    def loss(self, device: torch.device) -> Tensor:
        """Return the loss, ``(1,)``, with the bits that it has among other clients'."""
        alone = LogsInTurn(1, device)
        alone.add(0, self)
        return alone.take_losses()[1]


class LogsInTurn:
    """Values of clients that log one after another, of many added at once.

    On the host, where sums have an order: a client's value has the same bits among any others.

    Args:
        clients: Number of clients.
        device: Device of the result.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients, self.device = clients, device
        # By name and reduction, in the order in which they are logged.
        self._reduced: dict[tuple[str, str], _Reduced] = {}
        # Of each value the client's row, its weight and its position among the numbers.
        self._queue: dict[tuple[str, str], list[tuple[int, float, int]]] = {}
        self._numbers: list[Tensor] = []
        self._count = 0

    def add(self, row: int, logs: LogsOfSteps) -> None:
        """Add what a client has logged."""
        for at, (name, kind, weight) in enumerate(logs.entries, self._count):
            self._queue.setdefault((name, kind), []).append((row, weight, at))
        self._count += len(logs.entries)
        self._numbers += logs.numbers
        if self._count >= IN_TURN:
            self._flush()

    def add_computed(self, row: int, values: dict[str, Tensor]) -> None:
        """Add the values of a client's torchmetrics objects, ``(1,)`` each."""
        computed = LogsOfSteps()
        computed.add(values, 1)
        self.add(row, computed)

    def _flush(self) -> None:
        if not self._count:
            return
        there = self._numbers
        if self.device.type != "cpu":  # where some may be, and all are otherwise
            there = [some.to(self.device) for some in there]
        numbers = torch.cat(there).cpu().double()
        for (name, kind), each in self._queue.items():
            rows, weights, at = zip(*each, strict=True)
            if (name, kind) not in self._reduced:
                self._reduced[name, kind] = _Reduced(kind, self.clients, numbers.device)
            of_each = torch.tensor(weights, dtype=torch.float64)
            self._reduced[name, kind].add(numbers[torch.tensor(at)], of_each, torch.tensor(rows))
        self._queue, self._numbers, self._count = {}, [], 0

    def compute(self) -> dict[str, Tensor]:
        """Return the values, float64 ``(clients,)``; NaN for clients that logged nothing."""
        self._flush()
        results: dict[str, Tensor] = {}
        for (name, _), reduced in self._reduced.items():
            value = reduced.compute(name).to(self.device)
            # Clients may reduce by different functions.
            results[name] = value.where(~value.isnan(), results.get(name, value))
        return results

    def take_losses(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the values without the losses, and these."""
        values = self.compute()
        missing = torch.full((self.clients,), torch.nan, dtype=torch.float64, device=self.device)
        return values, values.pop(LOSS, missing)


class _Reduced:
    """A reduction of one value of each client.

    Args:
        kind: As of :class:`Reduction`.
        clients: Number of clients.
        device: Device of the result.
    """

    def __init__(self, kind: str, clients: int, device: torch.device) -> None:
        self.kind = kind
        self.total = torch.full((clients,), _START[kind], dtype=torch.float64, device=device)
        self.weights = torch.zeros_like(self.total)

    def add(self, value: Tensor, weights: Tensor, index: slice | Tensor) -> None:
        """Add values of some clients; those with a weight of 0 don't count."""
        value = value.where(weights > 0, _START[self.kind])
        self.join(value * weights if self.kind == "mean" else value, weights, index)

    def join(self, value: Tensor, weights: Tensor, index: slice | Tensor) -> None:
        """Add sums, minima or maxima of some clients.

        By a tensor, a client may be given several, which on the host are added in their order.
        """
        if isinstance(index, slice):
            self.total[index] = JOINED[self.kind](self.total[index], value)
            self.weights[index] += weights
            return
        if self.kind in _EXTREMES:
            self.total.scatter_reduce_(0, index, value, _EXTREMES[self.kind])
        else:
            self.total.index_add_(0, index, value)
        self.weights.index_add_(0, index, weights)

    def compute(self, name: str) -> Tensor:
        """Return the values; NaN for clients without one, and Inf for losses that aren't finite."""
        value = self.total / self.weights if self.kind == "mean" else self.total
        return torch.where(self.weights > 0, _with_inf(name, value), torch.nan)


def _with_inf(name: str, value: Tensor) -> Tensor:
    inf = torch.inf
    return value.nan_to_num(nan=inf, posinf=inf, neginf=inf) if name == LOSS else value


def _plain_means(values: dict[str, Tensor], reductions: dict[str, Reduction] | None) -> bool:
    return not reductions or all(reductions.get(name, _MEAN) == _MEAN for name in values)
