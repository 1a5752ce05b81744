"""What a client's step logs by ``self.log``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pfl.engine.base import LogOptions
from lightning_pfl.engine.batching import batch_length
from lightning_pfl.engine.logs import Reduction

REDUCTIONS = ("mean", "sum", "min", "max")
_JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class LogCapture:
    """Stands in for ``self.log`` during a client's step.

    Attributes:
        values: Logged value by name: a tensor, or a torchmetrics object.
        options: How each was logged; kept across steps.
        reductions: ``reduce_fx`` and ``batch_size`` of each name, as of its last step.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor | Metric] = {}
        self.options: dict[str, LogOptions] = {}
        self.reductions: dict[str, Reduction] = {}
        self._samples = 1

    def begin(self, batch: Any) -> None:
        """Forget the last step's values; the next ones are of this batch."""
        self.values, self._samples = {}, batch_length(batch)

    def __call__(  # noqa: D102 - stands in for `LightningModule.log`
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
        # The batch's own samples are what counts anyway, and a recorded step can't say a weight.
        logged = Reduction(reduction, None if weight == self._samples else weight)
        if not isinstance(value, Metric):
            value = value if isinstance(value, Tensor) else _number(name, value)
            value = value.detach() if value.is_floating_point() else value.detach().float()
            value = value.mean()
        if name in self.values:
            value, logged = self._together(name, value, logged)
        self.values[name], self.reductions[name] = value, logged

    def _together(
        self, name: str, value: Tensor | Metric, logged: Reduction
    ) -> tuple[Tensor | Metric, Reduction]:
        """What a name that a step logs again comes to, as Lightning's value of an epoch does."""
        earlier, kind = self.values[name], self.reductions[name].kind
        if value is earlier:  # a torchmetrics object has taken in both
            return value, logged
        if isinstance(value, Metric) or isinstance(earlier, Metric) or kind != logged.kind:
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

    def take(self) -> dict[str, Tensor | Metric]:
        """What the step logged; nothing is kept, as a value may be dead outside its ``vmap``."""
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
    """``batch_size`` as a number, which a tensor under ``vmap`` can't become."""
    weight = None if batch_size is None else float(batch_size)
    if weight is not None and not 0 < weight < torch.inf:
        raise ValueError(
            f"Expected `batch_size` of self.log({name!r}) to be a positive number, but got "
            f"{batch_size=}. Leave it out to weight by the batch's samples."
        )
    return weight
