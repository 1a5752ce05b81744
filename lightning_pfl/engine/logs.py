"""Values that a client's step logs by ``self.log``.

What a step logs under one name more than once is reduced as Lightning's value of an epoch: the mean
of all values, weighted by their ``batch_size``, or their sum, minimum or maximum. One name for two
kinds of value in a step is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pfl.contract.records import LogOptions
from lightning_pfl.data.batch import batch_length

REDUCTIONS = ("mean", "sum", "min", "max")
_JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class TorchmetricsValue:
    """The value of a torchmetrics object for a minibatch, which is computed after the step.

    Until then it may be logged, and asked for its class, a tensor's; whatever reads it raises
    TypeError.

    Args:
        call: Number of the object's call in the step.
        key: Which value of a collection; empty for an object alone.
    """

    __class__: Any = Tensor

    def __init__(self, call: int, key: str = "") -> None:
        self.call, self.key = call, key

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("it reads the value of a torchmetrics object")

    # All other operators are missing.
    __bool__ = __eq__ = __ne__ = __hash__ = __repr__ = __str__ = __format__ = _refuse

    def of(self, result: Any) -> Any:
        """Select the value in the result of the call."""
        return result[self.key] if self.key else result


def one_number(name: str, value: Any) -> Tensor:
    """Require the result of a torchmetrics object to be one number, and return it as a scalar.

    Raises:
        ValueError: If it is something else.
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"Expected the torchmetrics object logged as {name!r} to compute one number, but "
            f"got {got}. Average them, or log each under its own name."
        )
    return value.detach().double().view(())


class LogCapture:
    """A replacement of ``self.log`` during a client's step.

    Attributes:
        values: Logged value by name: a tensor, or a torchmetrics object.
        options: The options of each name; kept across steps.
        reductions: ``reduce_fx`` and ``batch_size`` of each name in its last step.
        calls: Calls of torchmetrics objects that the last step has left to be made; None for none.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor | Metric] = {}
        self.options: dict[str, LogOptions] = {}
        self.reductions: dict[str, Reduction] = {}
        self._samples = 1
        self.calls: Any = None
        self._logged: list[str] = []
        self._apart: set[str] = set()
        self._ways: dict[tuple[Any, ...], int] = {}
        self._way: int | None = None

    def begin(self, batch: Any) -> None:
        """Start a step on this batch, and clear the last step's values."""
        self.values, self._samples, self._way = {}, batch_length(batch), None
        self.calls = None
        self._logged.clear()
        self._apart.clear()

    def __call__(  # noqa: D102 - replaces `LightningModule.log`
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        reduction = (
            reduce_fx
            if isinstance(reduce_fx, str)
            else getattr(reduce_fx, "__name__", str(reduce_fx))
        )
        reduction = {"amax": "max", "amin": "min"}.get(reduction, reduction)
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"Expected `reduce_fx` of self.log({name!r}) to be one of "
                f"{', '.join(REDUCTIONS)}, but got "
                f"reduce_fx={reduce_fx!r}. Log a torchmetrics object for other reductions."
            )
        better = value.higher_is_better if isinstance(value, Metric) else None
        self.options[name] = LogOptions(prog_bar, logger is not False, better)
        weight = _weight(name, batch_size)
        # The number of samples is the default weight.
        logged = Reduction(reduction, None if weight == self._samples else weight)
        if not isinstance(value, (Metric, TorchmetricsValue)):
            value = value if isinstance(value, Tensor) else _number(name, value)
            value = value.detach() if value.is_floating_point() else value.detach().float()
            # A step may change a scalar later, as by `loss += penalty`.
            value = value.mean() if value.ndim else value.clone()
        if name in self.values:
            value, logged = self._together(name, value, logged)
        self.values[name], self.reductions[name] = value, logged
        self._logged.append(name)
        if isinstance(value, (Metric, TorchmetricsValue)):
            self._apart.add(name)

    def _together(
        self, name: str, value: Tensor | Metric, logged: Reduction
    ) -> tuple[Tensor | Metric, Reduction]:
        """Combine values that a step logs under one name, as Lightning does over an epoch."""
        earlier, kind = self.values[name], self.reductions[name].kind
        if value is earlier:  # a torchmetrics object, which has accumulated both
            return value, logged
        apart = (Metric, TorchmetricsValue)
        if isinstance(value, apart) or isinstance(earlier, apart) or kind != logged.kind:
            raise ValueError(
                f"Expected self.log({name!r}, ...) to log one kind of value by one `reduce_fx` "
                f"within a step, but got {_kind(earlier, kind)} and then "
                f"{_kind(value, logged.kind)}. Log them under two names."
            )
        if kind != "mean":
            return _JOINED[kind](earlier, value), logged
        weights = [self.reductions[name].weight or self._samples, logged.weight or self._samples]
        total = sum(weights)
        return (earlier * weights[0] + value * weights[1]) / total, Reduction(kind, total)

    def way(self) -> int:
        """Number the way in which the last step logged its values, for when it is replayed."""
        names = dict.fromkeys(self._logged)
        how = ((self.reductions[name], self.options[name]) for name in names)
        way = tuple(zip(names, how, strict=True)), frozenset(self._apart), self.calls
        return self._ways.setdefault(way, len(self._ways))

    def replayed(self, way: int | None) -> None:
        """Take note that a step was replayed, which logs its values in this way; None for none."""
        if way is None or way == self._way:
            return
        named, _, self.calls = list(self._ways)[way]
        for name, (reduction, options) in named:
            self.reductions[name], self.options[name] = reduction, options
        self._way = way

    def reductions_of(self, way: int) -> dict[str, Reduction]:
        """Return the names of the tensors that a way of logging has, with their reductions."""
        named, apart, _ = list(self._ways)[way]
        return {name: reduction for name, (reduction, _) in named if name not in apart}

    def take(self) -> dict[str, Tensor | Metric]:
        """Return and clear the step's values, since tensors are invalid outside their ``vmap``."""
        values, self.values = self.values, {}
        return values


def _number(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(float(value))
    except (TypeError, ValueError):
        raise ValueError(
            f"Expected self.log({name!r}, ...) to log a number, a tensor or one torchmetrics "
            f"object, but got a {type(value).__name__}. Use self.log_dict for several values."
        ) from None


def _kind(value: Tensor | Metric, reduction: str) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Metric) else f"a {reduction}"


def _weight(name: str, batch_size: Any) -> float | None:
    """Convert ``batch_size`` to a number, which a tensor under ``vmap`` can't become."""
    weight = None if batch_size is None else float(batch_size)
    if weight is not None and not 0 < weight < torch.inf:
        raise ValueError(
            f"Expected `batch_size` of self.log({name!r}) to be a positive number, but got "
            f"{batch_size=}. Leave it out to weight by the batch's samples."
        )
    return weight


LOSS = "loss*"
"""Name of the training loss among the logged values."""
DEFERRED = 256
"""Number of minibatches whose values are summed at once."""
OF_EACH = 2**14
"""The same of clients one after another, all in all."""


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
_START = {"mean": 0.0, "sum": 0.0, "min": torch.inf, "max": -torch.inf}


class ClientLogs:
    """Running reductions of logged values, one per client.

    Args:
        clients: Number of clients.
        device: Device of the sums; nothing is copied to the host before :meth:`compute`.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients, self.device = clients, device
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}
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
                self._add_to(name, "mean", total, weights, slice(len(total)))
        else:
            means = self._means()
            clients = self.clients if rows is None else rows
            weights = torch.full((clients,), sum(self._sizes))
            self._take_in(means, weights, None if rows is None else slice(rows), None)
        self._pending, self._sizes = [], []

    def queued(self) -> list[tuple[dict[str, Tensor], int]]:
        """Return all minibatches' values with their sizes, if they are in the queue; else none."""
        whole = not self._sums and self._kind == (True, None)
        return list(zip(self._pending, self._sizes, strict=True)) if whole else []

    def _weighted_sums(self) -> tuple[dict[str, Tensor], Tensor]:
        """Sum the queued minibatches by their sizes, float64 ``(clients,)``, and these."""
        names, sizes = list(self._pending[0]), self._sizes
        if len({size.device for size in sizes}) > 1:
            sizes = [size.to(self.device) for size in sizes]
        lengths = torch.tensor([*map(len, sizes)])
        given = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).to(self.device)

        def padded(each: list[Tensor], times: int) -> Tensor:
            shape = (times, *given.shape)
            zeros = torch.zeros(shape, dtype=torch.float64, device=self.device)
            return zeros.masked_scatter(given.expand(shape), torch.cat(each).to(zeros))

        weights = padded(sizes, 1)
        found = [values[name].to(self.device) for name in names for values in self._pending]
        # Values that don't count may be anything.
        sums = torch.where(weights > 0, padded(found, len(names)) * weights, 0).sum(1)
        return dict(zip(names, sums.unbind(), strict=True)), weights[0].sum(0)

    def _means(self) -> dict[str, Tensor]:
        """Average the queued minibatches, float64 ``(clients,)``."""
        names, count = list(self._pending[0]), len(self._pending)
        # One tensor of all, as a client alone has few numbers.
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
        index = slice(None) if rows is None else rows
        samples = sizes.to(self.device, torch.float64, non_blocking=True)
        for name, value in values.items():
            reduction, weight = (reductions or {}).get(name, _MEAN)
            weights = samples if weight is None else weight * (samples > 0)
            value = value.to(self.device, torch.float64).where(samples > 0, _START[reduction])
            value = value * weights if reduction == "mean" else value
            self._add_to(name, reduction, value, weights, index)

    def _add_to(
        self, name: str, reduction: str, value: Tensor, weights: Tensor, index: slice | Tensor
    ) -> None:
        """Add some clients' sum, minimum or maximum of values to what is known."""
        if name not in self._sums:
            start = torch.full((self.clients,), _START[reduction], dtype=torch.float64)
            self._sums[name] = start.to(self.device)
            self._weights[name] = torch.zeros_like(self._sums[name])
            self._kinds[name] = reduction
        join = _JOINED[reduction]
        self._sums[name][index] = join(self._sums[name][index], value)
        self._weights[name][index] += weights

    def compute(self) -> dict[str, Tensor]:
        """Return the reduced values, float64 ``(clients,)``; NaN for clients that logged nothing.

        A loss that wasn't finite is Inf, which distinguishes it from no loss.
        """
        if self.queued():
            return {name: _with_inf(name, mean) for name, mean in self._means().items()}
        self._flush()
        results = {}
        for name, total in self._sums.items():
            weight = self._weights[name]
            value = total / weight if self._kinds[name] == "mean" else total
            results[name] = torch.where(weight > 0, _with_inf(name, value), torch.nan)
        return results


class LogsOfEach:
    """Values of clients that log one after another, of many computed at once.

    On the host, where sums have an order: a client's value has the same bits among any others.

    Args:
        clients: Number of clients.
        device: Device of the result.
    """

    def __init__(self, clients: int, device: torch.device) -> None:
        self.clients, self.device = clients, device
        self._values: dict[str, list[float]] = {}
        self._queue: dict[str, list[tuple[int, int, Tensor]]] = {}
        self._count = 0

    def add(self, row: int, logs: ClientLogs, metrics: dict[str, Tensor] | None = None) -> None:
        """Add what a client has logged, and values of its torchmetrics objects, ``(1,)`` each."""
        queued = logs.queued()
        for values, size in queued:
            for name, value in values.items():
                if name not in self._queue:
                    self._of(name)  # in the order in which they are logged
                    self._queue[name] = []
                self._queue[name].append((row, size, value))
        self._count += len(queued)
        for name, value in ({} if queued else logs.compute()).items():
            self._of(name)[row] = float(value)
        if self._count >= OF_EACH:
            self._flush()
        for name, value in (metrics or {}).items():
            self._of(name)[row] = float(value)

    def _of(self, name: str) -> list[float]:
        if name not in self._values:
            self._values[name] = [math.nan] * self.clients
        return self._values[name]

    def _flush(self) -> None:
        for name, each in self._queue.items():
            rows, sizes, values = zip(*each, strict=True)
            joined = torch.cat([value.to(self.device) for value in values])
            sums = dict.fromkeys(rows, (0.0, 0))
            for row, size, value in zip(rows, sizes, joined.double().tolist(), strict=True):
                total, weight = sums[row]
                sums[row] = total + value * size, weight + size
            known = self._of(name)
            for row, (total, weight) in sums.items():
                mean = total / weight
                known[row] = mean if name != LOSS or math.isfinite(mean) else math.inf
        self._queue, self._count = {}, 0

    def compute(self) -> dict[str, Tensor]:
        """Return the values, float64 ``(clients,)``; NaN for clients that logged nothing."""
        self._flush()
        settings: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        return {name: torch.tensor(values, **settings) for name, values in self._values.items()}

    def take_losses(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the values without the losses, and these."""
        values = self.compute()
        missing = torch.full((self.clients,), torch.nan, dtype=torch.float64, device=self.device)
        return values, values.pop(LOSS, missing)


def loss_of(logs: ClientLogs) -> Tensor:
    """Return the loss of a client alone, ``(1,)``, with the bits that it has among others."""
    alone = LogsOfEach(1, logs.device)
    alone.add(0, logs)
    return alone.take_losses()[1]


def _with_inf(name: str, value: Tensor) -> Tensor:
    inf = torch.inf
    return value.nan_to_num(nan=inf, posinf=inf, neginf=inf) if name == LOSS else value


def _plain_means(values: dict[str, Tensor], reductions: dict[str, Reduction] | None) -> bool:
    return not reductions or all(reductions.get(name, _MEAN) == _MEAN for name in values)


# --- a step's values, for one client ---


class ListedLogs:
    """Takes the place of ``ClientLogs`` in a step that may be recorded.

    Args:
        log: What the step logs by.

    Attributes:
        listed: The values, the number of samples and how they were logged, of each minibatch.
    """

    def __init__(self, log: LogCapture) -> None:
        self.log = log
        self.listed: list[tuple[dict[str, Tensor], Tensor | int, int]] = []

    def add(self, values: dict[str, Tensor], sizes: Tensor | int, *others: Any) -> None:
        """Add one minibatch's values."""
        self.listed.append((values, sizes, self.log.way()))


def sorted_out(
    loss: Tensor | None, logged: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Metric]]:
    """Split what a step logs, with its loss, into values ``(1,)`` and torchmetrics objects."""
    values = plain_values(logged)
    if loss is not None:
        values[LOSS] = loss.detach().view(1)
    return values, {name: value for name, value in logged.items() if isinstance(value, Metric)}


def plain_values(logged: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a step logs, ``(1,)`` each."""
    return {name: value.detach().view(1) for name, value in tensors_in(logged).items()}


def tensors_in(logged: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a step logs."""
    found = {name: value for name, value in logged.items() if isinstance(value, Tensor)}
    return {name: one for name, one in found.items() if not isinstance(one, TorchmetricsValue)}


def computed_metrics(metrics: dict[str, Metric]) -> dict[str, Tensor]:
    """Compute and reset the torchmetrics objects that a client's steps have filled."""
    results = {}
    for name, metric in metrics.items():
        results[name] = one_number(name, metric.compute()).view(1)
        metric.reset()
    return results
