"""Layers of a user's whose code computes from inputs and attributes by torch's functions alone."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from inspect import getattr_static
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

BUILTINS = frozenset(
    {
        *("len", "range", "zip", "enumerate", "reversed", "sorted", "slice", "isinstance"),
        *(
            "int",
            "float",
            "bool",
            "tuple",
            "list",
            "dict",
            "min",
            "max",
            "sum",
            "abs",
            "all",
            "any",
        ),
    }
)
"""Functions of Python that read their arguments alone."""
ELSEWHERE = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME", "STORE_ATTR", "DELETE_ATTR"})
"""Instructions of code that changes or reads more."""
SPECIAL = frozenset({"__call__", "__getattr__", "__getattribute__", "__setattr__", "_call_impl"})
"""Functions by which a class changes what attributes and calls mean."""
READING = frozenset(
    {
        *("load", "from_file", "hub", "utils", "_C", "backends", "distributed", "multiprocessing"),
        *("jit", "ops", "cuda", "get_default_dtype", "is_grad_enabled", "initial_seed"),
    }
)
"""Names in torch that read files, settings or what other code has set, and those of modules."""
PLAIN = (bool, int, float, str, type(None))
Read = dict[tuple[Any, str], Any]
"""By owner and name: the functions of layers' code, and the global names that it reads."""


def read_by(layers: list[nn.Module]) -> Read | None:
    """Return what ``forward`` of users' layers reads besides inputs and attributes, if it's known.

    Its code, and that of functions of the layers that it calls, is read: global names must be
    torch's, or functions of Python that read their arguments alone. A class that writes ``super``
    or a closure, inherits from another layer, or sets attributes isn't known.

    Args:
        layers: The layers of a module that are of users' classes.

    Returns:
        These functions and global names, which code may replace later; None where it isn't known.
    """
    read: Read = {}
    known = all(
        type(layer).__mro__[1] is nn.Module
        and not SPECIAL & vars(type(layer)).keys()
        and "forward" in vars(type(layer))
        and "forward" not in vars(layer)
        and _reads_arguments(type(layer), "forward", layers, read)
        for layer in layers
    )
    return read if known else None


def _reads_arguments(kind: type, name: str, layers: list[nn.Module], read: Read) -> bool:
    """Whether a function of a layer's class reads nothing else; note what it reads."""
    if (kind, name) in read:  # whoever has put it there goes on only if it is known
        return True
    function = read[kind, name] = vars(kind)[name]
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(isinstance(default, PLAIN) for default in defaults):
        return False
    return all(
        one.opname not in ELSEWHERE
        and (one.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or _is_torchs(function, one, read))
        and (
            one.opname not in ("LOAD_ATTR", "LOAD_METHOD")
            or all(_is_plain(each, one.argval, layers, read) for each in layers)
        )
        and "SUPER" not in one.opname
        for one in _instructions(function.__code__)
    )


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Iterate over the instructions of a function and of those inside of it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _is_torchs(function: FunctionType, instruction: dis.Instruction, read: Read) -> bool:
    """Whether a global name is a function, a class or a module of torch, or a known function.

    An object may be of a class of torch's, such as a tensor, and yet a user's.
    """
    name = instruction.argval
    if name not in function.__globals__:
        return name in BUILTINS
    value = read[function, name] = function.__globals__[name]
    if isinstance(value, ModuleType):
        parts = value.__name__.split(".")
    elif isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        parts = [str(value.__module__).partition(".")[0], value.__name__]
    else:
        return False
    return parts[0] in ("torch", "math") and READING.isdisjoint(parts)


def _is_plain(layer: nn.Module, name: str, layers: list[nn.Module], read: Read) -> bool:
    """Whether an attribute, if it is this layer's, holds what recordings know."""
    if name.startswith("__") or name in READING:
        return False
    if name in vars(layer):
        return isinstance(vars(layer)[name], (*PLAIN, Tensor))
    found = getattr_static(type(layer), name, None)
    if found is None or vars(nn.Module).get(name) is found:
        return True
    return name in vars(type(layer)) and _reads_arguments(type(layer), name, layers, read)
