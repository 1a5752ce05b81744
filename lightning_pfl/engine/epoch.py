"""The number of the round in steps that are recorded.

A weight of a loss that grows with ``self.current_epoch`` would make a recording for each round. So
a step that is recorded gets a :class:`Number` in its place, which notes what the step computes with
it: what meets a tensor is a tensor of one number, which is filled before replays, and a comparison
is a condition under which the recording holds. A step that does anything else with it is recorded
for each value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_pfl.engine.steps import NumberReadError

EPOCH = "current_epoch"
"""The attribute of a Trainer, and of a LightningModule."""
Compute = Callable[[int], Any]
"""Computes a number from that of a round."""
KINDS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
"""Types of tensors on which arithmetic has the same bits with a number and with a tensor of it."""
MOST = 8
"""Largest number of tensors of a recording, of each type."""
MEETS = frozenset(
    {
        *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"),
        *("mul", "__mul__", "__rmul__"),
        *("div", "__div__", "__truediv__", "__rdiv__", "__rtruediv__"),
    }
)
"""Names of torch's functions of a tensor and a number that have these bits."""


class Noted:
    """The uses of the round on which a recording depends.

    Args:
        round: The round in which it is made.

    Attributes:
        round: The round whose numbers its tensors have.
        used: Whether the step has read it.
    """

    def __init__(self, round: int) -> None:
        self.round, self.used = round, False
        self._conditions: list[tuple[Compute, bool]] = []
        # Made before, as whatever is made in a step is recorded. NumPy writes to their memory, in
        # whatever mode torch is.
        with torch.inference_mode(False):
            arrays = [np.zeros((), kind) for kind in KINDS.values() for _ in range(MOST)]
            self._free = [(array, torch.from_numpy(array)) for array in arrays]
        self._filled: list[tuple[Compute, Any]] = []

    def compares(self, compute: Compute) -> bool:
        """Return the value of a condition, under which the recording holds."""
        value = bool(compute(self.round))
        self._conditions.append((compute, value))
        return value

    def tensor(self, compute: Compute, dtype: torch.dtype) -> Tensor:
        """Return a tensor of a number, which is filled before a replay in another round."""
        for at, (array, tensor) in enumerate(self._free):
            if tensor.dtype == dtype:
                del self._free[at]
                array[...] = compute(self.round)
                self._filled.append((compute, array))
                return tensor
        raise NumberReadError("it computes more numbers from the epoch than a recording takes")

    def fits(self, round: int) -> bool:
        """Whether the recording holds in a round, whose numbers its tensors then have."""
        if round == self.round:
            return True
        try:
            if any(bool(compute(round)) is not value for compute, value in self._conditions):
                return False
            found = [(array, float(compute(round))) for compute, array in self._filled]
        except (ArithmeticError, TypeError):  # the step itself raises it, or has complex numbers
            return False
        for array, number in found:
            array[...] = number
        self.round = round
        return True


class Number:
    """A number that is computed from that of the round.

    Args:
        noted: Notes what is done with it.
        compute: Computes it.
    """

    def __init__(self, noted: Noted, compute: Compute) -> None:
        self.noted, self.compute = noted, compute
        self._kind = type(compute(noted.round))

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; its class is that of the number, for ``isinstance``."""
        return object.__getattribute__(self, "_kind" if name == "__class__" else name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call one of torch's functions with a tensor of the number in its place."""
        tensors = [one for one in args if isinstance(one, Tensor)]
        if len(args) != 2 or len(tensors) != 1 or kwargs or func.__name__ not in MEETS:
            raise NumberReadError(f"{func.__name__} reads the epoch")
        (tensor,) = tensors
        if tensor.dtype not in KINDS or tensor.device.type != "cpu":
            raise NumberReadError("the epoch meets another type of tensor")
        return func(*(one if one is tensor else _tensor(one, tensor.dtype) for one in args))

    def __bool__(self) -> bool:
        return self.noted.compares(self.compute)

    def _refuse(self, *_: Any) -> Any:
        raise NumberReadError("it reads the epoch")

    __hash__ = __repr__ = __str__ = __format__ = _refuse


def _tensor(number: Number, dtype: torch.dtype) -> Tensor:
    return number.noted.tensor(number.compute, dtype)


def _function_of(value: Any) -> Compute:
    """Return what computes a value from the number of a round."""
    if type(value) is Number:
        compute: Compute = value.compute
        return compute
    if type(value) not in (bool, int, float):
        raise NumberReadError("the epoch meets something else than a number")
    return lambda _: value


def _computing(function: Callable[[Any, Any], Any], swapped: bool) -> Any:
    """Return the function of an operator of two numbers."""

    def operate(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor) and not swapped:
            return NotImplemented  # so that torch's function is asked
        one, two = _function_of(other), self.compute
        if not swapped:
            one, two = two, one
        return Number(self.noted, lambda round: function(one(round), two(round)))

    return operate


def _comparing(function: Callable[[Any, Any], Any]) -> Any:
    """Return the function of a comparison of two numbers."""

    def compare(self: Number, other: Any) -> bool:
        one, two = self.compute, _function_of(other)
        return self.noted.compares(lambda round: function(one(round), two(round)))

    return compare


def _changing(function: Callable[[Any], Any]) -> Any:
    """Return the function of an operator of one number."""

    def operate(self: Number) -> Number:
        one = self.compute
        return Number(self.noted, lambda round: function(one(round)))

    return operate


for _name in {*dir(float), *dir(int)}.difference(dir(object), vars(Number)):
    setattr(Number, _name, Number._refuse)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _prefix in ("", "r"):
        _operate = _computing(getattr(operator, _name), bool(_prefix))
        setattr(Number, f"__{_prefix}{_name}__", _operate)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _changing(getattr(operator, _name)))


class _Standing:
    """Stands for the Trainer in a step that is recorded.

    Args:
        trainer: The Trainer.
        noted: What the recording depends on.
    """

    def __init__(self, trainer: Any, noted: Noted) -> None:
        self._trainer, self._noted = trainer, noted

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the Trainer."""
        if name != EPOCH:
            return getattr(self._trainer, name)
        self._noted.used = True
        return Number(self._noted, lambda round: round)


class Epoch:
    """The number of the round, for the steps of a module.

    Args:
        module: The user's module.
        is_read: Tells whether their code is known and reads it.

    Attributes:
        is_read: The same.
    """

    def __init__(self, module: nn.Module, is_read: Callable[[], bool]) -> None:
        self._module, self.is_read = module, is_read

    def now(self) -> int:
        """Return it."""
        trainer = vars(self._module).get("_trainer")
        return 0 if trainer is None else int(getattr(trainer, EPOCH))

    @contextmanager
    def noting(self) -> Iterator[Noted]:
        """Note what a step computes with it."""
        trainer, noted = vars(self._module).get("_trainer"), Noted(self.now())
        parts = [
            part
            for part in self._module.modules()
            if trainer is not None and isinstance(part, L.LightningModule)
            if part._trainer is trainer
        ]
        try:
            for part in parts:
                vars(part)["_trainer"] = _Standing(trainer, noted)
            yield noted
        finally:
            for part in parts:
                vars(part)["_trainer"] = trainer
