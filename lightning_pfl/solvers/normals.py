"""Independent normal distributions of several components: densities, and estimates from sums."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-6
"""The smallest variance: a component of equal samples would have none."""


def log_densities(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    r"""Compute :math:`\log N(x_i; \mu_j, \operatorname{diag} s_j^2)` without the constant.

    Args:
        x: Samples, ``(clients, samples, D)``.
        mean: :math:`\mu_j`, ``(clients, components, D)``.
        variance: :math:`s_j^2 > 0`, like ``mean``.

    Returns:
        float64 ``(clients, samples, components)``.

    Example:
        >>> x, mean = torch.tensor([[[1.0]]]), torch.tensor([[[0.0], [3.0]]])
        >>> log_densities(x, mean, torch.ones(1, 2, 1))
        tensor([[[-0.5000, -2.0000]]], dtype=torch.float64)
    """
    x = x.double()
    found = []
    # One component at a time, so that no tensor has all samples of all of them.
    for m, v in zip(mean.double().unbind(1), variance.double().unbind(1), strict=True):
        squares = (x - m.unsqueeze(1)).square() / v.unsqueeze(1)
        found.append(-(squares.sum(2) + v.log().sum(1, keepdim=True)) / 2)
    return torch.stack(found, 2)


def weighted_sums(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute :math:`\sum_i q_{ij} x_i` and :math:`\sum_i q_{ij} x_i^2`.

    Args:
        x: Samples, ``(clients, samples, D)``.
        weights: :math:`q_{ij}`, float64 ``(clients, samples, components)``.

    Returns:
        Both float64 ``(clients, components, D)``.
    """
    x = x.double()
    return weights.mT @ x, weights.mT @ x.square()


def estimated(
    count: Tensor, first: Tensor, second: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate means and variances from sums over all samples.

    Args:
        count: The sum of the weights, ``(components,)``.
        first: Of the weighted samples, ``(components, D)``.
        second: Of their weighted squares, ``(components, D)``.
        mean: What a component without samples keeps, ``(components, D)``.
        variance: The same.
    """
    some = count.unsqueeze(1) > 0
    divisor = count.unsqueeze(1).where(some, 1)
    center = first / divisor
    spread = (second / divisor - center.square()).clamp_min(SMALLEST)
    return (
        center.to(mean).where(some, mean),
        spread.to(variance).where(some, variance),
    )
