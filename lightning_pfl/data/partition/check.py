"""Checks of partitions and of the parts that they return."""

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
            f"Expected `{name}` to be a Partition, but got {name}={value!r}. Use an instance "
            "of a class of lightning_pfl.data, or of your subclass of Partition."
        )
    return value


def split_result(found: Any, who: str) -> tuple[Any, Any]:
    """Return the parts and the plan that `split` returned, or raise TypeError if it is no pair."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(
            "Expected `split` to return a pair (positions of each client's samples, plan), but "
            f"{who} returned a {type(found).__name__}. End with `return parts, plan`, where the "
            "plan may be None."
        )
    return found


def checked(parts: Any, who: str, num_clients: int | None, num_samples: int) -> Parts:
    """Check a partition's parts and convert them to integer arrays.

    Clients may share samples, but one client may not have a sample twice, as the cuts could put it
    into its training and its test data.

    Args:
        parts: Positions of each client's samples: one sequence of integers per client.
        who: Name of the partition.
        num_clients: Required number of clients; None: any.
        num_samples: Number of samples of the source.

    Raises:
        ValueError: If the number of clients is wrong, or a position is out of range or repeated.
        TypeError: If positions aren't integers.
    """
    if not isinstance(parts, list | tuple):
        raise TypeError(
            "Expected `partition` to return a list with one array of positions per client, but "
            f"{who} returned a {type(parts).__name__}. Return a list of integer arrays."
        )
    if not parts or num_clients not in (None, len(parts)):
        wanted = "at least one client" if num_clients is None else f"{num_clients=} clients"
        raise ValueError(
            f"Expected `partition` to return parts for {wanted}, but got {len(parts)} from {who}. "
            "Return one array of positions per client; it may be empty."
        )
    arrays: Parts = [_positions(part, who, client) for client, part in enumerate(parts)]
    held = np.concatenate(arrays)
    owners = np.repeat(np.arange(len(arrays)), [len(part) for part in arrays])
    outside = (held < 0) | (held >= num_samples)
    if outside.any():
        at = outside.argmax()
        raise ValueError(
            f"Expected `partition` to return positions in 0..{num_samples - 1}, but got {held[at]} "
            f"from {who} for client {owners[at]}. Positions count the samples of the source."
        )
    order = np.lexsort((held, owners))
    again = (np.diff(owners[order]) == 0) & (np.diff(held[order]) == 0)
    if again.any():
        at = order[again.argmax()]
        raise ValueError(
            f"Expected `partition` to give a client each sample once, but {who} gave sample "
            f"{held[at]} to client {owners[at]} several times. Remove duplicates (np.unique)."
        )
    return arrays


def _positions(part: Any, who: str, client: int) -> Any:
    array = np.asarray(part)
    if array.ndim == 1 and (array.dtype.kind in "iu" or not len(array)):
        return array.astype(np.int64, copy=False)
    raise TypeError(
        "Expected `partition` to return each client's positions as a vector of integers, but got "
        f"dtype {array.dtype} and shape {array.shape} from {who} for client {client}. Use "
        "np.nonzero(mask)[0] for a mask."
    )
