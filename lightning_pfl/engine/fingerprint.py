"""Keys of recordings: the settings of modules and objects, and the forms of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pfl.engine.recording import BY_VALUE, by_value, flatten
from lightning_pfl.engine.safety.snapshot import DEPTH, MEMBERS, attributes, is_plain

COLLECTIONS = (list, tuple, dict, set, frozenset, deque)


class Same:
    """A key that compares by identity, and keeps its object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Collect every setting of a module and its submodules, which recordings treat as constants.

    Plain values are compared by value, collections and objects of users by what they hold, tensors
    that are no parameters of clients by identity and memory, others by identity.
    """
    parts = dict(_parts(module))
    registered = frozenset(map(id, parts.values()))
    found: list[Any] = [(name, type(part), part.training) for name, part in parts.items()]
    found += [
        (name, key, _setting(value, registered))
        for name, key, value in attributes(module)
        if name in parts
    ]
    found += [
        (name, _setting(dict(part.hparams), registered))
        for name, part in parts.items()
        if isinstance(part, L.LightningModule)
    ]
    found += [(name, _tensor(buffer)) for name, buffer in module.named_buffers()]
    found += [(name, _tensor(p)) for name, p in module.named_parameters() if not p.requires_grad]
    return tuple(found)


def _tensor(value: Tensor) -> tuple[Any, ...]:
    """Describe a tensor and its memory, which ``value.data = ...`` replaces and recordings keep."""
    strided = value.layout == torch.strided
    return Same(value), value.data_ptr() if strided else None, *(_layout(value) if strided else ())


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Iterate over names and layers, without torchmetrics objects, of which none reads anything."""
    yield prefix, module
    for name, part in module.named_children():
        if not isinstance(part, (Metric, MetricCollection)):
            yield from _parts(part, f"{prefix}.{name}" if prefix else name)


def _setting(value: Any, above: frozenset[int] = frozenset(), depth: int = DEPTH) -> Any:
    """Describe a value.

    Args:
        value: The value.
        above: Ids of what holds it, and of what is described elsewhere.
        depth: How deep contents are followed.
    """
    if isinstance(value, BY_VALUE):
        return by_value(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    held = _held(value)
    if held is None or id(value) in above or not depth or len(held) > MEMBERS:
        return repr(value) if isinstance(value, COLLECTIONS) else Same(value)
    above |= {id(value)}
    # Collections are compared by what they hold alone.
    same = type(value) if isinstance(value, COLLECTIONS) else Same(value)
    return same, tuple((key, _setting(one, above, depth - 1)) for key, one in held)


def _held(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a value holds, by name or number; None for what recordings don't follow."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, COLLECTIONS):
        return list(enumerate(value))
    if isinstance(value, MethodType):
        return [("__func__", value.__func__), ("__self__", value.__self__)]
    if isinstance(value, partial):
        return list(enumerate((value.func, *value.args))) + list(value.keywords.items())
    if isinstance(value, FunctionType):
        cells = (cell for cell in value.__closure__ or () if cell != CellType())  # not yet bound
        return list(enumerate(cell.cell_contents for cell in cells))
    return list(vars(value).items()) if is_plain(value) else None


def of_object(value: Any) -> Any:
    """Collect the settings of an object: plain values, and what other objects hold."""
    held = getattr(value, "__dict__", {})
    found = tuple((name, _setting(inner)) for name, inner in held.items())
    return (_setting(value), *found) if found else _setting(value)


def describe(tree: Any, leaves: list[Tensor]) -> Any:
    """Append a tree's tensors to a list; return all of it that recordings depend on.

    That is its structure, and shapes, memory layouts and types, also which leaves are expanded.

    Raises:
        TypeError: As in :func:`flatten`.
    """
    start = len(leaves)
    structure = flatten(tree, leaves)
    return structure, tuple(map(_layout, leaves[start:]))


def repeats(leaves: list[Tensor]) -> tuple[int, ...]:
    """Return which of some tensors are one object, which is one argument of a recording."""
    ids = list(map(id, leaves))
    return () if len({*ids}) == len(ids) else tuple(map(ids.index, ids))


def _layout(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.shape, leaf.stride(), leaf.dtype
