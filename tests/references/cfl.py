"""CFL: Sattler et al. (2021), Algorithm 2, one round of all clients on plain arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray


def complete_linkage(similarity: Array) -> list[list[int]]:
    """Merge the two parts of which the least similar pair is most similar, until two are left."""
    parts = [[k] for k in range(len(similarity))]
    while len(parts) > 2:
        pairs = [(i, j) for j in range(len(parts)) for i in range(j)]
        i, j = max(pairs, key=lambda p: similarity[np.ix_(parts[p[0]], parts[p[1]])].min())
        parts[i] = sorted(parts[i] + parts[j])
        del parts[j]
    return sorted(parts)


def cfl_round(
    models: list[Array],
    clusters: list[list[int]],
    update: Callable[[int, Array], Array],
    eps_mean: float,
    eps_max: float,
    may_split: bool,
) -> tuple[list[Array], list[list[int]]]:
    """Models and clusters after a round.

    Args:
        models: One per cluster.
        clusters: Their clients.
        update: What client k makes of a model.
        eps_mean, eps_max: The two thresholds.
        may_split: Whether the round is late enough.
    """
    new_models, new_clusters = [], []
    for model, members in zip(models, clusters, strict=True):
        change = np.stack([update(k, model) - model for k in members])
        norms = np.linalg.norm(change, axis=1)
        parts = [list(range(len(members)))]
        still = np.linalg.norm(change.mean(0)) < eps_mean and norms.max() > eps_max
        if may_split and len(members) > 2 and still:
            parts = complete_linkage(change @ change.T / np.outer(norms, norms))
        for part in parts:
            new_models.append(model + change[part].mean(0))
            new_clusters.append([members[k] for k in part])
    return new_models, new_clusters
