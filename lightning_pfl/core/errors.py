"""The exceptions of the package, and the checks of single settings.

Each error carries a complete sentence: what was given, what was expected, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import (
    MisconfigurationException as MisconfigurationException,  # for files that know no Lightning
)

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


def format_names(names: Sequence[str], clients: Sequence[int]) -> str:
    """The names of the first clients, as an error shows them.

    Example:
        >>> listed("abcdefg", [6, 2]), listed("abcdefg", range(6))
        ('g, c', 'a, b, c, d, e, ...')
    """
    some = ", ".join(names[client] for client in clients[:SHOWN])
    return some + (", ..." if len(clients) > SHOWN else "")


def client_error(
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
