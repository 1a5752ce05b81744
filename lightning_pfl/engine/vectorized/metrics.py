"""torchmetrics objects in a batched step, updated outside of it for each client.

After the step each client's copy of an object gets its row of what a call was given.
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
from torchmetrics import MetricCollection

from lightning_pfl.engine.logs import computed, tensors_in
from lightning_pfl.engine.noted_metrics import MARK, Calls, NotedMetrics, make_calls
from lightning_pfl.engine.program import NotVectorizableError

HOOKS = {
    name: hook
    for name, hook in inspect.getmembers(L.LightningModule, inspect.isfunction)
    if name.startswith("on_")
}
"""Functions of a LightningModule that may read a torchmetrics object later."""


class ClientMetrics(NotedMetrics):
    """The torchmetrics objects of a module, with a copy for each client of a chunk.

    Args:
        module: The user's module.
        clients: Number of clients.
        device: Device of their results.
    """

    def __init__(self, module: nn.Module, clients: int, device: torch.device) -> None:
        super().__init__(module)
        self.clients, self.device = clients, device
        self.look()
        self._first: dict[str, Any] = {}
        # Objects whose values alone are logged stay as they were, which hooks could notice.
        self._read_later = any(
            getattr(type(module), name, None) is not hook for name, hook in HOOKS.items()
        )
        self._step = Calls()
        self._logged: dict[str, tuple[str, str]] = {}
        self._copies: dict[tuple[str, int], Any] = {}

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Take note of calls inside a ``with`` block, and don't make them."""
        self._first = {path: deepcopy(one) for path, one in self.objects.items()}
        with self.replaced():
            yield

    def take(self, logged: dict[str, Any]) -> dict[str, Tensor]:
        """Return a step's logged tensors, and among them the arguments of its calls."""
        found = tensors_in(logged)
        self._step = self.taken(logged) or Calls()
        self._logged |= {name: (path, inner) for name, path, inner in self._step.objects}
        kept = {path for path, _ in self._logged.values()}
        once = set() if self._read_later else {number for _, number, _ in self._step.values}
        for number, (path, _) in enumerate(self._step.calls):
            if path not in kept and number not in once:
                raise NotVectorizableError(
                    f"`{path}` is updated but not logged, so the module may read it later; "
                    f"self.log(name, self.{path}) logs it"
                )
        return found | self.given()

    def update(self, logged: dict[str, Tensor], rows: slice | Tensor | None) -> dict[str, Tensor]:
        """Make a step's calls for some clients; return what it logged, ``(clients,)``.

        Args:
            logged: What :meth:`take` returned, ``(clients, ...)``.
            rows: Positions of these clients; None for all.
        """
        if not self._step.calls:
            return logged
        values = {name: value for name, value in logged.items() if not name.startswith(MARK)}
        given = {name: value for name, value in logged.items() if name.startswith(MARK)}
        at = torch.arange(self.clients)[slice(None) if rows is None else rows].tolist()
        found = []
        for row, client in enumerate(at):
            copies = {path: self._copy(path, client) for path, _ in self._step.calls}
            mine = {name: leaf[row] for name, leaf in given.items()}
            found.append(make_calls(self._step, mine, copies))
        for name, *_ in self._step.values:
            values[name] = torch.stack([each[name] for each in found])
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
                    results[client] = computed(name, one.get_submodule(inner))
            found[name] = results.to(self.device)
        return found
