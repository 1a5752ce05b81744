"""What a partition gives is checked before samples are dealt out by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_pfl.data.partition.base import Partition, Parts


def require_partition(name: str, value: Any) -> Partition:
    """Return ``value`` if it is a partition.

    Raises:
        TypeError: It is something else, such as a function or a class.
    """
    if not isinstance(value, Partition):
        raise TypeError(
            f"Expected `{name}` to be a Partition, but got {name}={value!r}. Make an instance of a "
            "class of lightning_pfl.data, or of a subclass of Partition with your `split`."
        )
    return value


def split_result(found: Any, who: str) -> tuple[Any, Any]:
    """Return what `split` gave, parts and plan.

    Raises:
        TypeError: It isn't a pair.
    """
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(
            "Expected `split` to return the positions of each client's samples and a plan, but "
            f"{who} returned a {type(found).__name__}. End with `return parts, plan`; what `apply` "
            "needs to split test samples alike is the plan, None if nothing."
        )
    return found


def checked(parts: Any, who: str, num_clients: int | None, num_samples: int) -> Parts:
    """Return a partition's parts as integer arrays.

    Two clients may have a sample in common. A client may not have one twice: the cuts would put it
    into its training and its test data.

    Args:
        parts: Positions of each client's samples: one sequence of integers per client.
        who: Name of the partition.
        num_clients: How many clients there must be; None: any number.
        num_samples: How many samples there are to have.

    Raises:
        ValueError: Another number of clients, a position that there is not, or one twice.
        TypeError: Parts that are no integers.
    """
    if not isinstance(parts, list | tuple):
        raise TypeError(
            "Expected `partition` to give a list with one array of positions per client, but "
            f"{who} gave a {type(parts).__name__}. Return a list of integer arrays."
        )
    if not parts or num_clients not in (None, len(parts)):
        wanted = "at least one client" if num_clients is None else f"{num_clients=} clients"
        raise ValueError(
            f"Expected `partition` to give parts for {wanted}, but got {len(parts)} from {who}. "
            "Return one array of positions per client, an empty one for a client without samples."
        )
    arrays: Parts = [_positions(part, who, client) for client, part in enumerate(parts)]
    held = np.concatenate(arrays)
    owners = np.repeat(np.arange(len(arrays)), [len(part) for part in arrays])
    outside = (held < 0) | (held >= num_samples)
    if outside.any():
        at = outside.argmax()
        raise ValueError(
            f"Expected `partition` to give positions in 0..{num_samples - 1}, but got {held[at]} "
            f"from {who} for client {owners[at]}. Positions count the samples of the source."
        )
    order = np.lexsort((held, owners))
    again = (np.diff(owners[order]) == 0) & (np.diff(held[order]) == 0)
    if again.any():
        at = order[again.argmax()]
        raise ValueError(
            f"Expected `partition` to give a client each sample once, but {who} gave sample "
            f"{held[at]} to client {owners[at]} several times, so that it could be among its "
            "training and its test data, or count twice. Drop what is there twice (np.unique)."
        )
    return arrays


def _positions(part: Any, who: str, client: int) -> Any:
    array = np.asarray(part)
    if array.ndim == 1 and (array.dtype.kind in "iu" or not len(array)):
        return array.astype(np.int64, copy=False)
    raise TypeError(
        "Expected `partition` to give each client's positions as integers in a row, but got "
        f"dtype {array.dtype} and shape {array.shape} from {who} for client {client}. Use "
        "np.nonzero(mask)[0] for a mask."
    )
