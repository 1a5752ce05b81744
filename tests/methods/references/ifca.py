"""IFCA: Ghosh et al. (2020), Algorithm 1, one round on plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray


def ifca_round(
    models: Sequence[Array],
    clients: Sequence[int],
    loss: Callable[[int, Array], float],
    update: Callable[[int, Array], Array],
) -> tuple[list[Array], dict[int, int]]:
    """Model averaging: the new models, and who chose which.

    Args:
        models: One per cluster.
        clients: The cohort.
        loss: F_k of a model.
        update: LocalUpdate of client k from a model.
    """
    choice = {k: int(np.argmin([loss(k, m) for m in models])) for k in clients}
    trained = {k: update(k, models[j]) for k, j in choice.items()}
    new = []
    for j, model in enumerate(models):
        members = [trained[k] for k in clients if choice[k] == j]
        new.append(np.mean(members, axis=0) if members else model)
    return new, choice


def ifca_gradient_round(
    models: Sequence[Array],
    clients: Sequence[int],
    loss: Callable[[int, Array], float],
    gradient: Callable[[int, Array], Array],
    eta: float,
) -> tuple[list[Array], dict[int, int]]:
    """Gradient averaging."""
    choice = {k: int(np.argmin([loss(k, m) for m in models])) for k in clients}
    new = []
    for j, model in enumerate(models):
        total = sum((gradient(k, model) for k in clients if choice[k] == j), np.zeros_like(model))
        new.append(model - eta / len(clients) * total)
    return new, choice
