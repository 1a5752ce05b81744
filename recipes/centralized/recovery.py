r"""Weights for which convex clustering recovers given clusters: two bounds, and the interval.

For a partition :math:`C_1, \dots, C_K` with sizes :math:`n_k` and mean losses :math:`g_k`, the
problem of :math:`K` nodes

.. math::
    \min_w \sum_k n_k\, g_k(w_k) + \Lambda \sum_{k<l} n_k n_l \lVert w_k - w_l \rVert

has a solution :math:`w^*(\Lambda)`. All clients of each cluster share :math:`w_k^*` if

.. math::
    \Lambda \ge \max_k \max_{i, j \in C_k} \frac{1}{n_k} \lVert \nabla f_i(w_k^*) - \nabla
    f_j(w_k^*) \rVert

and different clusters differ if

.. math::
    \Lambda < \frac{\min_{k \ne l} \lVert \nabla g_k(w_k^*) - \nabla g_l(w_k^*) \rVert}
    {2 \max_k \sum_{l \ne k} n_l}

Both are sufficient; recovery usually holds on a wider interval.

Clusters are a label per client: integers >= 0, compared by equality only. Rows of clusters follow
the labels in ascending order.

References:
    Armacki, Bajovic, Jakovetic, Kar. Personalized federated learning via convex clustering. 2022.
    arXiv:2202.00718, theorems 1 and 2: equations 5, 6 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pfl.solvers.clusters import Labels, number_labels
from lightning_pfl.solvers.pairs import Pairs
from recipes.centralized.losses import Grouped, Losses
from recipes.centralized.newtons_method import newton
from recipes.centralized.sum_of_norms import SumOfNorms

SHARES = tuple(10 ** (-2 + step / 12) for step in range(25))
"""Default weights of :func:`recovery_interval`, relative to :func:`consensus_weight`."""


@dataclass(frozen=True)
class Bounds:
    """The two bounds for a partition at one weight.

    Attributes:
        weight: The weight at which they were computed.
        fused: Right-hand side of equation 6: each cluster shares a model from here on.
        separated: Right-hand side of equation 13: different clusters differ below; infinite for
            one cluster.
    """

    weight: float
    fused: float
    separated: float

    @property
    def hold(self) -> bool:
        """Whether the weight is between the bounds, so that the partition is recovered exactly."""
        return self.fused <= self.weight < self.separated


def cluster_models(
    losses: Losses, labels: Labels, weight: float, start: Tensor, iterations: int = 2000
) -> Tensor:
    r"""Solve for the clusters' models :math:`w^*(\Lambda)`, ``(clusters, dim)``.

    Args:
        losses: The clients' losses.
        labels: Each client's cluster, ``(clients,)``.
        weight: :math:`\Lambda`.
        start: Initial models, one per **cluster**, ``(clusters, dim)``.
        iterations: Largest number of iterations.

    Raises:
        ValueError: If the labels aren't an integer >= 0 for each client, or ``start`` has another
            shape or type than the losses.
    """
    labels = _labels(losses, labels)
    _check_models("start", start, losses, int(labels.max()) + 1, "cluster")
    grouped = Grouped(losses, labels)
    if grouped.count == 1:
        return newton(grouped.value, grouped.gradient, grouped.hessian, start)
    sizes = torch.bincount(labels, minlength=grouped.count).double()
    pairs = Pairs.weighted(torch.outer(sizes, sizes))
    solver = SumOfNorms(grouped, pairs, penalty=float(sizes.mean()))
    return solver.solve(weight, start, iterations, tolerance=1e-9).models


def recovery_bounds(losses: Losses, labels: Labels, models: Tensor, weight: float) -> Bounds:
    """Compute both bounds at the :func:`cluster_models` of a weight.

    Args:
        losses: The clients' losses.
        labels: Each client's cluster, ``(clients,)``.
        models: The clusters' models, ``(clusters, dim)``.
        weight: The weight of this solution.

    Returns:
        The bounds.

    Raises:
        ValueError: As :func:`cluster_models`, of ``models``.
    """
    labels = _labels(losses, labels)
    _check_models("models", models, losses, int(labels.max()) + 1, "cluster")
    sizes = torch.bincount(labels)
    count = len(sizes)
    gradients = losses.gradient(models[labels])
    gaps = torch.cdist(gradients, gradients, compute_mode="donot_use_mm_for_euclid_dist")
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    fused = float((gaps / sizes[labels].unsqueeze(1)).where(same, 0.0).max())
    if count == 1:
        return Bounds(weight, fused, float("inf"))
    nearest = torch.inf
    for k in range(count):
        everywhere = losses.gradient(models[k].expand(len(labels), -1))
        means = torch.zeros_like(models).index_add(0, labels, everywhere)
        means = means / sizes.unsqueeze(1)
        distance = (means - means[k]).norm(dim=1)
        distance[k] = torch.inf
        nearest = min(nearest, float(distance.min()))
    return Bounds(weight, fused, nearest / (2 * float(len(labels) - sizes.min())))


def consensus_weight(losses: Losses, start: Tensor) -> float:
    """Compute the weight from which all models are equal: equation 6 for one cluster.

    Args:
        losses: The clients' losses.
        start: Initial models, one per **client**, ``(clients, dim)``; the search starts at their
            mean.

    Raises:
        ValueError: If ``start`` has another shape or type than the losses.
    """
    _check_models("start", start, losses, _count(losses, len(start)), "client")
    labels = torch.zeros(len(start), dtype=torch.int64)
    model = cluster_models(losses, labels, 0.0, start.mean(0, keepdim=True))
    return recovery_bounds(losses, labels, model, 0.0).fused


def recovery_interval(
    losses: Losses, labels: Labels, start: Tensor, weights: Sequence[float] | None = None
) -> tuple[list[Bounds], tuple[float, float] | None]:
    """Find weights for which a partition is recovered for certain.

    Args:
        losses: The clients' losses.
        labels: Each client's cluster, ``(clients,)``.
        start: Initial models, one per **client**, ``(clients, dim)``; each cluster starts at its
            mean.
        weights: Ascending weights; None: :data:`SHARES` of :func:`consensus_weight`.

    Returns:
        The bounds at each weight, and the smallest and largest weight at which they hold, or None.

    Raises:
        ValueError: As :func:`cluster_models`.
    """
    labels = _labels(losses, labels)
    _check_models("start", start, losses, len(labels), "client")
    if weights is None:
        whole = consensus_weight(losses, start)
        weights = [whole * share for share in SHARES]
    sizes = torch.bincount(labels)
    models = torch.zeros(len(sizes), start.shape[1], dtype=start.dtype)
    models = models.index_add(0, labels, start) / sizes.unsqueeze(1)
    found = []
    for weight in weights:
        models = cluster_models(losses, labels, weight, models)
        found.append(recovery_bounds(losses, labels, models, weight))
    good = [bounds.weight for bounds in found if bounds.hold]
    return found, (good[0], good[-1]) if good else None


def _count(losses: Losses, otherwise: int) -> int:
    """Return the number of clients of the losses, if known."""
    return int(getattr(losses, "num_clients", otherwise))


def _labels(losses: Losses, labels: Labels) -> Tensor:
    """Renumber labels from 0 without gaps."""
    found = number_labels("labels", labels, _count(losses, len(labels)))
    if not len(found):
        raise ValueError("Expected `labels` of at least one client, but got none. Add clients.")
    return found


def _check_models(name: str, models: Tensor, losses: Losses, count: int, each: str) -> None:
    """Raise ValueError unless there is one model per client or cluster, of the losses' type."""
    dtype = getattr(losses, "dtype", torch.float64)
    dim = getattr(losses, "dim", models.shape[-1] if models.ndim else 0)
    if tuple(models.shape) != (count, dim) or models.dtype != dtype:
        raise ValueError(
            f"Expected `{name}` to be one model per {each}, of the shape {(count, dim)} in "
            f"{dtype}, but got the shape {tuple(models.shape)} in {models.dtype}. Give one row per "
            f"{each}, and convert it by .to({dtype})."
        )
