"""L2GD: Hanzely and Richtárik (2020), Algorithm 1, in the paper's step size and for given coins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Array = np.ndarray


def l2gd(
    start: Array,
    gradient: Callable[[Array, int], Array],
    coins: Sequence[bool],
    alpha: float,
    lam: float,
    p: float,
) -> Iterator[Array]:
    """All clients' models ``(n, dim)`` after each iteration; ``gradient(x, t)`` is of all F_i."""
    x = np.array(start, dtype=float)
    n = len(x)
    for t, coin in enumerate(coins):
        if coin:
            x = x - alpha * lam / (n * p) * (x - x.mean(0))
        else:
            x = x - alpha / (n * (1 - p)) * gradient(x, t)
        yield x
