"""Losses with closed forms, and the four points on a line of which every solution is known."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.data.sources.ellipses import EllipseClusters

L4 = torch.tensor([[0.0], [0.1], [1.0], [1.1]], dtype=torch.float64)


def l4_solution(weight: float) -> Tensor:
    """Minimiser of sum_i (x_i - a_i)^2 / 2 + weight sum_{i<j} |x_i - x_j| at L4, ``(4, 1)``.

    While all differ, x_i = a_i - weight (points below - points above). The inner pairs, at a
    distance of 0.1, meet at 0.05 and then move together by 2 weight; they meet at 0.25.
    """
    if weight < 0.05:
        return L4 - weight * torch.tensor([[-3.0], [-1.0], [1.0], [3.0]], dtype=torch.float64)
    if weight < 0.25:
        left, right = 0.05 + 2 * weight, 1.05 - 2 * weight
        return torch.tensor([[left], [left], [right], [right]], dtype=torch.float64)
    return torch.full((4, 1), 0.55, dtype=torch.float64)


class Quadratics:
    """f_i(x) = a_i / 2 ||x - c_i||^2."""

    def __init__(self, centers: Tensor, curvatures: Tensor | None = None) -> None:
        self.c = centers
        self.a = torch.ones(len(centers)).to(centers) if curvatures is None else curvatures

    def value(self, x: Tensor) -> Tensor:
        return self.a / 2 * (x - self.c).square().sum(1)

    def gradient(self, x: Tensor) -> Tensor:
        return self.a.unsqueeze(1) * (x - self.c)

    def hessian(self, x: Tensor) -> Tensor:
        return self.a.view(-1, 1, 1) * torch.eye(x.shape[1], dtype=x.dtype)

    def prox(self, anchor: Tensor, weight: Tensor, start: Tensor) -> Tensor:
        a, w = self.a.unsqueeze(1), weight.unsqueeze(1)
        return (a * self.c + w * anchor) / (a + w)


class Hinges:
    """f(w, b) = c/2 ||w||^2 + mean_j max(0, 1 - l_j (w a_j + b))^2, from the formulas."""

    def __init__(self, points: Tensor, labels: Tensor, c: float = 1e-3) -> None:
        ones = torch.ones_like(points[..., :1])
        self.z = labels.unsqueeze(2) * torch.cat([points, ones], 2)  # (clients, samples, 3)
        self.ridge = torch.diag(points.new_tensor([c] * points.shape[2] + [0.0]))

    def value(self, x: Tensor) -> Tensor:
        return self._slack(x).square().mean(1) + ((x @ self.ridge) * x).sum(1) / 2

    def gradient(self, x: Tensor) -> Tensor:
        pull = (self._slack(x).unsqueeze(2) * self.z).mean(1)
        return x @ self.ridge - 2 * pull

    def hessian(self, x: Tensor) -> Tensor:
        active = (self._slack(x) > 0).to(x).unsqueeze(2)
        return self.ridge + 2 * self.z.mT @ (active * self.z) / self.z.shape[1]

    def _slack(self, x: Tensor) -> Tensor:
        return (1 - (self.z @ x.unsqueeze(2)).squeeze(2)).clamp_min(0)


def ellipses(setting: str, users: int = 20) -> tuple[Tensor, Tensor]:
    """Points ``(clients, 10, 2)`` and labels -1 and 1 of the first ``users`` of each cluster."""
    fields = EllipseClusters(setting, dtype="float64").load().fields  # type: ignore[arg-type]
    points, labels = fields[0].view(60, 10, 2), 2.0 * fields[1].view(60, 10).double() - 1
    keep = torch.arange(60).view(3, 20)[:, :users].flatten()
    return points[keep], labels[keep]


def conic_optimum(points: Tensor, labels: Tensor, weight: float, c: float = 1e-3) -> float:
    """The least value of sum_i f_i + weight sum_{i<j} ||x_i - x_j||, by a conic solver."""
    cp: Any = importlib.import_module("cvxpy")
    count, samples, dim = points.shape
    z = (labels.unsqueeze(2) * torch.cat([points, torch.ones_like(points[..., :1])], 2)).numpy()
    x = cp.Variable((count, dim + 1))
    slack = [cp.sum_squares(cp.pos(1 - z[i] @ x[i])) / samples for i in range(count)]
    first, second = np.triu_indices(count, 1)
    norms = cp.sum(cp.norm(x[first] - x[second], 2, axis=1))
    ridge = c / 2 * cp.sum_squares(x[:, :dim])
    problem = cp.Problem(cp.Minimize(sum(slack) + ridge + weight * norms))
    problem.solve(solver=cp.CLARABEL)
    return float(problem.value)
