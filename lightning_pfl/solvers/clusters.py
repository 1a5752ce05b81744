"""Connected components, averages over clusters, and bipartitions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.sums import double_sum
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, tmap

Labels = Tensor | Sequence[int]
"""A cluster per client: integers >= 0, compared by equality only."""


def number_labels(name: str, labels: Labels, num_clients: int) -> Tensor:
    """Renumber clients' labels from 0 in ascending order, int64 ``(clients,)``.

    Args:
        name: Name of the argument, for the error.
        labels: An integer >= 0 for each client, in the order of the ids.
        num_clients: Number of clients.

    Raises:
        TypeError: If it isn't a list, a tensor or an array.
        ValueError: If the number of labels is wrong, or one is no integer >= 0.

    Example:
        >>> number_labels("groups", [7, 7, 3], 3)
        tensor([1, 1, 0])
    """
    check_labels(name, labels)
    if len(labels) != num_clients:
        raise ValueError(
            f"Expected `{name}` to have one entry for each of {num_clients} clients, but got "
            f"{len(labels)} entries. Give one per client, in the order of the ids."
        )
    given = as_integers(name, labels.tolist() if isinstance(labels, Tensor) else labels)
    if given and min(given) < 0:
        raise ValueError(
            f"Expected `{name}` to hold whole numbers >= 0, but got {min(given)}. Number them from "
            "0, and leave out clients without a known cluster (-1)."
        )
    found: Tensor = torch.tensor(given, dtype=torch.int64).unique(return_inverse=True)[1]
    return found


def check_labels(name: str, labels: object) -> None:
    """Raise TypeError unless ``labels`` has entries."""
    if not isinstance(labels, (Tensor, Sequence, np.ndarray)) or not getattr(labels, "ndim", 1):
        raise TypeError(
            f"Expected `{name}` to hold a whole number for each client, but got {name}={labels!r}. "
            "Use a list or a tensor, for example [0, 0, 1, 1]."
        )


def as_integers(name: str, labels: Iterable[int]) -> list[int]:
    """Convert labels to a list of ints, or raise ValueError for the first that is no integer."""
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
    """Find the connected components of a graph.

    Args:
        count: Number of nodes.
        first: One end of each edge, int64 ``(edges,)``.
        second: The other end of each edge, int64 ``(edges,)``.

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
    """Average each cluster's uploads with weights; keep the model of clusters without uploads.

    Args:
        models: ``(clusters, ...)``.
        uploads: ``(clients, ...)``. Counters and masks take the maximum.
        member: Membership, 0 or 1, float64 ``(clusters, clients)``; a client is in one cluster.
        weights: float64 ``(clients,)``.
    """
    shares = member * send(weights, member.device, member.dtype)
    total = shares.sum(1, keepdim=True)
    shares = shares / torch.where(total > 0, total, 1.0)
    # As in `weighted_mean`, differences to the first client, of each cluster.
    first = member.argmax(1)
    origin = first[member.argmax(0)]

    def mean(old: Tensor, new: Tensor) -> Tensor:
        some = (total.squeeze(1) > 0).view(-1, *[1] * (old.ndim - 1))
        if new.is_floating_point():
            found = (new[first].double() + double_sum(new, shares, new[origin])).to(old.dtype)
        else:
            inside = member.bool().view(*member.shape, *[1] * (new.ndim - 1))
            least = False if new.dtype == torch.bool else torch.iinfo(new.dtype).min
            found = torch.where(inside, new.unsqueeze(0), least).amax(1)
        return torch.where(some, found, old)

    means: Model = tmap(mean, models, uploads)
    return means


def bipartition(similarity: Tensor) -> Tensor:
    """Cut clients in two by complete linkage, and return the part without the first client.

    Args:
        similarity: Symmetric similarities, ``(clients, clients)``.

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
    return send(labels != labels[0], similarity.device)


def gap(similarity: Tensor, second: Tensor) -> float:
    """Subtract the largest similarity between the parts from the smallest inside them."""
    together = second.unsqueeze(0) == second.unsqueeze(1)
    return float(similarity[together].min() - similarity[~together].max())
