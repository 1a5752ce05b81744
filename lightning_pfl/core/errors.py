"""Exceptions of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.fabric.utilities.exceptions import (
    MisconfigurationException as MisconfigurationException,  # for files that know no Lightning
)
from torch import Tensor

SHOWN = 5
"""Number of clients that an error of several clients names."""
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError)
"""Exceptions of user code that become a :class:`ClientError`; all others pass unchanged."""


def require_federated(strategy: object, user: object) -> None:
    """Raise MisconfigurationException unless a Trainer's strategy is a federated one."""
    if getattr(strategy, "strategy_name", None) != "federated":
        raise MisconfigurationException(
            f"Expected a federated run, but {type(user).__name__} is used with "
            f"{type(strategy).__name__}. Pass Trainer(strategy=FederatedStrategy(...))."
        )


class ClientError(RuntimeError):
    """The failure of one client's work, with stage, client and round.

    Args:
        stage: Name of the function that failed, such as ``"client_step"`` or
            ``"validation_step"``.
        clients: Name of the client, or the names of several that run as one program.
        round: Communication round, from 0; in an evaluation the last finished one, None before
            the first.
        cause: A sentence about the cause.
        new: Whether they are clients that never took part.
    """

    def __init__(
        self,
        stage: str,
        clients: Sequence[str],
        round: int | None,
        cause: str,
        new: bool = False,
    ) -> None:
        who = ("new " if new else "") + ("client" if len(clients) == 1 else "clients")
        names = format_names([*map(repr, clients)], range(len(clients)))
        when = "" if round is None else f" in round {round}"
        super().__init__(f"{stage} failed for {who} {names}{when}: {cause}")
        self.stage, self.clients, self.round, self.cause = stage, tuple(clients), round, cause


def format_names(names: Sequence[str], clients: Sequence[int]) -> str:
    """Join the names of the first clients, as errors show them.

    Example:
        >>> format_names("abcdefg", [6, 2]), format_names("abcdefg", range(6))
        ('g, c', 'a, b, c, d, e, ...')
    """
    some = ", ".join(names[client] for client in clients[:SHOWN])
    return some + (", ..." if len(clients) > SHOWN else "")


REMEDIES = {
    r"target dtype to be Long|scalar type Long|dtype int32/int64 for index"
    r"|not implemented for '(Int|Bool)'": "If these are labels of classes, use `labels.long()`.",
    r"Float can't be cast to the desired|Subtraction, the `-` operator, with two bool": (
        "If these are labels of a binary loss, use `labels.float()`."
    ),
    r"(Target|index) -?\d+ is out of bounds|Class values must be smaller than num_classes": (
        "If it is a label, number the classes from 0, and give the model an output for each."
    ),
    r"Input type \((double|unsigned char)\) and"
    r"|same dtype, but got (Double|Long|Byte) and|scalar type Double but found Float": (
        "If these are samples, use `inputs.float()`."
    ),
    r"shapes cannot be multiplied|to have \d+ channels, but got \d+ channels instead"
    r"|input to conv[123]d, but got input of size|must be equal to input_size"
    r"|Given normalized_shape=|first two dimensions of batch2 tensor": (
        "If these are samples, give them the shape that the layers expect, or the layers theirs, "
        "such as a Linear's `in_features` or a convolution's `in_channels`."
    ),
    r"index out of range in self": (
        "An Embedding has rows for ids from 0 to `num_embeddings` - 1: give it more, or map ids "
        "that it doesn't know to one of these."
    ),
    "backward through the graph a second time": (
        "If samples require gradients, detach them in the data set, by `x.detach()`."
    ),
    "grad can be implicitly created only for scalar outputs": (
        "Return one number from `training_step`, such as the mean of the samples' losses."
    ),
    "more than 1 value per channel": (
        "BatchNorm can't train on a minibatch of one sample: choose a batch size that leaves none."
    ),
    "Needs at least two samples": (
        "Where it is a torchmetrics object, call its `update` in the step and log the object: it "
        "computes all samples of a client together, and one of a single sample has no value."
    ),
}
"""What to do about errors of torch, by a pattern of their text."""


def _remedy(text: str) -> str:
    found = (advice for pattern, advice in REMEDIES.items() if re.search(pattern, text))
    return next(found, "")


@contextmanager
def naming_clients(
    stage: str,
    names: Sequence[str],
    clients: Sequence[int] | Tensor,
    round: int | None,
    advice: str = "",
) -> Iterator[None]:
    """Add the clients' names to exceptions of the module's code on their data.

    Args:
        stage: As in :class:`ClientError`.
        names: The names of all clients.
        clients: Positions there of those at work; a tensor is read only if there is an error.
        round: As in :class:`ClientError`.
        advice: What else to do, after what is known about the cause; may be empty.

    Raises:
        ClientError: For one of :data:`FAILURES`.

    Example:
        >>> with naming_clients("test_step", ["ada"], [0], 3):
        ...     raise ValueError("Bad.")
        Traceback (most recent call last):
        lightning_pfl.core.errors.ClientError: test_step failed for client 'ada' in round 3: Bad.
    """
    try:
        yield
    # The first isn't about one client, the second names its own.
    except (torch.OutOfMemoryError, ClientError):
        raise
    except FAILURES as cause:
        # A key alone is no sentence.
        text = f"{type(cause).__name__}: {cause}" if isinstance(cause, KeyError) else str(cause)
        advice = " ".join(filter(None, (_remedy(text), advice)))
        text = f"{text.rstrip('. ')}. {advice}" if advice else text
        at_work = clients.tolist() if isinstance(clients, Tensor) else clients
        raise ClientError(stage, [names[client] for client in at_work], round, text) from cause


@contextmanager
def naming_new_clients() -> Iterator[None]:
    """Say in errors of clients' work that these clients never took part.

    Raises:
        ClientError: For one that doesn't say so.

    Example:
        >>> with naming_new_clients(), naming_clients("test_step", ["a"], [0], 3):
        ...     raise ValueError("Bad.")
        Traceback (most recent call last):
        lightning_pfl.core.errors.ClientError: test_step failed for new client 'a' in round 3: Bad.
    """
    try:
        yield
    except ClientError as error:
        new = ClientError(error.stage, error.clients, error.round, error.cause, new=True)
        raise new from error.__cause__


class CheckpointMismatchError(ValueError):
    """A checkpoint of another method, parameter split or number of clients."""
