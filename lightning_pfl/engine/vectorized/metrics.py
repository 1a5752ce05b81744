"""torchmetrics objects in a batched step, updated outside of it for each client.

Their states are counts and lists, which can't be batched. So a call inside the step only takes note
of its arguments; after the step each client's copy of the object gets its row of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pfl.engine.logs import TorchmetricsValue, one_number
from lightning_pfl.engine.program import NotVectorizableError

HOOKS = {
    name: hook
    for name, hook in inspect.getmembers(L.LightningModule, inspect.isfunction)
    if name.startswith("on_")
}
"""Functions of a LightningModule that may read a torchmetrics object later."""
MARK = "metric*"
"""First part of the names under which arguments leave a step among its logged values."""


class ClientMetrics:
    """The torchmetrics objects of a module, with a copy for each client of a chunk.

    Args:
        module: The user's module.
        clients: Number of clients.
        device: Device of their results.
    """

    def __init__(self, module: nn.Module, clients: int, device: torch.device) -> None:
        self.clients, self.device = clients, device
        self._objects: dict[str, Any] = dict(_outermost(module))
        self._first: dict[str, Any] = {}
        self._paths = {
            id(part): (path, inner)
            for path, one in self._objects.items()
            for inner, part in one.named_modules()
        }
        # Objects whose values alone are logged stay as they were, which hooks could notice.
        self._read_later = any(
            getattr(type(module), name, None) is not hook for name, hook in HOOKS.items()
        )
        self.begin()
        self._logged: dict[str, tuple[str, str]] = {}
        self._copies: dict[tuple[str, int], Any] = {}

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Take note of calls inside a ``with`` block, and don't make them."""
        before = {path: dict(vars(one)) for path, one in self._objects.items()}
        self._first = {path: deepcopy(one) for path, one in self._objects.items()}
        for path, one in self._objects.items():
            for name in ("forward", "update"):
                vars(one)[name] = self._noting(path, one)
            for name in ("compute", "reset"):
                vars(one)[name] = _refuse
        try:
            yield
        finally:
            for path, one in self._objects.items():
                vars(one).clear()
                vars(one).update(before[path])

    def _noting(self, path: str, one: nn.Module) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            given = {**{str(number): arg for number, arg in enumerate(args)}, **kwargs}
            if not all(isinstance(value, Tensor) for value in given.values()):
                raise NotVectorizableError(f"`{path}` gets other arguments than tensors")
            number = len(self._calls)
            self._calls.append((path, tuple(given)))
            self._given[number] = {k: value.detach() for k, value in given.items()}
            if isinstance(one, MetricCollection):
                names = one.keys(keep_base=False)
                return {str(name): TorchmetricsValue(number, str(name)) for name in names}
            return TorchmetricsValue(number)

        return note

    def begin(self) -> None:
        """Start a step."""
        self._calls: list[tuple[str, tuple[str, ...]]] = []
        self._given: dict[int, dict[str, Tensor]] = {}
        self._values: dict[str, TorchmetricsValue] = {}

    def take(self, logged: dict[str, Any]) -> dict[str, Tensor]:
        """Return a step's logged tensors, and among them the arguments of its calls."""
        found = {name: value for name, value in logged.items() if isinstance(value, Tensor)}
        for name, value in logged.items():
            if isinstance(value, TorchmetricsValue):
                self._values[name] = value
            elif isinstance(value, Metric):
                if id(value) not in self._paths:
                    raise NotVectorizableError(
                        f"self.log({name!r}, ...) logs a torchmetrics object that isn't an "
                        "attribute of the module"
                    )
                self._logged[name] = self._paths[id(value)]
        kept = {path for path, _ in self._logged.values()}
        once = set() if self._read_later else {value.call for value in self._values.values()}
        for number, (path, _) in enumerate(self._calls):
            if path not in kept and number not in once:
                raise NotVectorizableError(
                    f"`{path}` is updated but not logged, so the module may read it later; "
                    f"self.log(name, self.{path}) logs it"
                )
        for number, given in self._given.items():
            found |= {f"{MARK}{number}*{name}": value for name, value in given.items()}
        return found

    @torch.no_grad()
    def update(self, logged: dict[str, Tensor], rows: slice | Tensor | None) -> dict[str, Tensor]:
        """Make a step's calls for some clients; return what it logged, ``(clients,)``.

        Args:
            logged: What :meth:`take` returned, ``(clients, ...)``.
            rows: Positions of these clients; None for all.
        """
        if not self._calls:
            return logged
        values = {name: value for name, value in logged.items() if not name.startswith(MARK)}
        at = torch.arange(self.clients)[slice(None) if rows is None else rows].tolist()
        results: dict[int, list[Any]] = {}
        needed = {value.call for value in self._values.values()}
        for number, (path, names) in enumerate(self._calls):
            given = {name: logged[f"{MARK}{number}*{name}"] for name in names}
            for row, client in enumerate(at):
                one = self._copy(path, client)
                args = [leaf[row] for name, leaf in given.items() if name.isdecimal()]
                kwargs = {k: leaf[row] for k, leaf in given.items() if not k.isdecimal()}
                if number in needed:
                    results.setdefault(number, []).append(one(*args, **kwargs))
                else:
                    one.update(*args, **kwargs)
        for name, value in self._values.items():
            found = [value.of(result) for result in results[value.call]]
            values[name] = torch.stack([one_number(name, each) for each in found])
        return values

    def _copy(self, path: str, client: int) -> Any:
        if (path, client) not in self._copies:
            self._copies[path, client] = deepcopy(self._first[path])
        return self._copies[path, client]

    def compute(self) -> dict[str, Tensor]:
        """Compute the objects that were logged, float64 ``(clients,)``; NaN without an update."""
        found = {}
        for name, (path, inner) in self._logged.items():
            results = torch.full((self.clients,), torch.nan, dtype=torch.float64)
            for client in range(self.clients):
                if (path, client) in self._copies:
                    one = self._copies[path, client]
                    if isinstance(one, MetricCollection):
                        one.items()  # gives all members their states
                    results[client] = one_number(name, one.get_submodule(inner).compute())
            found[name] = results.to(self.device)
        return found


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Iterate over metrics and collections that are in no other."""
    for name, part in module.named_children():
        if isinstance(part, (Metric, MetricCollection)):
            yield f"{prefix}{name}", part
        else:
            yield from _outermost(part, f"{prefix}{name}.")


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotVectorizableError("the step computes or resets a torchmetrics object")
