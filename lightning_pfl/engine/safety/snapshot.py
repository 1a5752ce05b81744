"""Snapshots of a module's attributes besides its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

Snapshot = dict[tuple[str, str], tuple[Any, Any]]
"""By submodule and attribute: the value, and a copy of its contents if it is a collection."""
COLLECTIONS = (list, dict, set)
CONTENTS = frozenset({"_parameters", "_buffers", "_modules", "log"})
"""Attributes that are replaced for a step: parameters, buffers and ``log``."""
BOOKS = frozenset(vars(L.LightningModule()))
"""Attributes that Lightning sets on a LightningModule, which no step reads."""


def attributes(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Iterate over submodule name, attribute name and value of all attributes of users."""
    for name, part in module.named_modules():
        # The private attributes of torch's layers follow from their parameters.
        torch_owns = type(part).__module__.startswith("torch.")
        books = BOOKS if isinstance(part, L.LightningModule) else frozenset[str]()
        for key, value in list(vars(part).items()):
            private = (torch_owns and key.startswith("_")) or key.startswith("_hparams")
            if key not in CONTENTS and key not in books and not private:
                yield name, key, value


def snapshot(module: nn.Module) -> Snapshot:
    """Record every attribute of a module and its submodules."""
    return {(name, key): (value, _held(value)) for name, key, value in attributes(module)}


def _held(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _writes(value), value.detach().clone()
    return copy(value) if isinstance(value, COLLECTIONS) else None


def _writes(value: Tensor) -> int:
    # A tensor made in inference mode, as in torchmetrics objects after an evaluation, has no
    # version counter.
    return -1 if value.is_inference() else value._version


def _written(value: Tensor, held: tuple[int, Tensor]) -> bool:
    if held[0] < 0:
        return value.shape != held[1].shape or not torch.equal(value, held[1])
    return value._version != held[0]


def changed(module: nn.Module, before: Snapshot) -> str | None:
    """Find the first attribute that is another object or has other contents, or return None."""
    now = {(name, key): value for name, key, value in attributes(module)}
    for at in [*now, *(at for at in before if at not in now)]:
        if at not in now or at not in before or _differs(now[at], *before[at]):
            return ".".join(part for part in at if part)
    return None


def _differs(value: Any, old: Any, held: Any) -> bool:
    if value is not old:
        plain = isinstance(value, (bool, int, float, str)) and type(value) is type(old)
        return not (plain and value == old)
    if isinstance(value, Tensor):
        return _written(value, held)
    if isinstance(value, COLLECTIONS):
        return len(value) != len(held) or any(
            a is not b for a, b in zip(_members(value), _members(held), strict=True)
        )
    return False


def _members(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)


def restore(module: nn.Module, before: Snapshot) -> None:
    """Restore every attribute."""
    parts = dict(module.named_modules())
    for name, key, _ in list(attributes(module)):
        if (name, key) not in before:
            del parts[name].__dict__[key]
    for (name, key), (value, held) in before.items():
        parts[name].__dict__[key] = value
        if isinstance(value, Tensor) and _written(value, held):
            value.data.copy_(held[1])
        elif isinstance(value, list):
            value[:] = held
        elif isinstance(value, (dict, set)) and _differs(value, value, held):
            value.clear()
            value.update(held)
