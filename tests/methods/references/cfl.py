"""CFL: Sattler et al. (2021), Algorithm 2, on plain arrays: a round of all clients, or of some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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


def cfl_with_absence(
    update: Callable[[int, Array], Array],
    cohorts: Iterable[Sequence[int]],
    start: Array,
    clients: int,
    thresholds: tuple[float, float],
) -> Iterator[tuple[list[Array], list[list[int]], set[int]]]:
    """Each client's model, the clusters, and who has reported since its cluster's last split.

    After each round. A cluster of more than two is split once all of its clients have reported.

    Args:
        update: What client k makes of a model.
        cohorts: Who takes part in each round.
        start: The first model.
        clients: How many there are.
        thresholds: Of the mean change's norm, and of the largest change's.
    """
    models, clusters = [start] * clients, [list(range(clients))]
    last: dict[int, Array] = {}
    for cohort in cohorts:
        sent = {k: update(k, models[k]) - models[k] for k in cohort}
        last |= sent
        parts = []
        for members in clusters:
            found = [members]
            if len(members) > 2 and all(k in last for k in members):
                change = np.stack([last[k] for k in members])
                norms = np.linalg.norm(change, axis=1)
                still = np.linalg.norm(change.mean(0)) < thresholds[0]
                if still and norms.max() > thresholds[1]:
                    halves = complete_linkage(change @ change.T / np.outer(norms, norms))
                    found = [[members[k] for k in half] for half in halves]
                    for k in members:
                        del last[k]
            parts += found
        clusters = parts
        for members in clusters:
            here = [sent[k] for k in members if k in sent]
            if here:
                moved = models[members[0]] + np.mean(here, axis=0)
                for k in members:
                    models[k] = moved
        yield list(models), clusters, set(last)
