"""Snapshots of a module's attributes besides its parameters and buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pfl.engine.operators import global_hooks

Snapshot = dict[tuple[str, str], tuple[Any, list[tuple[Any, Any]]]]
"""By submodule and attribute: the value, and a copy of the contents of it and of what it holds."""
COLLECTIONS = (list, dict, set, deque)
WHOLE = (Tensor, torch.Generator)
"""What holds nothing else."""
DEPTH, MEMBERS = 4, 1000
"""How deep contents are followed, and up to how many members of a collection."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
FOREIGN = frozenset({"builtins", "functools", "lightning", "lightning_pfl", "logging", "torch"})
"""Packages whose objects have contents that no step of a user changes."""
CONTENTS = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes that are replaced for a step: parameters and buffers."""
BOOKS = frozenset({*vars(L.LightningModule()), "log"})
"""Attributes of a LightningModule that no step reads, and ``log``, which is replaced for a step."""
HPARAMS = frozenset({"_hparams", "_hparams_name", "_hparams_initial"})
"""Those that ``save_hyperparameters`` sets."""


def attributes(module: nn.Module, metrics: bool = True) -> Iterator[tuple[str, str, Any]]:
    """Iterate over submodule name, attribute name and value of all attributes of users.

    Args:
        module: The module.
        metrics: Whether with those of torchmetrics objects.
    """
    left = (
        set() if metrics else {id(part) for one in metric_objects(module) for part in one.modules()}
    )
    for name, part in module.named_modules():
        if id(part) in left:
            continue
        # The private attributes of torch's layers follow from their parameters.
        torch_owns = type(part).__module__.startswith("torch.")
        books = BOOKS if isinstance(part, L.LightningModule) else frozenset[str]()
        for key, value in list(vars(part).items()):
            private = (torch_owns and key.startswith("_")) or key in HPARAMS
            if key not in CONTENTS and key not in books and not private:
                yield name, key, value


def metric_objects(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the torchmetrics objects of a module."""
    parts = module.modules()
    return tuple(part for part in parts if isinstance(part, (Metric, MetricCollection)))


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that run with the layers of a module, also those of all modules.

    Returns:
        Each with the name of its layer.
    """
    own = [
        (name, hook)
        for name, part in module.named_modules()
        for kind in HOOKS
        for hook in getattr(part, kind).values()
    ]
    return own + [("", hook) for hook in global_hooks()]


def has_generators(module: nn.Module) -> bool:
    """Whether layers have a generator of their own, whose use the global ones don't show."""
    return any(isinstance(held, torch.Generator) for *_, held in attributes(module))


def snapshot(module: nn.Module, metrics: bool = True) -> Snapshot:
    """Record every attribute of a module and its submodules, with its contents.

    Args:
        module: The module.
        metrics: Whether also those of torchmetrics objects.
    """
    registered = {id(part) for part in module.modules()}
    return {
        (name, key): (
            value,
            [(one, _contents(one, one is value)) for one in _reachable(value, set(registered))],
        )
        for name, key, value in attributes(module, metrics)
    }


def _reachable(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Iterate over a value and what it holds, as far as a step may change their contents."""
    if id(value) in seen or not (
        isinstance(value, (*WHOLE, *COLLECTIONS, nn.Module)) or is_plain(value)
    ):
        return
    seen.add(id(value))
    yield value
    if not isinstance(value, WHOLE) and depth < DEPTH and len(held := _members(value)) <= MEMBERS:
        for one in held:
            yield from _reachable(one, seen, depth + 1)


def is_plain(value: Any) -> bool:
    """Whether a value is an object of a user's class, whose contents may change."""
    return hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in FOREIGN


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value if isinstance(value, COLLECTIONS) else vars(value).values())


def _contents(value: Any, attribute: bool) -> Any:
    if isinstance(value, Tensor):
        # Held ones aren't copied, as they may be a data set.
        return _writes(value), value.detach().clone() if attribute else None
    if isinstance(value, torch.Generator):
        return value.get_state()
    return copy(value) if isinstance(value, COLLECTIONS) else dict(vars(value))


def _writes(value: Tensor) -> int:
    # A tensor made in inference mode, as in torchmetrics objects after an evaluation, has no
    # version counter.
    return -1 if value.is_inference() else value._version


def _written(value: Tensor, held: tuple[int, Tensor | None]) -> bool:
    version, copied = held
    if version >= 0 and value._version != version:
        return True
    # Nor does `value.data` count.
    return copied is not None and not is_same(value, copied)


def is_same(value: Tensor, copied: Tensor) -> bool:
    """Whether a tensor holds what a copy of it holds."""
    return value.shape == copied.shape and torch.allclose(
        value, copied, rtol=0, atol=0, equal_nan=True
    )


def changed(module: nn.Module, before: Snapshot, metrics: bool = True) -> str | None:
    """Find the first attribute that is another object or has other contents, or return None.

    Args:
        module: The module.
        before: What its attributes were.
        metrics: As of :func:`snapshot`.
    """
    now = {(name, key): value for name, key, value in attributes(module, metrics)}
    for at in [*now, *(at for at in before if at not in now)]:
        if at not in now or at not in before or _differs(now[at], *before[at]):
            return ".".join(part for part in at if part)
    return None


def _differs(value: Any, old: Any, held: list[tuple[Any, Any]]) -> bool:
    if value is not old:
        plain = isinstance(value, (bool, int, float, str)) and type(value) is type(old)
        return not (plain and value == old)
    return any(_has_changed(one, contents) for one, contents in held)


def _has_changed(value: Any, contents: Any) -> bool:
    if isinstance(value, Tensor):
        return _written(value, contents)
    if isinstance(value, torch.Generator):
        return not torch.equal(value.get_state(), contents)
    now, before = _members(value), _members(contents)
    return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))


def restore(module: nn.Module, before: Snapshot) -> None:
    """Restore every attribute."""
    parts = dict(module.named_modules())
    for name, key, _ in list(attributes(module)):
        if (name, key) not in before:
            del parts[name].__dict__[key]
    for (name, key), (value, held) in before.items():
        parts[name].__dict__[key] = value
        for one, contents in held:
            if _has_changed(one, contents):
                _put_back(one, contents)


def _put_back(value: Any, contents: Any) -> None:
    if isinstance(value, Tensor):
        if contents[1] is not None:
            value.data.copy_(contents[1])
    elif isinstance(value, torch.Generator):
        value.set_state(contents)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(contents)
    else:
        held = value if isinstance(value, (dict, set)) else vars(value)
        held.clear()
        held.update(contents)
