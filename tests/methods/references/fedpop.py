"""FedPop without noise: Kotelevskii et al. (2022), with a Gaussian prior, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.methods.references.softmax import Weights


def fedpop_client(
    theta: Weights,
    phi: Weights,
    mu: Weights,
    minibatches: Iterable[Any],
    gradient: Callable[[Weights, Any], Weights],
    variance: float,
    samples: int,
    step: float,
    burn_in: int,
) -> tuple[Weights, Weights, Weights, Weights]:
    """The chain's end, the mean of its kept draws, and the gradients by phi and mu."""
    draws, by_phi, by_mu = [], [], []
    for number, batch in enumerate(minibatches):
        g = gradient({**phi, **theta}, batch)
        if number >= burn_in:
            by_phi.append({n: g[n] for n in phi})
            by_mu.append({n: (mu[n] - theta[n]) / variance for n in mu})
        theta = {
            n: theta[n] - step * (g[n] + (theta[n] - mu[n]) / variance / samples) for n in theta
        }
        if number >= burn_in:
            draws.append(theta)
    mean = [
        {n: np.mean([w[n] for w in kept], 0) for n in kept[0]} for kept in (draws, by_phi, by_mu)
    ]
    return theta, mean[0], mean[1], mean[2]
