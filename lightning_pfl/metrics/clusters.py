"""Which clients belong together, read off a solution, and how good a partition is."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.solvers.pairs import Pairs


def clusters_of_pairs(split: Tensor, pairs: Pairs) -> Tensor:
    r"""Clusters of clients joined by pairs with :math:`z_{ij}` and :math:`z_{ji}` exactly zero.

    Iterates fuse in :math:`z` alone; :math:`x_i - x_j` is zero only up to the residual.

    Args:
        split: :math:`z_{ij}`, ``(clients, slots, dim)``.
        pairs: The pairs.

    Returns:
        Each client's cluster, int64 ``(clients,)``, numbered in the order of their first clients.
    """
    pairs = pairs.to(split.device)
    zero = (split == 0).all(2) & pairs.mask
    both = zero & (pairs.opposite((~zero).unsqueeze(2).to(split)) == 0).squeeze(2)
    first, slot = both.nonzero(as_tuple=True)
    return components(len(pairs), first, pairs.neighbours[first, slot])


def clusters_of_models(models: Tensor, tolerance: float | None = None) -> Tensor:
    r"""Clusters of clients joined by :math:`\lVert x_i - x_j \rVert \le` a tolerance.

    Being close is not transitive; clusters are the connected components.

    Args:
        models: ``(clients, dim)``.
        tolerance: None: a thousandth of :math:`\max(1, \operatorname{median}_i \lVert x_i
            \rVert)`.

    Returns:
        As :func:`clusters_of_pairs`.

    Example:
        >>> clusters_of_models(torch.tensor([[0.0], [1.0], [0.0001], [1.0]]))
        tensor([0, 1, 0, 1])
    """
    if tolerance is None:
        tolerance = 1e-3 * max(1.0, float(models.norm(dim=1).median()))
    first, second = (_distances(models) <= tolerance).nonzero(as_tuple=True)
    return components(len(models), first, second)


def components(count: int, first: Tensor, second: Tensor) -> Tensor:
    """Connected components of a graph.

    Args:
        count: Its nodes.
        first: Ends of its edges, int64 ``(edges,)``.
        second: Their other ends.

    Returns:
        Each node's component, int64 ``(count,)``, numbered in the order of their first nodes.

    Example:
        >>> components(4, torch.tensor([0, 3]), torch.tensor([2, 1]))
        tensor([0, 1, 0, 1])
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    edges = first.cpu().numpy(), second.cpu().numpy()
    graph = coo_matrix((np.ones(len(first)), edges), shape=(count, count))
    _, labels = connected_components(graph, directed=False)
    _, at, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(at))
    return torch.from_numpy(rank[inverse].astype(np.int64))


def adjusted_rand_index(labels: Tensor, truth: Tensor) -> float:
    """How well two partitions agree: 1 if they are equal, about 0 if by chance.

    Args:
        labels: Clusters, ``(clients,)``; their numbers mean nothing.
        truth: The other partition.

    Example:
        >>> adjusted_rand_index(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 2, 2]))
        1.0

    References:
        Hubert, Arabie. Comparing partitions. Journal of Classification 2, 1985.
    """
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(truth.cpu().numpy(), labels.cpu().numpy()))


def within_cluster_distance(models: Tensor, labels: Tensor) -> float:
    """Mean distance between two models of one cluster; NaN where all clusters have one member.

    Args:
        models: ``(clients, dim)``.
        labels: Clusters, ``(clients,)``.

    Example:
        >>> models = torch.tensor([[0.0], [2.0], [7.0]])
        >>> within_cluster_distance(models, torch.tensor([0, 0, 1]))
        2.0
    """
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    same &= ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return float(_distances(models)[same.to(models.device)].mean())


def _distances(models: Tensor) -> Tensor:
    return torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist")
