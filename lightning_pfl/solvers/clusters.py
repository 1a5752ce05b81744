"""Connected components, averages inside clusters, and a partition in two."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.tree import Model, tmap

Labels = Tensor | Sequence[int]
"""A cluster for each client: whole numbers >= 0, of which only equality counts."""


def numbered(name: str, labels: Labels, num_clients: int) -> Tensor:
    """Labels of clients, numbered from 0 in ascending order, int64 ``(clients,)``.

    Args:
        name: The argument that holds them, for the error.
        labels: A whole number for each client, in the order of the ids.
        num_clients: Number of clients.

    Raises:
        ValueError: If there aren't as many as clients, or if one is no whole number or negative.

    Example:
        >>> numbered("groups", [7, 7, 3], 3)
        tensor([1, 1, 0])
    """
    if len(labels) != num_clients:
        raise ValueError(
            f"Expected `{name}` to have one entry for each of {num_clients} clients, but got "
            f"{len(labels)} entries. Give one for every client, in the order of the ids."
        )
    given = whole(name, labels.tolist() if isinstance(labels, Tensor) else labels)
    if given and min(given) < 0:
        raise ValueError(
            f"Expected `{name}` to hold whole numbers >= 0, but got {min(given)}. Number them from "
            "0; leave out clients whose cluster isn't known, which methods mark by -1."
        )
    found: Tensor = torch.tensor(given, dtype=torch.int64).unique(return_inverse=True)[1]
    return found


def whole(name: str, labels: Iterable[int]) -> list[int]:
    """Labels as a list of ints; an error names the first that is no whole number."""
    found = []
    for label in labels:
        try:
            found.append(operator.index(label))
        except TypeError as cause:
            raise ValueError(
                f"Expected `{name}` to hold whole numbers, but got {label!r}. Number them, for "
                "example 0, 0, 1, 1."
            ) from cause
    return found


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
