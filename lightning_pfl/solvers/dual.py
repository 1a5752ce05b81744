"""Stochastic dual coordinate ascent for hinge losses, for many clients at once."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.core.transfer import send


def visiting_order(num_samples: Tensor, longest: int, passes: int, seed: int, round: int) -> Tensor:
    """Draw each client's order of visits to its samples, int64 ``(clients, passes * longest)``.

    Every client uses one random order of ``longest`` positions without those beyond its own number
    of samples: uniform for each client, and independent of the clients' numbering. Only a client's
    first ``passes * num_samples`` positions are meaningful.
    """
    parts = []
    for number in range(passes):
        order = permutation(longest, derive(seed, "coordinates", round, number))
        parts.append(order.expand(len(num_samples), longest))
    order = torch.cat(parts, 1)
    missing = order >= num_samples.unsqueeze(1)
    return order.gather(1, missing.int().sort(dim=1, stable=True).indices)


def hinge(weights: Tensor, inputs: Tensor, signs: Tensor) -> Tensor:
    r"""Compute hinge losses :math:`\max(0, 1 - y\, w^\top x)`, ``(clients, samples, outputs)``.

    Args:
        weights: :math:`w`, ``(clients, outputs, features)``.
        inputs: :math:`x`, ``(clients, samples, features)``.
        signs: :math:`y`, -1 or 1, ``(clients, samples, outputs)``.
    """
    return (1 - signs * (inputs @ weights.mT)).clamp_min(0)


def coordinate_ascent(
    dual: Tensor,
    weights: Tensor,
    inputs: Tensor,
    signs: Tensor,
    num_samples: Tensor,
    order: Tensor,
    steps: Tensor,
    curvature: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Maximise each client's part of the dual by coordinate ascent.

    With :math:`u = w + s\, \Delta b` and :math:`\Delta b = \frac1N \sum_i (\alpha_i - \alpha_i^0)
    x_i`, a visit of sample :math:`i` sets

    .. math::
        \alpha_i = y_i \operatorname{clip}_{[0, 1]}\Bigl(
        \frac{N (1 - y_i\, u^\top x_i)}{s \lVert x_i \rVert^2} + \alpha_i y_i \Bigr)

    Args:
        dual: :math:`\alpha`, ``(clients, longest, outputs)``; outputs are independent problems.
        weights: :math:`w`, ``(clients, outputs, features)``.
        inputs: :math:`x`, ``(clients, samples, features)``.
        signs: :math:`y`, -1 or 1, ``(clients, samples, outputs)``.
        num_samples: :math:`N \ge 1`, ``(clients,)``.
        order: Positions to visit, int64 ``(clients, visits)``.
        steps: Visits of each client, at most the length of ``order``, ``(clients,)``.
        curvature: :math:`s`, positive, ``(clients,)``.

    Returns:
        The new :math:`\alpha`, and :math:`\Delta b`, ``(clients, outputs, features)``.
    """
    dual, at = dual.clone(), torch.arange(len(dual), device=dual.device)
    change = torch.zeros_like(weights)
    count = send(num_samples, weights.device, weights.dtype).unsqueeze(1)
    slope = curvature.to(weights).unsqueeze(1)
    squares = inputs.square().sum(2)
    for visit in range(int(steps.max())):
        sample = order[:, visit].clamp_max(inputs.shape[1] - 1)
        x, y, old = inputs[at, sample], signs[at, sample], dual[at, sample]
        u = weights + slope.unsqueeze(2) * change
        margin = 1 - y * (u @ x.unsqueeze(2)).squeeze(2)
        # A sample of zeros has margin 1, and an infinite step takes it to the bound.
        share = count * margin / (slope * squares[at, sample].unsqueeze(1)) + old * y
        step = (y * share.clamp(0, 1) - old) * (visit < steps).unsqueeze(1)
        dual[at, sample] = old + step
        change = change + (step / count).unsqueeze(2) * x.unsqueeze(1)
    return dual, change
