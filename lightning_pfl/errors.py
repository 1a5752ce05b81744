"""The exceptions of the package, and the checks of single settings.

Each error carries a complete sentence: what was given, what was expected, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

SHOWN = 5
"""How many clients the error of a whole chunk names."""
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError)
"""What a user's step raises on a client's data; what isn't among it goes through unchanged."""


class ClientError(RuntimeError):
    """A client's work failed; names the stage, the client and the round.

    Args:
        stage: The contract function or the module's step that failed, such as ``"client_step"`` or
            ``"validation_step"``.
        client: The client's name; the first names of several that run as one program.
        round: The communication round, counted from 0; in an evaluation the last one that was
            finished, None before the first.
        cause: What went wrong, as a sentence.
    """

    def __init__(self, stage: str, client: str, round: int | None, cause: str) -> None:
        when = "" if round is None else f" in round {round}"
        super().__init__(f"{stage} failed for client {client!r}{when}: {cause}")
        self.stage, self.client, self.round = stage, client, round


def listed(names: Sequence[str], clients: Sequence[int]) -> str:
    """The names of the first clients, as an error shows them.

    Example:
        >>> listed("abcdefg", [6, 2]), listed("abcdefg", range(6))
        ('g, c', 'a, b, c, d, e, ...')
    """
    some = ", ".join(names[client] for client in clients[:SHOWN])
    return some + (", ..." if len(clients) > SHOWN else "")


def described(
    stage: str, client: str, round: int | None, cause: Exception, advice: str = ""
) -> ClientError:
    """The error that names the client in what the module's code has raised.

    Args:
        stage: As in :class:`ClientError`.
        client: As in :class:`ClientError`.
        round: As in :class:`ClientError`.
        cause: One of :data:`FAILURES`.
        advice: What to do; empty where the cause says it.

    Raises:
        torch.OutOfMemoryError: If that is the cause: it says nothing of the client.

    Example:
        >>> described("test_step", "ada", 3, KeyError("label"), "Do that.")
        ClientError("test_step failed for client 'ada' in round 3: KeyError: 'label'. Do that.")
    """
    if isinstance(cause, torch.OutOfMemoryError):
        raise cause
    # A key alone is no sentence.
    text = f"{type(cause).__name__}: {cause}" if isinstance(cause, KeyError) else str(cause)
    text = f"{text.rstrip('. ')}. {advice}" if advice else text
    return ClientError(stage, client, round, text)


class CheckpointMismatchError(ValueError):
    """A checkpoint that does not belong to this method, parameter layout or number of clients."""


def is_number(value: object) -> bool:
    """Whether a setting is a plain number: no bool, and no tensor, which no checkpoint would tell.

    Example:
        >>> is_number(0.5), is_number(True), is_number("0.5")
        (True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object, least: int) -> bool:
    """Whether a setting is a whole number of at least ``least``.

    Example:
        >>> is_whole(2, 1), is_whole(0, 1), is_whole(2.0, 1), is_whole(True, 1)
        (True, False, False, False)
    """
    return isinstance(value, int) and is_number(value) and value >= least


def check_number(
    name: str, value: float, advice: str, positive: bool = False, infinite: bool = False
) -> None:
    """Require a finite number >= 0; > 0 if ``positive``, also infinity if ``infinite``.

    Args:
        name: The argument.
        value: What was given.
        advice: The sentence that ends the error's text.
        positive: Whether 0 is refused.
        infinite: Whether infinity is a number here.

    Raises:
        ValueError: If it isn't.
    """
    fits = is_number(value) and (value > 0 if positive else value >= 0)
    if not fits or (value == math.inf and not infinite):
        kind = f"a {'' if infinite else 'finite '}number {'>' if positive else '>='} 0"
        raise ValueError(f"Expected `{name}` to be {kind}, but got {name}={value!r}. {advice}")


def check_whole(name: str, value: object, least: int, advice: str) -> None:
    """Require a whole number >= ``least``; ``advice`` ends the error's text.

    Raises:
        ValueError: If it isn't.
    """
    if not is_whole(value, least):
        raise ValueError(
            f"Expected `{name}` to be a whole number >= {least}, but got {name}={value!r}. {advice}"
        )


def check_choice(name: str, value: object, known: tuple[str, ...], advice: str) -> None:
    """Require one of two or more known strings; ``advice`` ends the error's text.

    Raises:
        ValueError: If it is none of them.

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
