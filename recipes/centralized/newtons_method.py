"""Newton's method with a line search, for many small problems at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recipes.centralized.losses import Losses

Function = Callable[[Tensor], Tensor]
HALVINGS = 40


def newton(
    value: Function,
    gradient: Function,
    hessian: Function,
    start: Tensor,
    iterations: int = 100,
    tolerance: float = 1e-11,
) -> Tensor:
    """Minimise convex functions, one per row.

    Args:
        value: From ``(rows, dim)`` to ``(rows,)``.
        gradient: From ``(rows, dim)`` to ``(rows, dim)``.
        hessian: From ``(rows, dim)`` to ``(rows, dim, dim)``; piecewise constant is enough.
        start: ``(rows, dim)``.
        iterations: Most iterations.
        tolerance: A row stops where its gradient's norm is at most this.

    Returns:
        ``(rows, dim)``.
    """
    x = start
    for _ in range(iterations):
        g = gradient(x)
        active = g.norm(dim=1) > tolerance
        if not active.any():
            break
        h = hessian(x)
        # A small multiple of the identity, for functions that are flat in some direction.
        ridge = 1e-12 * (1 + h.diagonal(dim1=1, dim2=2).mean(1))
        h = h + ridge.view(-1, 1, 1) * torch.eye(h.shape[1], dtype=h.dtype)
        step = torch.where(active.unsqueeze(1), -torch.linalg.solve(h, g), 0.0)
        x = x + _damped(value, x, step, (g * step).sum(1)).unsqueeze(1) * step
    return x


def _damped(value: Function, x: Tensor, step: Tensor, slope: Tensor) -> Tensor:
    """Find the largest of 1, 1/2, 1/4, ... that decreases each value enough."""
    before = value(x)
    # Tolerance for rounding of the values.
    room = 1e-13 * (1 + before.abs())
    length = torch.ones_like(before)
    for _ in range(HALVINGS):
        short = value(x + length.unsqueeze(1) * step) > before + 1e-4 * length * slope + room
        if not short.any():
            break
        length = torch.where(short, length / 2, length)
    return length


def proximal_newton(losses: Losses, anchor: Tensor, weight: Tensor, start: Tensor) -> Tensor:
    r"""Minimise each :math:`f_i(x) + \frac{c_i}{2} \lVert x - b_i \rVert^2`.

    Args:
        losses: The :math:`f_i`.
        anchor: :math:`b`, ``(clients, dim)``.
        weight: :math:`c \ge 0`, ``(clients,)``.
        start: ``(clients, dim)``.
    """
    c = weight.unsqueeze(1)
    identity = torch.eye(anchor.shape[1], dtype=anchor.dtype)

    def value(x: Tensor) -> Tensor:
        return losses.value(x) + weight / 2 * (x - anchor).square().sum(1)

    def gradient(x: Tensor) -> Tensor:
        return losses.gradient(x) + c * (x - anchor)

    def hessian(x: Tensor) -> Tensor:
        return losses.hessian(x) + c.unsqueeze(2) * identity

    return newton(value, gradient, hessian, start)
