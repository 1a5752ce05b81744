"""Checks of single settings."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from inspect import signature


def is_number(value: object) -> bool:
    """Whether a setting is a plain int or float: no bool, no tensor.

    Example:
        >>> is_number(0.5), is_number(True), is_number("0.5")
        (True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_integer(value: object, least: int) -> bool:
    """Whether a setting is an integer (and no bool) of at least ``least``.

    Example:
        >>> is_integer(2, 1), is_integer(0, 1), is_integer(2.0, 1), is_integer(True, 1)
        (True, False, False, False)
    """
    return isinstance(value, int) and is_number(value) and value >= least


def check_number(
    name: str, value: float, advice: str, positive: bool = False, infinite: bool = False
) -> None:
    """Raise ValueError unless ``value`` is a finite number >= 0.

    Args:
        name: Name of the argument.
        value: The value given.
        advice: Last sentence of the error's text.
        positive: Whether to refuse 0.
        infinite: Whether to accept infinity.
    """
    fits = is_number(value) and (value > 0 if positive else value >= 0)
    if not fits or (value == math.inf and not infinite):
        kind = f"a {'' if infinite else 'finite '}number {'>' if positive else '>='} 0"
        advice = _convert(value, numbers.Real, "float") or advice
        raise ValueError(f"Expected `{name}` to be {kind}, but got {name}={value!r}. {advice}")


def check_integer(name: str, value: object, least: int, advice: str) -> None:
    """Raise ValueError unless ``value`` is an integer >= ``least``; ``advice`` ends the text."""
    if not is_integer(value, least):
        advice = _convert(value, numbers.Integral, "int") or advice
        raise ValueError(
            f"Expected `{name}` to be a whole number >= {least}, but got {name}={value!r}. {advice}"
        )


def _convert(value: object, kind: type, plain: str) -> str:
    """Return the advice for a number of NumPy, which a checkpoint couldn't compare as text."""
    wrong_type = isinstance(value, kind) and not isinstance(value, (bool, int, float))
    return f"Convert it by {plain}(...)." if wrong_type else ""


def check_choice(name: str, value: object, known: tuple[str, ...], advice: str) -> None:
    """Raise ValueError unless ``value`` is one of ``known``; ``advice`` ends the error's text.

    Example:
        >>> check_choice("norm", "l3", ("l2", "l1", "squared"), "Use 'l2'.")
        Traceback (most recent call last):
        ValueError: Expected `norm` to be 'l2', 'l1' or 'squared', but got norm='l3'. Use 'l2'.
    """
    if not isinstance(value, str) or value not in known:
        *first, last = map(repr, known)
        raise ValueError(
            f"Expected `{name}` to be {', '.join(first)} or {last}, but got {name}={value!r}. "
            f"{advice}"
        )


def check_share(name: str, value: float) -> float:
    """Return ``value`` if it is a share in [0, 1]."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(
            f"Expected `{name}` to be a share in [0, 1], but got {name}={value!r}. "
            "Use a value such as 0.5."
        )
    return float(value)


def check_budget(
    epochs: int | Mapping[str, int] | None,
    steps: int | Mapping[str, int] | None,
    what: str = "local",
) -> None:
    """Require exactly one of ``<what>_epochs`` and ``<what>_steps``.

    It is an integer >= 0, or one >= 1 by client name.
    """
    given = {f"{what}_epochs": epochs, f"{what}_steps": steps}
    chosen = {name: value for name, value in given.items() if value is not None}
    text = ", ".join(f"{name}={value!r}" for name, value in given.items())
    if len(chosen) != 1:
        raise ValueError(
            f"Expected exactly one of `{what}_epochs` and `{what}_steps`, but got {text}. Set the "
            "other one to None."
        )
    ((name, value),) = chosen.items()
    if not isinstance(value, Mapping):
        check_integer(name, value, 0, "Use 1, for example.")
        return
    for client, each in value.items():
        advice = "A client that shouldn't train has no training data."
        check_integer(f"{name}[{client!r}]", each, 1, advice)


def check_used(
    init: Callable[..., None], given: Mapping[str, object], applies: bool, condition: str
) -> None:
    """Raise ValueError for an argument other than its default that would have no effect.

    Args:
        init: The constructor.
        given: Values by name.
        applies: Whether they have an effect.
        condition: What gives them one, for the error.
    """
    defaults = signature(init).parameters
    for name, value in () if applies else given.items():
        if value != defaults[name].default:
            raise ValueError(
                f"Expected `{name}` with {condition} only, as it has no effect otherwise, but got "
                f"{name}={value!r}. Leave it out, or use {condition}."
            )


def share_of(fraction: float, count: int) -> int:
    """Return how many of ``count`` a fraction is, rounded down.

    Fractions are decimal, where 0.29 * 100 is 28.999999999999996.

    Example:
        >>> share_of(0.29, 100), share_of(0.3, 5)
        (29, 1)
    """
    return math.floor(round(fraction * count, 9))
