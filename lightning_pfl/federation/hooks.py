"""The hooks of a module inside a step or on its minibatch, and the counters that a step reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import lightning as L

from lightning_pfl._lightning import is_overridden
from lightning_pfl.engine.instructions import codes_in

STEP_HOOKS = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_start",
    "on_train_batch_end",
)
"""Called in every step of every client."""
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Called on every minibatch, in this order; a data module has them as well."""
COUNTERS = ("global_step", "is_last_batch", "num_training_batches")
"""Numbers of the Trainer that are a client's own while it trains in Lightning's loop."""
ESTIMATE = "estimated_stepping_batches"
"""What a Trainer computes of its numbers of minibatches, which are those of clients or of one."""
_FRAMEWORKS = ("torch", "lightning", "torchmetrics")


def overridden(module: L.LightningModule, hooks: Sequence[str]) -> list[str]:
    """Name the hooks that a module overrides."""
    return [hook for hook in hooks if is_overridden(hook, module)]


def counters_read(module: L.LightningModule) -> list[str]:
    """Name the :data:`COUNTERS` that the code of a training step names.

    Functions that it reaches by their names are looked at as well: the module's own, nested and
    decorated ones, and those of its file.

    Example:
        >>> class WarmsUp(L.LightningModule):
        ...     def training_step(self, batch, batch_idx):
        ...         return self.weight() * self(batch).mean()
        ...     def weight(self):
        ...         return min(1.0, self.global_step / 1000)
        >>> counters_read(WarmsUp())
        ['global_step']
    """
    names = _names_read(module, ("training_step", "forward", "per_sample"))
    return [name for name in COUNTERS if name in names and name not in vars(module)]


def estimates_in(module: L.LightningModule) -> list[str]:
    """Name the functions of a module that Lightning calls in a fit and that read :data:`ESTIMATE`.

    Example:
        >>> class Cycles(L.LightningModule):
        ...     def configure_optimizers(self):
        ...         self.total = self.trainer.estimated_stepping_batches
        >>> estimates_in(Cycles())
        ['configure_optimizers']
    """
    hooks = [name for name in dir(L.LightningModule) if name.startswith(("on_", "configure_"))]
    callers = ("setup", "training_step", "lr_scheduler_step", *STEP_HOOKS[:3], *hooks)
    return [name for name in callers if ESTIMATE in _names_read(module, (name,))]


def _names_read(module: L.LightningModule, starts: Sequence[str]) -> set[str]:
    """Return the names in the code of some functions of a module, and of those they reach."""
    seen: set[Any] = set()
    names: set[str] = set()
    waiting: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in starts]
    while waiting:
        name, around = waiting.pop()
        for function in _functions(module, name, around):
            if function not in seen:
                seen.add(function)
                found = {one for code in codes_in(function.__code__) for one in code.co_names}
                names |= found
                waiting += [(one, function.__globals__) for one in found]
    return names


def _functions(module: Any, name: str, around: dict[str, Any]) -> Iterator[FunctionType]:
    """Find the functions of a name: of the module and its classes, and of a file."""
    holders = [vars(kind) for kind in type(module).__mro__ if not _is_framework(kind)]
    for held in (vars(module), *holders, around):
        value = held.get(name)
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, FunctionType) and not _is_framework(value):
                yield value
                waiting += [inspect.unwrap(value)] if hasattr(value, "__wrapped__") else []
                waiting += [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]


def _filled(cell: Any) -> bool:
    """Whether a variable of the function around holds a function."""
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:  # empty
        return False


def _is_framework(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _FRAMEWORKS
