"""FedEM: Marfoq et al. (2021), Algorithm 1, on plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Array = np.ndarray


def responsibilities(pi: Array, losses: list[Array]) -> Array:
    """q, ``(samples, components)``."""
    joint = pi * np.exp(-np.stack(losses, 1))
    found: Array = joint / joint.sum(1, keepdims=True)
    return found


def fedem_client(
    models: list[Any],
    pi: Array,
    whole: Any,
    minibatches: Iterable[Any],
    losses: Callable[[Any, Any], Array],
    gradient: Callable[[Any, Any, Array], Any],
    step: Callable[[Any, Any], Any],
    weight_step: float = 1.0,
) -> tuple[list[Any], Array]:
    """A client's trained models, and its new weights.

    Args:
        models: The received models.
        pi: The client's weights.
        whole: All of its samples.
        minibatches: Those of its training.
        losses: The loss of each sample.
        gradient: Of the mean of the samples' losses, each times its factor.
        step: A model after a step along a gradient.
    """
    q = responsibilities(pi, [losses(model, whole) for model in models])
    trained = list(models)
    for batch in minibatches:
        of_batch = responsibilities(pi, [losses(model, batch) for model in models])
        trained = [
            step(model, gradient(model, batch, of_batch[:, j])) for j, model in enumerate(trained)
        ]
    return trained, (1 - weight_step) * pi + weight_step * q.mean(0)


def normal_responsibilities(pi: Array, x: Array, mean: Array, variance: Array) -> Array:
    """q by the densities of normal distributions, ``(samples, components)``."""
    joint = []
    for p, m, v in zip(pi, mean, variance, strict=True):
        joint.append(p * np.prod(np.exp(-((x - m) ** 2) / 2 / v) / np.sqrt(v), 1))
    found: Array = np.stack(joint, 1) / np.sum(joint, 0)[:, None]
    return found


def normal_estimates(x: Array, q: Array) -> tuple[Array, Array]:
    """The maximum of the likelihood: means and variances, ``(components, dim)``, two passes."""
    mean = np.stack([(q[:, j : j + 1] * x).sum(0) / q[:, j].sum() for j in range(q.shape[1])])
    variance = np.stack(
        [(q[:, j : j + 1] * (x - mean[j]) ** 2).sum(0) / q[:, j].sum() for j in range(q.shape[1])]
    )
    return mean, variance
