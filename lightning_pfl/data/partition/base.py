"""The Partition class, and functions that several partitions share.

A partition splits the training samples and returns their positions and its *plan*: the part of
the draw that doesn't depend on single samples, such as each client's classes or shares of a class.
Applied to the test labels, the plan makes test data that resemble each client's training data.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator
from torch import Tensor

Array = npt.NDArray[Any]
# Positions of samples, and each client's.
Positions = npt.NDArray[np.int64]
Parts = list[Positions]


class Partition(ABC):
    """A split of samples over clients; subclasses define `split` and `apply`.

    Every draw uses the generator that is passed in, and every partition terminates: small clients
    are topped up, or the partition is refused.
    """

    @abstractmethod
    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Draw a plan and split the training samples by it.

        Args:
            labels: Labels of the training samples, ``(samples,)`` (or the column of `keys`).
            num_clients: Number of clients; ``None`` where the partition knows it.
            rng: Source of all randomness.

        Returns:
            Positions of each client's samples, and the plan for `apply`. A client has a sample
            once. Two clients may share one; then one may train on the other's test data.
        """

    @abstractmethod
    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Split other samples (the test set) by the plan; clients may be empty."""

    def __call__(
        self, labels: Array, num_clients: int | None, rng: Generator, plan: Any = None
    ) -> Parts:
        """Return the positions of each client's samples, by a new plan or by the given one."""
        if plan is not None:
            return self.apply(np.asarray(labels), plan, rng)
        return self.split(np.asarray(labels), num_clients, rng)[0]

    def keys(self, labels: Array, columns: Mapping[str, Array]) -> Array:
        """Return the values that this partition splits by: the labels, or another column."""
        return labels

    def names(self, plan: Any) -> tuple[str, ...] | None:
        """Return the clients' names if the data name them."""
        return None

    def change_features(self, features: Tensor, parts: Parts, plan: Any) -> Tensor:
        """Return the features as the clients see them; only feature skew changes them."""
        return features


def check_clients(num_samples: int, num_clients: int | None, min_size: int = 1) -> int:
    """Return ``num_clients`` if it is positive and each client can have ``min_size`` samples.

    Raises:
        ValueError: It is not a positive int, or there are too few samples.
    """
    if isinstance(num_clients, bool) or not isinstance(num_clients, int | np.integer):
        raise ValueError(
            f"Expected `num_clients` to be a positive int, but got {num_clients=}. "
            "Give the number of clients."
        )
    if num_clients < 1:
        raise ValueError(
            f"Expected `num_clients` to be a positive int, but got {num_clients=}. "
            "Use at least one client."
        )
    if num_samples < num_clients * min_size:
        raise ValueError(
            f"Expected at least {min_size} samples for each of {num_clients} clients "
            f"({num_clients * min_size} in all), but got {num_samples} samples. "
            "Use fewer clients or more data."
        )
    return int(num_clients)


def check_classes(labels: Array, who: str) -> Array:
    """Return the distinct classes of integer or string labels.

    Raises:
        ValueError: The labels are floats (regression targets) or not one per sample.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iubUO":
        raise ValueError(
            f"Expected one class label per sample for {who}, but got labels with dtype "
            f"{labels.dtype} and shape {labels.shape}. Use a partition without classes, such as "
            "IID or LogNormalSizes."
        )
    return np.unique(labels)


def check_min_size(min_size: int) -> int:
    """Return ``min_size`` if it is a non-negative int."""
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(
            f"Expected `min_size` to be a non-negative int, but got {min_size=}. "
            "Use 1 so that no client is empty."
        )
    return min_size


def check_positive(name: str, value: float) -> float:
    """Return ``value`` if it is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
        raise ValueError(
            f"Expected `{name}` to be a positive finite number, but got {name}={value!r}. "
            "Use a value such as 0.5."
        )
    return float(value)


def cut_by_shares(order: Positions, shares: Array) -> Parts:
    """Cut positions into consecutive pieces whose sizes follow ``shares``.

    The cumulated sizes are rounded, so the pieces cover ``order`` exactly and equal shares give
    sizes that differ by one at most.

    Args:
        order: Positions, ``(samples,)``.
        shares: Non-negative relative sizes, ``(clients,)``, with a positive sum.
    """
    total = np.cumsum(shares)
    cuts = np.floor(total * len(order) / total[-1] + 0.5).astype(np.int64)
    return np.split(order, cuts[:-1])


def top_up(parts: Parts, min_size: int, rng: Generator) -> Parts:
    """Move random samples from the largest clients to those with fewer than ``min_size``.

    Terminates because a client below ``min_size`` implies one above it (`check_clients` has made
    sure that there are enough samples), and every move shrinks the total shortage by one.
    """
    if all(len(part) >= min_size for part in parts):
        return parts
    lists = [list(rng.permutation(part)) for part in parts]
    largest = [(-len(part), client) for client, part in enumerate(lists) if len(part) > min_size]
    heapq.heapify(largest)
    changed = set()
    for client, part in enumerate(lists):
        while len(part) < min_size:
            size, donor = heapq.heappop(largest)
            part.append(lists[donor].pop())
            changed |= {client, donor}
            if -size - 1 > min_size:
                heapq.heappush(largest, (size + 1, donor))
    return [
        np.asarray(lists[client], dtype=np.int64) if client in changed else part
        for client, part in enumerate(parts)
    ]
