"""Clusters of clients by the angles between the subspaces of their inputs."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.checks import check_choice, check_integer, is_number
from lightning_pfl.data.batch import batch_leaves
from lightning_pfl.data.datasets import FederatedTensorDataset

Measure = Literal["smallest", "sum"]


def subspace_clusters(
    data: FederatedTensorDataset,
    num_clusters: int | None = None,
    max_angle: float | None = None,
    vectors: int = 3,
    measure: Measure = "smallest",
) -> list[int]:
    r"""Cluster clients by the subspaces that their inputs span most, for ``ClusterOracle``.

    A client's subspace is that of the ``vectors`` leading left singular vectors of its inputs
    :math:`X_k` (features, samples). Two clients are as far apart as the principal angles of their
    subspaces; clients are joined by average linkage. It is one-shot, before training: a client
    sends its vectors once, 4 bytes for each number in single precision.

    Args:
        data: The training split. Inputs are the first entry of a batch.
        num_clusters: Number of clusters, from 1 to that of the clients with samples.
        max_angle: Largest mean distance of clusters that are joined, in degrees, instead. Exactly
            one of the two.
        vectors: Vectors of a client, at least 1; as many as its inputs have, if they are fewer.
        measure: ``"smallest"`` angle, or ``"sum"`` of all angles.

    Returns:
        A cluster for each client, from 0. Clients without samples are in the largest one.

    Raises:
        ValueError: If an argument is out of its range, or no client has samples.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> data = FederatedTensorDataset((x, torch.zeros(3)), [[0], [1], [2]])
        >>> subspace_clusters(data, num_clusters=2)
        [0, 0, 1]

    References:
        Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin. Efficient distribution similarity
        identification in clustered federated learning via principal angles between client data
        subspaces. AAAI 2023. arXiv:2209.10526, Algorithm 1 (PACFL). Its sum is of the angles
        between vectors of equal rank; here it is that of principal angles.
    """
    from scipy.cluster.hierarchy import cut_tree, fcluster, linkage

    check_integer("vectors", vectors, 1, "Use 3, for example.")
    check_choice("measure", measure, get_args(Measure), "Use 'smallest'.")
    some = [k for k in range(data.num_clients) if data.num_samples[k] > 0]
    _check_size(num_clusters, max_angle, len(some))
    bases = [_basis(data, client, vectors) for client in some]
    distances = [
        _distance(bases[i], bases[j], measure)
        for i in range(len(some))
        for j in range(i + 1, len(some))
    ]
    found = np.ones(1, dtype=np.int64)
    if len(some) > 1:
        tree = linkage(distances, "average")
        found = (
            cut_tree(tree, num_clusters).flatten()  # scipy's "maxclust" gave fewer before 1.15
            if max_angle is None
            else fcluster(tree, max_angle, "distance")
        )
    # Numbered in the order of their first clients.
    number: dict[int, int] = {}
    labels = [number.setdefault(label, len(number)) for label in found.tolist()]
    largest = int(np.bincount(labels).argmax())
    clusters = [largest] * data.num_clients
    for client, label in zip(some, labels, strict=True):
        clusters[client] = label
    return clusters


def _check_size(num_clusters: int | None, max_angle: float | None, clients: int) -> None:
    """Raise ValueError unless one of the two sizes is given, in its range."""
    if not clients:
        raise ValueError(
            "Expected clients with samples, whose inputs span subspaces, but none has any. Use the "
            "training split."
        )
    if (num_clusters is None) == (max_angle is None):
        raise ValueError(
            f"Expected exactly one of `num_clusters` and `max_angle`, but got {num_clusters=}, "
            f"{max_angle=}. Use num_clusters=4, for example."
        )
    if num_clusters is not None:
        check_integer("num_clusters", num_clusters, 1, "Use 4, for example.")
        if num_clusters > clients:
            raise ValueError(
                f"Expected `num_clusters` to be at most the {clients} clients with samples, but "
                f"got num_clusters={num_clusters}. Use fewer clusters."
            )
    elif max_angle is None or not is_number(max_angle) or not max_angle >= 0:
        raise ValueError(
            "Expected `max_angle` to be a number of degrees >= 0, but got "
            f"max_angle={max_angle!r}. Use 10, for example."
        )


def _basis(data: FederatedTensorDataset, client: int, vectors: int) -> Tensor:
    """Compute the leading left singular vectors of a client's inputs, ``(features, vectors)``."""
    inputs = next(iter(batch_leaves(data.gather(data.indices[client]))))
    left, values, _ = torch.linalg.svd(inputs.flatten(1).double().T, full_matrices=False)
    rank = int((values > values.max() * 1e-10).sum())
    basis: Tensor = left[:, : max(1, min(vectors, rank))]
    return basis


def _distance(first: Tensor, second: Tensor, measure: Measure) -> float:
    """Compute the smallest principal angle of two subspaces, or the sum of all, in degrees."""
    cosines = torch.linalg.svdvals(first.T @ second).clamp(max=1)
    angles = torch.rad2deg(torch.acos(cosines))
    return float(angles.min() if measure == "smallest" else angles.sum())
