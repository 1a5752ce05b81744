"""FedRep's linear case: Collins et al. (2021), Algorithm 2, one client after another in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Draw = Callable[[int, int], tuple[Array, Array]]
"""Samples ``(m, d)`` and ``(m,)`` of a round and a client."""


def moments(
    samples: Sequence[tuple[Array, Array]], k: int, weights: Sequence[float] | None = None
) -> Array:
    """B^0, ``(d, k)``: the rank-k SVD of the mean of 1/m sum_j y_j^2 x_j x_j^T."""
    each = [
        sum(y_j**2 * np.outer(x_j, x_j) for x_j, y_j in zip(x, y, strict=True)) / len(y)
        for x, y in samples
    ]
    return np.linalg.svd(np.average(each, 0, weights))[0][:, :k]


def algorithm2(
    body: Array,
    heads: Array,
    draw: Draw,
    cohorts: Sequence[tuple[int, Sequence[int]]],
    lr: float,
    head_steps: int | None = None,
    head_lr: float = 0.0,
    weights: Sequence[float] | None = None,
) -> tuple[Array, Array]:
    """B ``(d, k)`` and heads ``(n, k)`` after the rounds of ``cohorts``, pairs (round, clients).

    Heads are solved for; or, with ``head_steps``, take that many gradient steps. ``weights`` are
    the clients', equal unless given.
    """
    heads = heads.copy()
    for t, clients in cohorts:
        received = []
        for i in clients:
            x, y = draw(t, i)
            if head_steps is None:
                heads[i] = np.linalg.lstsq(x @ body, y, rcond=None)[0]
            for _ in range(head_steps or 0):
                heads[i] -= head_lr * body.T @ x.T @ (x @ body @ heads[i] - y) / len(y)
            gradient = x.T @ (x @ body @ heads[i] - y)[:, None] @ heads[i][None] / len(y)
            received.append(body - lr * gradient)
        body = np.average(received, 0, weights and [weights[i] for i in clients])
    return body, heads
