"""Calls of torchmetrics objects that are noted in a step, and made after it.

Their states are counts and lists, which can be neither batched nor recorded. So a call inside the
step only takes note of its arguments, which leave the step among what it logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.logs import TorchmetricsValue, one_number, tensors_in
from lightning_pfl.engine.program import NotVectorizableError

MARK = "metric*"
"""First part of the names under which arguments leave a step among its logged values."""


class Calls(NamedTuple):
    """The calls that a step has made of torchmetrics objects, without their arguments.

    Attributes:
        calls: Path of the object, and names of the arguments.
        values: Of a value that is logged: its name, the number of the call, and its key.
        objects: Of an object that is logged: its name, and its path, first to the outermost one.
    """

    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()
    values: tuple[tuple[str, int, str], ...] = ()
    objects: tuple[tuple[str, str, str], ...] = ()


class NotedMetrics:
    """Takes note of the calls of a module's torchmetrics objects.

    Args:
        module: The user's module.

    Attributes:
        objects: The objects that are in no other, by path.
        active: Whether calls are noted now, in the place of being made.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.objects: dict[str, Any] = {}
        self.active = False
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._calls: list[tuple[str, tuple[str, ...]]] = []
        self._given: dict[int, dict[str, Tensor]] = {}

    def look(self) -> None:
        """Find the objects that the module has now."""
        self.objects = dict(_outermost(self.module))
        self._paths = {
            id(part): (path, inner)
            for path, one in self.objects.items()
            for inner, part in one.named_modules()
        }

    def states(self) -> States:
        """Return what all objects hold."""
        self.look()
        every = [vars(part) for one in self.objects.values() for part in one.modules()]
        return [(held, {name: _copied(value) for name, value in held.items()}) for held in every]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let calls be all that a step does with the objects inside a ``with`` block."""
        if self.active:
            yield
            return
        self.look()
        self.active = True
        try:
            with self.replaced(hidden=True):
                yield
        finally:
            self.active = False

    @contextmanager
    def replaced(self, hidden: bool = False) -> Iterator[None]:
        """Replace the functions of the objects inside a ``with`` block.

        Args:
            hidden: Whether nothing else can be read of them.
        """
        before = {path: dict(vars(one)) for path, one in self.objects.items()}
        for path, one in self.objects.items():
            noting, held = self._noting(path, one), vars(one)
            if hidden:
                public = [name for name in held if not name.startswith("_")]
                held |= dict.fromkeys(public, _Hidden())
            held |= {"forward": noting, "update": noting, "compute": _refuse, "reset": _refuse}
        try:
            yield
        finally:
            for path, one in self.objects.items():
                vars(one).clear()
                vars(one).update(before[path])

    def _noting(self, path: str, one: nn.Module) -> Any:
        keys = list(map(str, one.keys())) if isinstance(one, MetricCollection) else None

        def note(*args: Any, **kwargs: Any) -> Any:
            given = {**{str(number): arg for number, arg in enumerate(args)}, **kwargs}
            if len(tensors_in(given)) < len(given):
                raise NotVectorizableError(f"`{path}` gets other arguments than tensors")
            number = len(self._calls)
            self._calls.append((path, tuple(given)))
            # As they are now, whatever the step does to them later.
            self._given[number] = {k: value.detach().clone() for k, value in given.items()}
            if keys is not None:
                return {key: TorchmetricsValue(number, key) for key in keys}
            return TorchmetricsValue(number)

        return note

    def taken(self, logged: Mapping[str, Any]) -> Calls | None:
        """Return a step's calls, by what it logs; None where it doesn't touch an object."""
        values, objects = [], []
        for name, value in logged.items():
            if isinstance(value, TorchmetricsValue):
                values.append((name, value.call, value.key))
            elif isinstance(value, Metric):
                if id(value) not in self._paths:
                    raise NotVectorizableError(
                        f"self.log({name!r}, ...) logs a torchmetrics object that isn't an "
                        "attribute of the module"
                    )
                objects.append((name, *self._paths[id(value)]))
        if not self._calls and not objects:
            return None
        return Calls(tuple(self._calls), tuple(values), tuple(objects))

    def given(self) -> dict[str, Tensor]:
        """Return the arguments of a step's calls, by names of their own."""
        return {
            _name(number, name): value
            for number, given in self._given.items()
            for name, value in given.items()
        }


States = list[tuple[dict[str, Any], dict[str, Any]]]
"""What objects hold, and copies of it."""


def put_back(states: States) -> None:
    """Let objects hold what they held, see :meth:`NotedMetrics.states`."""
    for held, copies in states:
        held.clear()
        held.update(copies)


def makes_calls(settings: EngineSettings) -> bool:
    """Whether a call gives the same outside of a step, which may have another precision."""
    return settings.autocast is None and settings.default_dtype is None


def make_calls(
    calls: Calls, given: Mapping[str, Tensor], objects: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Make the calls of a step, and return the values that it logs of them, scalars.

    Args:
        calls: The calls.
        given: Their arguments, by the names of :meth:`NotedMetrics.given`.
        objects: The objects, by path.
    """
    needed, results = {number for _, number, _ in calls.values}, {}
    with torch.no_grad():
        for number, (path, names) in enumerate(calls.calls):
            arguments = {name: given[_name(number, name)] for name in names}
            args = [value for name, value in arguments.items() if name.isdecimal()]
            kwargs = {name: value for name, value in arguments.items() if not name.isdecimal()}
            if number in needed:
                results[number] = objects[path](*args, **kwargs)
            else:
                objects[path].update(*args, **kwargs)
    return {
        name: one_number(name, TorchmetricsValue(number, key).of(results[number]))
        for name, number, key in calls.values
    }


def made(
    calls: Calls, values: Mapping[str, Tensor], module: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Metric]]:
    """Make the calls of a step of one client.

    Args:
        calls: The calls.
        values: What the step logs, ``(1,)``, and the calls' arguments.
        module: The user's module, whose objects are called.

    Returns:
        All values that it logs, and the objects, by name.
    """
    objects = {path: module.get_submodule(path) for path, _ in calls.calls}
    logged = {name: value for name, value in values.items() if not name.startswith(MARK)}
    logged |= {name: one.view(1) for name, one in make_calls(calls, values, objects).items()}
    found: dict[str, Any] = {
        name: module.get_submodule(f"{path}.{inner}" if inner else path)
        for name, path, inner in calls.objects
    }
    return logged, found


def _name(number: int, argument: str) -> str:
    return f"{MARK}{number}*{argument}"


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Iterate over metrics and collections that are in no other."""
    for name, part in module.named_children():
        if isinstance(part, (Metric, MetricCollection)):
            yield f"{prefix}{name}", part
        else:
            yield from _outermost(part, f"{prefix}{name}.")


def _copied(value: Any) -> Any:
    """Copy the state of an object, which is a tensor or a list of tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotVectorizableError("the step computes or resets a torchmetrics object")


class _Hidden:
    """Takes the place of what an object holds, with which a step can't do anything."""

    def __bool__(self) -> NoReturn:
        raise NotVectorizableError("the step reads what a torchmetrics object holds")
