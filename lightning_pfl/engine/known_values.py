"""Values that code may read: those that never change, and lists, dicts and objects of them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import is_dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from lightning.fabric.utilities import AttributeDict

from lightning_pfl.engine.safety.snapshot import MEMBERS, is_plain

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types whose values never change."""
HELD = 3
"""How deep lists, dicts and objects may be in each other, less than recordings follow."""
HARMLESS = frozenset(
    {
        *("__module__", "__doc__", "__init__", "__annotations__", "__annotate__", "__dict__"),
        *("__weakref__", "__qualname__", "__firstlineno__", "__static_attributes__", "__repr__"),
        *("__parameters__", "__orig_bases__", "__abstractmethods__", "__annotate_func__"),
        *("__annotations_cache__", "__type_params__", "__jit_unused_properties__"),
        "__slotnames__",  # which stays there after an object was copied
    }
)
"""Names of Python's in a class by which attributes and operators mean what they always do."""
DATACLASS = frozenset(
    {
        *("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"),
        *("__setattr__", "__delattr__"),
    }
)
"""Functions that are made for a dataclass, by which its fields are compared, or written to."""
UNCALLED = frozenset(
    {
        *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__replace__"),
        "__post_init__",
    }
)
"""What else a dataclass has that no step calls."""


def is_constant(value: Any) -> bool:
    """Whether a value never changes, nor what it holds."""
    if type(value) in (tuple, frozenset):
        return all(map(is_constant, value))
    return type(value) in PLAIN


def held_by(value: Any, depth: int = HELD) -> list[Any] | None:
    """Return a list, a dict or an object, and those in it, which all hold plain values alone.

    None where it holds, or is, something else.
    """
    if not depth or not (type(value) in (list, dict, tuple, AttributeDict) or _is_record(value)):
        return None
    inside = value if isinstance(value, (list, dict, tuple)) else vars(value)
    keys, members = (inside.keys(), inside.values()) if isinstance(inside, dict) else ((), inside)
    if len(members) > MEMBERS or not all(map(is_constant, keys)):
        return None
    found = [value]
    for one in members:
        if not is_constant(one):
            if (held := held_by(one, depth - 1)) is None:
                return None
            found += held
    return found


def _is_record(value: Any) -> bool:
    """Whether an object has attributes alone, and no code of its class runs but in its making."""
    kind = type(value)
    if kind in (SimpleNamespace, Namespace):
        return True
    if not is_plain(value) or type(kind) is not type:
        return False
    members = [item for one in kind.__mro__[:-1] for item in vars(one).items()]
    return all(
        _is_of_record(kind, name, member) if name.startswith("__") else is_constant(member)
        for name, member in members
    )


def _is_of_record(kind: type, name: str, member: Any) -> bool:
    """Whether a name of Python's in a class is harmless, or was made for a dataclass."""
    if name in HARMLESS or not is_dataclass(kind):
        return name in HARMLESS
    made = isinstance(member, FunctionType) and member.__code__.co_filename == "<string>"
    return name in UNCALLED or (name in DATACLASS and (made or member is None))
