"""Connected components, averages inside clusters, and a partition in two."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.tree import Model, tmap


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


def cluster_means(models: Model, uploads: Model, member: Tensor, weights: Tensor) -> Model:
    """The weighted mean of what each cluster's clients sent; its model where nobody did.

    Args:
        models: ``(clusters, ...)``.
        uploads: ``(clients, ...)``. Counters take the maximum.
        member: Who is in which cluster, 0 or 1, float64 ``(clusters, clients)``.
        weights: float64 ``(clients,)``.
    """
    shares = member * weights.to(member)
    total = shares.sum(1, keepdim=True)
    shares = shares / torch.where(total > 0, total, 1.0)

    def mean(old: Tensor, new: Tensor) -> Tensor:
        some = (total.squeeze(1) > 0).view(-1, *[1] * (old.ndim - 1))
        if new.is_floating_point():
            found = torch.tensordot(shares.to(new), new, 1)
        else:
            inside = member.bool().view(*member.shape, *[1] * (new.ndim - 1))
            found = torch.where(inside, new.unsqueeze(0), torch.iinfo(new.dtype).min).amax(1)
        return torch.where(some, found, old)

    means: Model = tmap(mean, models, uploads)
    return means


def bipartition(similarity: Tensor) -> Tensor:
    """The second of two parts by complete linkage; the first holds the first client.

    Args:
        similarity: Symmetric, ``(clients, clients)``.

    Returns:
        bool ``(clients,)``.

    Example:
        >>> bipartition(torch.tensor([[1.0, -1.0, 0.9], [-1.0, 1.0, -0.8], [0.9, -0.8, 1.0]]))
        tensor([False,  True, False])
    """
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    distances = squareform((1 - similarity).cpu().numpy(), checks=False)
    labels = torch.from_numpy(cut_tree(linkage(distances, "complete"), n_clusters=2)[:, 0])
    return (labels != labels[0]).to(similarity.device)


def gap(similarity: Tensor, second: Tensor) -> float:
    """Smallest similarity inside the parts minus the largest one between them."""
    together = second.unsqueeze(0) == second.unsqueeze(1)
    return float(similarity[together].min() - similarity[~together].max())
