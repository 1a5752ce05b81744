"""The squared penalty of all pairs, minimised over models and centre in turns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray


def squared_penalty(
    start: Array, prox: Callable[[int, Array, float], Array], gamma: float, rounds: int
) -> Array:
    """Models (n, d); ``prox(i, b, c)`` minimises f_i(x) + c/2 ||x - b||^2."""
    x: Array = start.copy()
    n = len(x)
    for _ in range(rounds):
        m = x.mean(0)
        x = np.stack([prox(i, m, 2 * gamma * n) for i in range(n)])
    return x
