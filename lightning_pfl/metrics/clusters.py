"""Clusters of clients in a solution, and measures of a partition."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.solvers.clusters import Labels, check_labels, components, number_labels
from lightning_pfl.solvers.pairs import Pairs


def clusters_of_pairs(split: Tensor, pairs: Pairs) -> Tensor:
    r"""Cluster clients joined by pairs with :math:`z_{ij}` and :math:`z_{ji}` exactly zero.

    Only :math:`z` fuses exactly; :math:`x_i - x_j` is zero up to the residual.

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
    r"""Cluster clients joined by :math:`\lVert x_i - x_j \rVert \le` a tolerance.

    Clusters are connected components, since closeness isn't transitive.

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


def adjusted_rand_index(labels: Labels, truth: Labels) -> float:
    """Measure the agreement of two partitions: 1 if equal, about 0 by chance.

    Args:
        labels: Clusters, ``(clients,)``, up to renumbering.
        truth: The other partition, in the same form.

    Raises:
        TypeError: If an argument isn't a list, a tensor or an array.
        ValueError: If a label is no whole number >= 0, or the lengths differ.

    Example:
        >>> adjusted_rand_index(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 2, 2]))
        1.0

    References:
        Hubert, Arabie. Comparing partitions. Journal of Classification 2, 1985.
    """
    from sklearn.metrics import adjusted_rand_score

    check_labels("truth", truth)
    one, other = (
        number_labels("truth", truth, len(truth)),
        number_labels("labels", labels, len(truth)),
    )
    return float(adjusted_rand_score(one.numpy(), other.numpy()))


def within_cluster_distance(models: Tensor, labels: Labels) -> float:
    """Compute the mean distance of two models of one cluster; NaN if no cluster has two.

    Args:
        models: ``(clients, dim)``.
        labels: Clusters, ``(clients,)``, up to renumbering.

    Raises:
        ValueError: If there isn't a whole number >= 0 for each model.

    Example:
        >>> models = torch.tensor([[0.0], [2.0], [7.0]])
        >>> within_cluster_distance(models, torch.tensor([0, 0, 1]))
        2.0
    """
    numbers = number_labels("labels", labels, len(models))
    same = numbers.unsqueeze(0) == numbers.unsqueeze(1)
    same &= ~torch.eye(len(numbers), dtype=torch.bool)
    return float(_distances(models)[same.to(models.device)].mean())


def _distances(models: Tensor) -> Tensor:
    return torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist")
