"""L-BFGS for many clients at once, from gradients alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradient = Callable[[Tensor], Tensor]
"""A function from points ``(clients, dim)`` to each client's gradient."""
SEARCHES = 20
"""Largest number of gradients per line search."""
SUFFICIENT = 0.5
"""Largest slope along the step, relative to that at its start, that ends a line search."""
GROWTH = 10.0
"""Largest factor by which a line search lengthens a step."""


def default_tolerance(dtype: torch.dtype) -> float:
    """Return the relative gradient norm that counts as zero, near the precision of the type."""
    return 1e-11 if dtype == torch.float64 else 1e-5


def minimise(
    gradient: Gradient,
    start: Tensor,
    curvature: Tensor,
    memory: int = 10,
    iterations: int = 100,
    tolerance: float | None = None,
) -> Tensor:
    """Minimise each client's convex function independently.

    The line search looks for a small slope and needs no function values; on a quadratic it is
    exact.

    Args:
        gradient: Gradients at all clients' points.
        start: ``(clients, dim)``.
        curvature: Positive estimate of each function's curvature, ``(clients,)``, for the first
            step.
        memory: Number of pairs of step and gradient change to store.
        iterations: Largest number of iterations.
        tolerance: A client stops where its gradient's norm is at most this, relative to that at the
            start or to 1, whichever is smaller. None: :func:`default_tolerance`.

    Returns:
        The minimisers, ``(clients, dim)``.
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
    """Stored steps and gradient changes, and the scale of the first inverse Hessian."""

    memory: int
    scale: Tensor
    entries: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, step: Tensor, change: Tensor) -> None:
        product, square = _dot(step, change), _dot(change, change)
        # A pair without positive curvature, as of a client that didn't move, is skipped.
        good = product > torch.finfo(step.dtype).eps * square
        inverse = torch.where(good, 1 / product.where(good, 1.0), 0.0)
        self.scale = torch.where(good, product / square.where(good, 1.0), self.scale)
        self.entries = [*self.entries, (step, change, inverse)][-self.memory :]

    def times(self, vector: Tensor) -> Tensor:
        """Multiply the inverse Hessian's estimate by a vector, by the two-loop recursion."""
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
    """Find step lengths ``(clients,)`` with a small slope, and the gradients there."""
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
        # The zero of the line through the slopes, exact on a quadratic.
        growth = (first / (first - slope)).nan_to_num(GROWTH).clamp(1.0, GROWTH)
        further = torch.where(growth > 1, growth, GROWTH) * length
        width = torch.where(high.isfinite(), high - low, 0.0)
        inside = low + width * (low_slope / (low_slope - high_slope)).clamp(0.05, 0.95)
        length = torch.where(done, length, torch.where(high.isfinite(), inside, further))
    return length, new


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)
