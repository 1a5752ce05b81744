"""PDMM: Armacki et al. (2022), Algorithm 1, one block after another, for given draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Array = np.ndarray
Draw = tuple[set[int], set[tuple[int, int]], set[tuple[int, int]]]
"""Models, pairs and dual variables that are updated."""


def pdmm(
    start: Array,
    prox: Callable[[int, Array, float], Array],
    draws: Sequence[Draw],
    lam: float,
    rho: float,
    tau: float,
    nu: float,
    full: bool = True,
    eta: float = 0.0,
) -> Iterator[tuple[Array, Array]]:
    """Models (n, d) and z (n, n, d) after each iteration. ``prox(i, b, c)`` minimises f_i(x) +
    c/2 ||x - b||^2; ``lam`` is the penalty of each ordered pair; ``full`` corrects (16)."""
    n, d = start.shape
    x = start.copy()
    z, mu, mu_hat = np.zeros((n, n, d)), np.zeros((n, n, d)), np.zeros((n, n, d))
    for some, pairs, duals in draws:
        new_x, new_z = x.copy(), z.copy()
        for i in some:  # S2
            # Linear and quadratic coefficients: q/2 ||x||^2 - <p, x>.
            q, p = eta, eta * x[i]
            for j in range(n):
                if j == i:
                    continue
                q, p = q + rho, p + rho * (x[j] + z[i, j]) - mu_hat[i, j]
                if full:
                    q, p = q + rho, p + rho * (x[j] - z[j, i]) + mu_hat[j, i]
            new_x[i] = prox(i, p / q, q)
        for i, j in pairs:  # S3
            v = x[i] - x[j] + mu_hat[i, j] / rho
            norm = np.linalg.norm(v)
            new_z[i, j] = v * max(0.0, 1 - lam / rho / norm) if norm > 0 else v
        x, z = new_x, new_z
        for i, j in duals:  # S8 to S11
            r = x[i] - x[j] - z[i, j]
            mu[i, j] = mu[i, j] + tau * rho * r
            mu_hat[i, j] = mu[i, j] - nu * rho * r
        yield x, z
