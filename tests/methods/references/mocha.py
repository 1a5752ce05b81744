"""MOCHA: Smith et al. (2017), Algorithm 1 with the hinge loss, and its two objectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def objectives(
    x: Sequence[Array], y: Sequence[Array], dual: Sequence[Array], sigma: Array, lam: float
) -> tuple[float, float]:
    """Primal and dual value at dual variables, one array of samples per client; one output."""
    b = np.stack([a @ features / len(features) for a, features in zip(dual, x, strict=True)])
    w = sigma @ b / lam
    coupling = np.trace(w.T @ np.linalg.inv(sigma) @ w)
    losses = [np.maximum(0, 1 - t * (f @ v)).mean() for f, t, v in zip(x, y, w, strict=True)]
    gain = sum((a * t).mean() for a, t in zip(dual, y, strict=True))
    return sum(losses) + lam / 2 * coupling, gain - lam / 2 * coupling


def mocha(
    x: Sequence[Array],
    y: Sequence[Array],
    orders: Sequence[Sequence[Sequence[int]]],
    lam: float,
    inner: int,
    own_bound: bool = False,
) -> tuple[Array, Array, list[Array]]:
    """W (n, d), Sigma and the dual variables; ``orders[t][k]`` are the samples that client k visits
    in round t, none for a client that drops out."""
    n, d = len(x), x[0].shape[1]
    w, sigma, rho = np.zeros((n, d)), np.eye(n) / n, np.ones(n)
    dual = [np.zeros(len(features)) for features in x]
    for t, visits in enumerate(orders):
        delta_b = np.zeros((n, d))
        for k in range(n):
            size, delta_w = len(x[k]), np.zeros(d)
            for i in visits[k]:
                f, t_i, a = x[k][i], y[k][i], dual[k][i]
                u = w[k] + rho[k] * delta_w
                q = lam * size * (1 - t_i * (f @ u)) / (sigma[k, k] * rho[k] * (f @ f)) + a * t_i
                dual[k][i] = t_i * np.clip(q, 0, 1)
                delta_w += sigma[k, k] * (dual[k][i] - a) * f / (lam * size)
                delta_b[k] += (dual[k][i] - a) * f / size
        w = w + sigma @ delta_b / lam
        if (t + 1) % inner == 0:
            values, vectors = np.linalg.eigh(w @ w.T)
            root = vectors @ np.diag(np.sqrt(np.maximum(values, 1e-7))) @ vectors.T
            sigma = root / np.trace(root)
            rho = np.abs(sigma).sum(1) / np.diag(sigma)
            rho = rho if own_bound else np.full(n, rho.max())
            b = [a @ features / len(features) for a, features in zip(dual, x, strict=True)]
            w = sigma @ np.stack(b) / lam
    return w, sigma, dual
