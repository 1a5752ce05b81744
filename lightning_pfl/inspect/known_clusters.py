"""Known clusters of clients, to compare with those that a method finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pfl.solvers.clusters import number_labels

KnownClusters = Sequence[int] | int | None
"""A cluster for each client, in the order of the ids; or the number of blocks of (nearly) equal
size, as in ``FeatureSkew("rotate90")``; None if unknown."""


def resolve_known_clusters(known_clusters: KnownClusters, num_clients: int) -> Tensor | None:
    """Number each client's known cluster from 0 in ascending order, int64 ``(clients,)``.

    Args:
        known_clusters: See :data:`KnownClusters`.
        num_clients: Number of clients.

    Raises:
        ValueError: If the number of entries or of blocks is wrong, or an entry is no integer.

    Example:
        >>> resolve_known_clusters(2, 5)
        tensor([0, 0, 0, 1, 1])
        >>> resolve_known_clusters([7, 7, 3], 3)
        tensor([1, 1, 0])
    """
    if known_clusters is None:
        return None
    if isinstance(known_clusters, int):
        if isinstance(known_clusters, bool) or not 1 <= known_clusters <= num_clients:
            raise ValueError(
                "Expected `known_clusters` to be between 1 and the number of clients "
                f"({num_clients}), but got {known_clusters=}. Use the number of blocks, or a list "
                "with a cluster for each client."
            )
        return known_clusters * torch.arange(num_clients) // num_clients
    return number_labels("known_clusters", known_clusters, num_clients)
