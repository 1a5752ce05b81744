"""Check arguments against their annotations, where these are plain types."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from os import PathLike
from types import UnionType
from typing import Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Kind(NamedTuple):
    """A kind of values: its name in errors, and whether a value is one."""

    name: str
    fits: Callable[[object], bool]


def check_types(
    function: Callable[..., object], given: Mapping[str, object], least: int | None = None
) -> None:
    """Raise ValueError unless arguments are what the annotations of a function say.

    Looked at are bool, int, float, str, ``Literal``, sequences of these, and None where it is one
    of several; whatever has another annotation passes. Numbers of NumPy are numbers; a bool is
    none. A path may stand for a str. Other ranges, and NaN, are for the function to check.

    Args:
        function: A function, or the ``__init__`` of a class.
        given: The arguments by name. Further entries, as ``locals()`` has them, pass.
        least: The smallest whole number that is allowed; None for no bound.

    Example:
        >>> def draw(count: int = 3, in_order: bool = True) -> None: ...
        >>> check_types(draw, {"count": "3"})
        Traceback (most recent call last):
        ValueError: Expected `count` to be a whole number, but got count='3'. The default is 3.
    """
    for name, kind, default in _parameters(function):
        if name not in given:
            continue
        value, bound = given[name], ""
        if least is not None and _is_number(value, numbers.Integral):
            bound = f" of at least {least}" if value < least else ""  # type: ignore[operator]
        if kind.fits(value) and not bound:
            continue
        advice = (
            "Give one." if default is inspect.Parameter.empty else f"The default is {default!r}."
        )
        raise ValueError(
            f"Expected `{name}` to be {kind.name}{bound}, but got {name}={value!r}. {advice}"
        )


@cache
def _parameters(function: Callable[..., object]) -> list[tuple[str, Kind, object]]:
    """Return the name, the kind and the default of each parameter that is looked at."""
    hints = get_type_hints(function)
    known = inspect.signature(function).parameters.items()
    kinds = ((name, kind_of(hints.get(name)), parameter.default) for name, parameter in known)
    return [(name, kind, default) for name, kind, default in kinds if kind is not None]


PLAIN: dict[object, Kind] = {
    bool: Kind("True or False", lambda value: isinstance(value, bool)),
    int: Kind("a whole number", lambda value: _is_number(value, numbers.Integral)),
    float: Kind("a number", lambda value: _is_number(value, numbers.Real)),
    str: Kind("a text", lambda value: isinstance(value, (str, PathLike))),
    PathLike[str]: Kind("a path", lambda value: isinstance(value, PathLike)),
    type(None): Kind("None", lambda value: value is None),
}


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def kind_of(hint: object) -> Kind | None:
    """Return what an annotation allows; None if it has more than plain types."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        *first, last = map(repr, inner)
        name = f"{', '.join(first)} or {last}" if first else last
        return Kind(name, lambda value: isinstance(value, str) and value in inner)
    if origin in (Union, UnionType):
        some = [kind_of(each) for each in inner]
        kinds = [kind for kind in some if kind is not None]
        if len(kinds) < len(some):
            return None
        name = " or ".join(kind.name for kind in kinds)
        return Kind(name, lambda value: any(kind.fits(value) for kind in kinds))
    if origin in (Sequence, list, tuple):
        each = kind_of(inner[0])
        return None if each is None else Kind(f"a list of {each.name} each", _fits_list(each))
    return PLAIN.get(hint)


def _fits_list(each: Kind) -> Callable[[object], bool]:
    def fits(value: object) -> bool:
        entries = value.tolist() if hasattr(value, "tolist") else value  # an array, a tensor
        return isinstance(entries, (list, tuple, range)) and all(map(each.fits, entries))

    return fits
