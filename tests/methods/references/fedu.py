"""FedU: Dinh et al. (2021), the combination of Algorithm 1, edge by edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray


def combine(
    models: Mapping[int, Array],
    edges: Mapping[tuple[int, int], float],
    step: float,
) -> dict[int, Array]:
    """The cohort's models after w_k - step * sum_l a_kl (w_k - w_l), all from the same w.

    Args:
        models: By client, of the cohort alone.
        edges: Weights by pair of clients, each pair once.
        step: mu R eta c.
    """
    new = {k: w.copy() for k, w in models.items()}
    for (i, j), weight in edges.items():
        if i in models and j in models:
            difference = models[i] - models[j]
            new[i] -= step * weight * difference
            new[j] += step * weight * difference
    return new


def objective_gradient(
    models: Sequence[Array],
    gradients: Sequence[Array],
    edges: Mapping[tuple[int, int], float],
    eta: float,
    factor: float,
) -> list[Array]:
    """Gradient of sum_k F_k + factor / 4 * eta * sum_k sum_l a_kl ||w_k - w_l||^2."""
    found = [g.copy() for g in gradients]
    for (i, j), weight in edges.items():
        found[i] += factor * eta * weight * (models[i] - models[j])
        found[j] += factor * eta * weight * (models[j] - models[i])
    return found
