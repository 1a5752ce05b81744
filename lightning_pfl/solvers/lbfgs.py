"""L-BFGS for many clients at once, from gradients alone: exact local solves of any smooth loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradient = Callable[[Tensor], Tensor]
"""From points ``(clients, dim)`` to each client's gradient there."""
SEARCHES = 20
"""Most gradients per line search."""
SUFFICIENT = 0.5
"""A step is taken where the slope along it is at most this share of the slope at its start."""
GROWTH = 10.0
"""Most by which a step grows that is too short."""


def default_tolerance(dtype: torch.dtype) -> float:
    """Relative size of a gradient that counts as zero: as small as the precision allows."""
    return 1e-11 if dtype == torch.float64 else 1e-5


def minimise(
    gradient: Gradient,
    start: Tensor,
    curvature: Tensor,
    memory: int = 10,
    iterations: int = 100,
    tolerance: float | None = None,
) -> Tensor:
    """Minimise each client's convex function; no client's result depends on another client.

    A line search looks for a small slope, not for a small value, so that no values are needed. On a
    quadratic it is exact.

    Args:
        gradient: Evaluated at all clients' points together.
        start: ``(clients, dim)``.
        curvature: A positive guess of each function's curvature, ``(clients,)``, for the first
            step.
        memory: Pairs of steps and gradient changes that are remembered.
        iterations: Most iterations.
        tolerance: A client is done where its gradient is at most so many times as long as at the
            start, or as 1 if that is shorter. None: :func:`default_tolerance`.

    Returns:
        ``(clients, dim)``.
    """
    tolerance = default_tolerance(start.dtype) if tolerance is None else tolerance
    x, g = start, gradient(start)
    bound = tolerance * g.norm(dim=1).clamp_min(1.0)
    history = _History(memory, 1 / curvature.clamp_min(1e-12))
    for _ in range(iterations):
        active = g.norm(dim=1) > bound
        if not active.any():
            break
        direction = -history.times(g)
        length, new = _search(gradient, x, g, direction, active)
        moved = torch.where(active.unsqueeze(1), length.unsqueeze(1) * direction, 0.0)
        new = torch.where(active.unsqueeze(1), new, g)
        history.add(moved, new - g)
        x, g = x + moved, new
    return x


@dataclass
class _History:
    """Steps, changes of the gradient, and the scale of the first guess of the inverse Hessian."""

    memory: int
    scale: Tensor
    entries: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, step: Tensor, change: Tensor) -> None:
        product, square = _dot(step, change), _dot(change, change)
        # A client that didn't move, or whose function isn't convex there, learns nothing.
        good = product > torch.finfo(step.dtype).eps * square
        inverse = torch.where(good, 1 / product.where(good, 1.0), 0.0)
        self.scale = torch.where(good, product / square.where(good, 1.0), self.scale)
        self.entries = [*self.entries, (step, change, inverse)][-self.memory :]

    def times(self, vector: Tensor) -> Tensor:
        """The inverse Hessian's estimate times a vector, by the two-loop recursion."""
        found, shares = vector, []
        for step, change, inverse in reversed(self.entries):
            share = inverse * _dot(step, found)
            found = found - share.unsqueeze(1) * change
            shares.append(share)
        found = self.scale.unsqueeze(1) * found
        for (step, change, inverse), share in zip(self.entries, reversed(shares), strict=True):
            back = inverse * _dot(change, found)
            found = found + (share - back).unsqueeze(1) * step
        return found


def _search(
    gradient: Gradient, x: Tensor, g: Tensor, direction: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Step lengths ``(clients,)`` with a small slope, and the gradients there."""
    first = _dot(g, direction)
    length = torch.ones_like(first)
    low, low_slope = torch.zeros_like(first), first
    high, high_slope = torch.full_like(first, torch.inf), -first
    new = g
    for _ in range(SEARCHES):
        new = gradient(x + length.unsqueeze(1) * direction)
        slope = _dot(new, direction)
        done = ~active | (slope.abs() <= SUFFICIENT * first.abs())
        if done.all():
            break
        short = slope < 0
        low = torch.where(done | ~short, low, length)
        low_slope = torch.where(done | ~short, low_slope, slope)
        high = torch.where(done | short, high, length)
        high_slope = torch.where(done | short, high_slope, slope)
        # Where the line through the slopes is zero: exact on a quadratic.
        growth = (first / (first - slope)).nan_to_num(GROWTH).clamp(1.0, GROWTH)
        further = torch.where(growth > 1, growth, GROWTH) * length
        width = torch.where(high.isfinite(), high - low, 0.0)
        inside = low + width * (low_slope / (low_slope - high_slope)).clamp(0.05, 0.95)
        length = torch.where(done, length, torch.where(high.isfinite(), inside, further))
    return length, new


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)
