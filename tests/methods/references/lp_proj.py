"""LpProj: Lin et al. (2022), with a given projection with orthonormal rows, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Array = np.ndarray


def lp_proj_client(
    theta: Array,
    center: Array,
    projection: Array,
    minibatches: Iterable[Any],
    gradient: Callable[[Array, Any], Array],
    weight: float,
    norm: str,
    lr: float,
) -> tuple[Array, Array]:
    """The trained model, and the subgradient of |P theta - w|_p^p / p in the last step."""
    pull = np.zeros_like(center)
    for batch in minibatches:
        theta = theta - lr * gradient(theta, batch)
        residual = projection @ theta - center
        if norm == "l2":
            near = residual / (1 + lr * weight)  # argmin weight / 2 r^2 + (r - residual)^2 / 2 lr
        else:
            near = np.sign(residual) * np.maximum(np.abs(residual) - lr * weight, 0)
        # P P^T = 1: the change of P theta is lifted by P^T.
        pull = (residual - near) / (lr * weight)
        theta = theta + projection.T @ (near - residual)
    return theta, pull
