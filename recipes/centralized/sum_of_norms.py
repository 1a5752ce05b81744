r"""Direct solvers of :math:`\sum_i f_i(x_i)` with a penalty on pairs, for small problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pfl.solvers.clusters import components
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.proximal import block_soft_threshold
from recipes.centralized.losses import Losses
from recipes.centralized.newtons_method import newton

RELAXATION = 1.6
"""Over-relaxation of ADMM, usually between 1.5 and 1.8."""
BALANCING = 20
"""Iterations between adjustments of the penalty, in the first half of the iterations."""


@dataclass(frozen=True)
class Solution:
    r"""A solution of ADMM.

    Attributes:
        models: :math:`x_i`, ``(clients, dim)``.
        split: :math:`z_e \approx x_i - x_j`, exactly zero where two are equal, ``(edges, dim)``.
        dual: Dual variables of :math:`z_e = x_i - x_j`, ``(edges, dim)``.
        edges: :math:`i < j`, int64 ``(edges, 2)``.
        residual: The larger of the last primal and dual residual.
        penalty: ADMM's :math:`\rho` at the end.
    """

    models: Tensor
    split: Tensor
    dual: Tensor
    edges: Tensor
    residual: float
    penalty: float

    @property
    def clusters(self) -> Tensor:
        """Join clients by edges whose difference is exactly zero, int64 ``(clients,)``."""
        joined = self.edges[(self.split == 0).all(1)]
        return components(len(self.models), joined[:, 0], joined[:, 1])


class SumOfNorms:
    r"""ADMM for :math:`\min \sum_i f_i(x_i) + \Lambda \sum_{i<j} a_{ij} \lVert x_i - x_j \rVert`.

    It splits :math:`z_e = x_i - x_j` for each pair and updates all models together by Newton's
    method.

    Args:
        losses: The :math:`f_i`.
        pairs: The pairs, with the weights :math:`a_{ij}`.
        penalty: Initial :math:`\rho > 0`; it is doubled and halved to balance the two residuals.

    References:
        Chi, Lange. Splitting methods for convex clustering. JCGS 24, 2015. arXiv:1304.0499.
    """

    def __init__(self, losses: Losses, pairs: Pairs, penalty: float = 1.0) -> None:
        self.losses, self.penalty = losses, penalty
        first, slot = pairs.mask.nonzero(as_tuple=True)
        second = pairs.neighbours[first, slot]
        up = first < second
        self.edges = torch.stack([first[up], second[up]], 1)
        self.weights = pairs.weights[first, slot][up]
        count = len(pairs)
        self.laplacian = torch.zeros(count, count, dtype=torch.float64)
        one = torch.ones(len(self.edges), dtype=torch.float64)
        for a, b, sign in ((0, 0, 1), (1, 1, 1), (0, 1, -1), (1, 0, -1)):
            at = self.edges[:, a], self.edges[:, b]
            self.laplacian.index_put_(at, sign * one, accumulate=True)

    def solve(
        self,
        weight: float,
        start: Tensor | Solution,
        iterations: int = 3000,
        tolerance: float = 1e-8,
    ) -> Solution:
        r"""Solve for one weight.

        Args:
            weight: :math:`\Lambda`.
            start: Models ``(clients, dim)``, or the solution for a near weight.
            iterations: Largest number of iterations.
            tolerance: Largest entry of both residuals at the end.
        """
        if isinstance(start, Solution):
            x, z, y, rho = start.models, start.split, start.dual, start.penalty
        else:
            x, z, rho = start, self._differences(start), self.penalty
            y = torch.zeros_like(z)
        residual = torch.inf
        for number in range(1, iterations + 1):
            x = self._update_models(x, z - y / rho, rho)
            moved = RELAXATION * self._differences(x) + (1 - RELAXATION) * z
            new = block_soft_threshold(moved + y / rho, weight * self.weights.to(x) / rho)
            y = y + rho * (moved - new)
            gap = float((self._differences(x) - new).abs().max())
            dual_gap = float(rho * self._back(new - z).abs().max())
            z, residual = new, max(gap, dual_gap)
            if residual <= tolerance:
                break
            if number % BALANCING == 0 and number < iterations // 2:
                rho *= 2.0 if gap > 10 * dual_gap else 0.5 if dual_gap > 10 * gap else 1.0
        return Solution(x, z, y, self.edges, residual, rho)

    def value(self, models: Tensor, weight: float) -> float:
        """Compute the objective at ``(clients, dim)``."""
        norms = self._differences(models).norm(dim=1)
        return float(self.losses.value(models).sum() + weight * (self.weights.to(norms) @ norms))

    def _update_models(self, x: Tensor, target: Tensor, rho: float) -> Tensor:
        """Minimise the losses plus the quadratic of all pairs."""
        return minimise_coupled(self.losses, rho * self.laplacian, rho * self._back(target), x)

    def _differences(self, x: Tensor) -> Tensor:
        return x[self.edges[:, 0]] - x[self.edges[:, 1]]

    def _back(self, values: Tensor) -> Tensor:
        """Apply the transpose of :meth:`_differences`."""
        total = values.new_zeros(len(self.laplacian), values.shape[1])
        return total.index_add(0, self.edges[:, 0], values).index_add(0, self.edges[:, 1], -values)


def minimise_coupled(losses: Losses, coupling: Tensor, linear: Tensor, start: Tensor) -> Tensor:
    r"""Minimise :math:`\sum_i f_i(x_i) + \frac12 \langle x, C x \rangle - \langle l, x \rangle`.

    Args:
        losses: The :math:`f_i`.
        coupling: :math:`C`, symmetric and positive semidefinite, ``(clients, clients)``.
        linear: :math:`l`, ``(clients, dim)``.
        start: ``(clients, dim)``.
    """
    clients, dim = start.shape
    coupling = coupling.to(start)
    block = torch.kron(coupling, torch.eye(dim, dtype=start.dtype))

    def value(flat: Tensor) -> Tensor:
        x = flat.view(clients, dim)
        quadratic = (x * (coupling @ x)).sum() / 2 - (linear * x).sum()
        return (losses.value(x).sum() + quadratic).view(1)

    def gradient(flat: Tensor) -> Tensor:
        x = flat.view(clients, dim)
        found: Tensor = losses.gradient(x) + coupling @ x - linear
        return found.view(1, -1)

    def hessian(flat: Tensor) -> Tensor:
        hessians = losses.hessian(flat.view(clients, dim))
        joint: Tensor = block + torch.block_diag(*hessians)
        return joint.unsqueeze(0)

    return newton(value, gradient, hessian, start.reshape(1, -1)).view(clients, dim)


def solve_squared(losses: Losses, pairs: Pairs, weight: float, start: Tensor) -> Tensor:
    r"""Minimise :math:`\sum_i f_i(x_i) + \Gamma \sum_{i<j} a_{ij} \lVert x_i - x_j \rVert^2`.

    Args:
        losses: The :math:`f_i`.
        pairs: The pairs, with the weights :math:`a_{ij}`.
        weight: :math:`\Gamma`.
        start: ``(clients, dim)``.

    Returns:
        The models, ``(clients, dim)``.
    """
    adjacency = torch.zeros(len(pairs), len(pairs), dtype=torch.float64)
    first, slot = pairs.mask.nonzero(as_tuple=True)
    adjacency[first, pairs.neighbours[first, slot]] = pairs.weights[first, slot]
    laplacian = torch.diag(adjacency.sum(1)) - adjacency
    return minimise_coupled(losses, 2 * weight * laplacian, torch.zeros_like(start), start)


def regularization_path(
    solver: SumOfNorms,
    weights: Sequence[float],
    start: Tensor | Solution,
    iterations: int = 3000,
    tolerance: float = 1e-8,
) -> list[Solution]:
    """Solve for several weights, each from the solution before.

    Args:
        solver: The problem.
        weights: In the order in which they are solved.
        start: As for :meth:`SumOfNorms.solve`, for the first weight.
        iterations: Largest number of iterations per weight.
        tolerance: Largest entry of both residuals.
    """
    found: list[Solution] = []
    for weight in weights:
        found.append(solver.solve(weight, found[-1] if found else start, iterations, tolerance))
    return found
