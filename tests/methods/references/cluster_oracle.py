"""Federated averaging in each of several known clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray


def cluster_oracle(
    start: Array,
    train: Callable[[int, Array], Array],
    labels: Sequence[int],
    samples: Sequence[int],
    cohorts: Sequence[Sequence[int]],
) -> dict[int, Array]:
    """Each cluster's model; ``train(k, w)`` is client k's local training."""
    models = {label: start.copy() for label in set(labels)}
    for cohort in cohorts:
        for label, model in list(models.items()):
            inside = [k for k in cohort if labels[k] == label]
            if inside:
                total = sum(samples[k] for k in inside)
                parts = [samples[k] / total * train(k, model) for k in inside]
                models[label] = np.sum(parts, axis=0)
    return models
