"""Exceptions of the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import (
    MisconfigurationException as MisconfigurationException,  # for files that know no Lightning
)

SHOWN = 5
"""Number of clients that an error of several clients names."""
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError)
"""Exceptions of user code that become a :class:`ClientError`; all others pass unchanged."""


class ClientError(RuntimeError):
    """The failure of one client's work, with stage, client and round.

    Args:
        stage: Name of the function that failed, such as ``"client_step"`` or
            ``"validation_step"``.
        client: Name of the client, or the first names of several that run as one program.
        round: Communication round, from 0; in an evaluation the last finished one, None before
            the first.
        cause: A sentence about the cause.
    """

    def __init__(self, stage: str, client: str, round: int | None, cause: str) -> None:
        when = "" if round is None else f" in round {round}"
        super().__init__(f"{stage} failed for client {client!r}{when}: {cause}")
        self.stage, self.client, self.round = stage, client, round


def format_names(names: Sequence[str], clients: Sequence[int]) -> str:
    """Join the names of the first clients, as errors show them.

    Example:
        >>> format_names("abcdefg", [6, 2]), format_names("abcdefg", range(6))
        ('g, c', 'a, b, c, d, e, ...')
    """
    some = ", ".join(names[client] for client in clients[:SHOWN])
    return some + (", ..." if len(clients) > SHOWN else "")


def client_error(
    stage: str, client: str, round: int | None, cause: Exception, advice: str = ""
) -> ClientError:
    """Make the :class:`ClientError` for an exception of user code.

    Args:
        stage: As in :class:`ClientError`.
        client: As in :class:`ClientError`.
        round: As in :class:`ClientError`.
        cause: One of :data:`FAILURES`.
        advice: What to do; empty where the cause says it.

    Raises:
        torch.OutOfMemoryError: If that is the cause, which isn't about one client.

    Example:
        >>> client_error("test_step", "ada", 3, KeyError("label"), "Do that.")
        ClientError("test_step failed for client 'ada' in round 3: KeyError: 'label'. Do that.")
    """
    if isinstance(cause, torch.OutOfMemoryError):
        raise cause
    # The text of a KeyError is only the key.
    text = f"{type(cause).__name__}: {cause}" if isinstance(cause, KeyError) else str(cause)
    text = f"{text.rstrip('. ')}. {advice}" if advice else text
    return ClientError(stage, client, round, text)


class CheckpointMismatchError(ValueError):
    """A checkpoint of another method, parameter split or number of clients."""
