"""The exceptions of the package. Each carries a complete sentence.

What was given, what was expected, what to do.
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
