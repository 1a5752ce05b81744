"""The exceptions of the package, and what its checks take for a number.

Each exception carries a complete sentence: what was given, what was expected, what to do.
"""

from __future__ import annotations


class ClientError(RuntimeError):
    """A client's work failed; names the stage, the client and the round.

    Args:
        stage: The contract function that failed, such as ``"client_step"``.
        client: The client's name.
        round: The communication round, counted from 0.
        cause: What went wrong, as a sentence.
    """

    def __init__(self, stage: str, client: str, round: int, cause: str) -> None:
        super().__init__(f"{stage} failed for client {client!r} in round {round}: {cause}")
        self.stage, self.client, self.round = stage, client, round


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
