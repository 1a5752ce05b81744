"""Values that a client's step logs by ``self.log``.

What a step logs under one name more than once is reduced as Lightning's value of an epoch: the mean
of all values, weighted by their ``batch_size``, or their sum, minimum or maximum. One name for two
kinds of value in a step is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pfl.contract.records import LogOptions
from lightning_pfl.data.batch import batch_length
from lightning_pfl.engine.client_logs import JOINED, LOSS, REDUCTIONS, Reduction
from lightning_pfl.engine.epoch import KINDS, Number

TOO_FEW = "Needs at least two samples", "No samples to concatenate"
"""How errors of torchmetrics objects begin that have seen too few samples to compute a value."""


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
        orders: The names that a step has logged, in its order, of all steps since `restart`.
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
        self.restart()

    def restart(self) -> None:
        """Start to collect orders."""
        self.orders: set[tuple[str, ...]] = set()
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
            if value.numel() != 1:
                raise ValueError(
                    f"Expected self.log({name!r}, ...) to log one number, but got a tensor of "
                    f"shape {tuple(value.shape)}. Log its `mean()`, or each number under its own "
                    "name."
                )
            value = value.detach() if value.is_floating_point() else value.detach().float()
            # A step may change a scalar later, as by `loss += penalty`.
            value = value.clone()
            value = value.view(()) if value.ndim else value
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
            return JOINED[kind](earlier, value), logged
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
        self.orders.add(tuple(name for name, _ in named))
        self._way = way

    def take(self) -> dict[str, Tensor | Metric]:
        """Return and clear the step's values, since tensors are invalid outside their ``vmap``."""
        values, self.values = self.values, {}
        self.orders.add(tuple(values))
        return values


def _number(name: str, value: Any) -> Tensor:
    if type(value) is Number and torch.get_default_dtype() in KINDS:
        number: Any = value  # its tensor has the number of each round
        return torch.ones(()) * number  # type: ignore[no-any-return]
    try:
        if isinstance(value, str):  # which `float` reads
            raise TypeError
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
    values = {name: value.detach().view(1) for name, value in tensors_in(logged).items()}
    if loss is not None:
        values[LOSS] = loss.detach().view(1)
    return values, {name: value for name, value in logged.items() if isinstance(value, Metric)}


def tensors_in(logged: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a step logs."""
    found = {name: value for name, value in logged.items() if isinstance(value, Tensor)}
    return {name: one for name, one in found.items() if not isinstance(one, TorchmetricsValue)}


def computed_metrics(metrics: dict[str, Metric]) -> dict[str, Tensor]:
    """Compute and reset the torchmetrics objects that a client's steps have filled."""
    results = {}
    for name, metric in metrics.items():
        results[name] = computed(name, metric).view(1)
        metric.reset()
    return results


def computed(name: str, metric: Metric) -> Tensor:
    """Compute a client's torchmetrics object, a scalar; NaN if it has seen too few samples."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    if not any(part.update_called for part in parts):  # a sum of two has none of its own
        return torch.full((), torch.nan, dtype=torch.float64)
    try:
        value = metric.compute()
    except ValueError as error:
        if not str(error).startswith(TOO_FEW):
            raise
        return torch.full((), torch.nan, dtype=torch.float64)
    return one_number(name, value)
