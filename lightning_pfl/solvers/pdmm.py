r"""PDMM for the sum of norms: block updates, and a solver.

With a variable :math:`z_{ij}` for each ordered pair,

.. math::
    \min \sum_i f_i(x_i) + \sum_{i \ne j} \lambda_{ij} \lVert z_{ij} \rVert \quad \text{s.t.} \quad
    x_i - x_j = z_{ij}

has :math:`J` blocks, the :math:`x_i` and the :math:`z_{ij}`. An iteration updates :math:`K` of them
at the same old values, then the dual variables :math:`\mu_{ij}`, and stores the damped
:math:`\hat\mu_{ij}` that the next iteration sees.

References:
    Armacki, Bajovic, Jakovetic, Kar. Personalized federated learning via convex clustering. 2022.
    arXiv:2202.00718, Algorithm 1. Wang, Banerjee, Luo. Parallel direction method of multipliers.
    NeurIPS 2014. arXiv:1406.4064.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_pfl.solvers.blocks import BlockDraws, damping
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.proximal import block_soft_threshold

Step = Literal["full", "printed"]
Prox = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A local solver: from anchors ``b (clients, dim)``, weights ``c (clients,)`` and a start to the
minimisers of :math:`f_i(x) + (c_i / 2) \\lVert x - b_i \\rVert^2`."""


@dataclass(frozen=True)
class View:
    r"""The variables that the updates of some clients' blocks read.

    Attributes:
        models: :math:`x_i`, ``(clients, dim)``.
        others: :math:`x_j`, ``(clients, slots, dim)``.
        split: :math:`z_{ij}`, ``(clients, slots, dim)``.
        damped: :math:`\hat\mu_{ij}`, ``(clients, slots, dim)``.
        mask: Slots that are pairs, bool ``(clients, slots)``.
    """

    models: Tensor
    others: Tensor
    split: Tensor
    damped: Tensor
    mask: Tensor


def thresholds(pairs: Pairs, weight: float, step: Step) -> Tensor:
    r"""Compute :math:`\lambda_{ij}`, ``(clients, slots)``, from a weight per unordered pair.

    Each of the two ordered pairs gets half of it; the printed update, with half of the quadratic,
    needs all of it.
    """
    return pairs.weights * (weight / 2 if step == "full" else weight)


def proximal_term(
    view: View, incoming: Tensor | None, penalty: float, proximal: float
) -> tuple[Tensor, Tensor]:
    r"""Compute the term :math:`\frac{c}{2}\lVert x - b \rVert^2` of an x-update.

    The block minimiser of the augmented Lagrangian has the terms of :math:`(i, j)` and of
    :math:`(j, i)`; the printed update leaves the latter out.

    Args:
        view: The old values.
        incoming: :math:`\sum_j (\hat\mu_{ji} - \rho z_{ji})`, ``(clients, dim)``; None for the
            printed update.
        penalty: :math:`\rho`.
        proximal: :math:`\eta_i`, weight of the distance to the old :math:`x_i`.

    Returns:
        :math:`b`, ``(clients, dim)``, and :math:`c`, ``(clients,)``.
    """
    models = view.models
    degree = view.mask.sum(1, keepdim=True).to(models)
    # A step from the old model, which is 0 to the bit where models are equal, in any precision.
    apart = torch.where(view.mask.unsqueeze(2), view.others - models.unsqueeze(1), 0.0).sum(1)
    step = penalty * (apart + view.split.sum(1)) - view.damped.sum(1)
    weight = penalty * degree + proximal
    if incoming is not None:
        step = step + penalty * apart + incoming
        weight = weight + penalty * degree
    # For clients without pairs, whose weight is 0.
    anchor = models + step / weight.clamp_min(torch.finfo(weight.dtype).tiny)
    return anchor, weight.squeeze(1)


def update_split(view: View, threshold: Tensor, penalty: float) -> Tensor:
    r"""Update :math:`z` by block soft thresholding, at the old :math:`x`.

    .. math::
        z_{ij} = S\left(x_i - x_j + \frac{\hat\mu_{ij}}\rho, \frac{\lambda_{ij}}\rho\right)

    The paper also allows a proximal term :math:`\eta_{ij}`, for subproblems that are linearised or
    have several solutions; this one is solved exactly and has one.

    Args:
        view: The old values.
        threshold: :math:`\lambda_{ij}`, ``(clients, slots)``.
        penalty: :math:`\rho`.
    """
    point = penalty * (view.models.unsqueeze(1) - view.others) + view.damped
    found = block_soft_threshold(point / penalty, threshold.to(point) / penalty)
    return torch.where(view.mask.unsqueeze(2), found, 0.0)


def update_dual(
    view: View, dual: Tensor, chosen: Tensor, penalty: float, steps: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    r"""Take the dual step and damp it, at the new :math:`x` and :math:`z`.

    .. math::
        r_{ij} = x_i - x_j - z_{ij}, \qquad \mu_{ij} \leftarrow \mu_{ij} + \tau \rho\, r_{ij},
        \qquad \hat\mu_{ij} = \mu_{ij} - \nu \rho\, r_{ij}

    Args:
        view: The new values, and the old damped ones.
        dual: :math:`\mu_{ij}`, ``(clients, slots, dim)``.
        chosen: Pairs to update, bool ``(clients, slots)``.
        penalty: :math:`\rho`.
        steps: :math:`\tau` and :math:`\nu`.
    """
    forward, backward = steps
    some = chosen.unsqueeze(2)
    rest = torch.where(some, view.models.unsqueeze(1) - view.others - view.split, 0.0)
    dual = dual + forward * penalty * rest
    return dual, torch.where(some, dual - backward * penalty * rest, view.damped)


@dataclass(frozen=True)
class PDMMState:
    """All variables of PDMM: ``models (clients, dim)``, the others ``(clients, slots, dim)``."""

    models: Tensor
    split: Tensor
    dual: Tensor
    damped: Tensor

    @classmethod
    def begin(cls, models: Tensor, pairs: Pairs) -> PDMMState:
        """Start at some models with zeros elsewhere."""
        zeros = models.new_zeros(len(pairs), pairs.slots, models.shape[1])
        return cls(models, zeros, zeros, zeros)

    def view(self, pairs: Pairs) -> View:
        """Return the variables of all clients."""
        others = self.models[pairs.neighbours]
        return View(self.models, others, self.split, self.damped, pairs.mask)


def solve(
    prox: Prox,
    pairs: Pairs,
    weight: float,
    start: Tensor | PDMMState,
    penalty: float = 0.3,
    blocks: float | int = 1.0,
    dual_blocks: float | int = 1.0,
    step: Step = "full",
    iterations: int = 1000,
    seed: int = 0,
    proximal: float = 0.0,
    steps: tuple[float, float] | None = None,
) -> PDMMState:
    r"""Minimise :math:`\sum_i f_i(x_i) + \Lambda \sum_{i<j} a_{ij} \lVert x_i - x_j \rVert`.

    Args:
        prox: The local solver.
        pairs: The pairs, with the weights :math:`a_{ij}`.
        weight: :math:`\Lambda \ge 0`.
        start: Models ``(clients, dim)``, or the state of an earlier run.
        penalty: :math:`\rho > 0`.
        blocks: Primal blocks per iteration: a fraction, or a number :math:`K`.
        dual_blocks: Dual variables per iteration: a fraction or a number.
        step: ``"full"``, or ``"printed"`` for the paper's x-update.
        iterations: Number of iterations.
        seed: Seed of the draws.
        proximal: :math:`\eta_i` of the x-updates.
        steps: :math:`\tau` and :math:`\nu`; None: those of
            :func:`~lightning_pfl.solvers.blocks.damping`. With :math:`\nu = 0`, updating all blocks
            diverges.
    """
    state = start if isinstance(start, PDMMState) else PDMMState.begin(start, pairs)
    everyone = torch.ones(len(pairs), dtype=torch.bool)
    draws = BlockDraws(pairs, everyone, blocks, dual_blocks, seed)
    threshold = thresholds(pairs, weight, step)
    for number in range(iterations):
        drawn = draws.of(number)
        if steps is None:
            steps = damping(int(drawn.models.sum() + drawn.pairs.sum()), draws.total)
        view, incoming = state.view(pairs), None
        if step == "full":
            incoming = pairs.incoming(state.damped - penalty * state.split)
        anchor, strength = proximal_term(view, incoming, penalty, proximal)
        models = prox(anchor, strength, state.models)
        split = update_split(view, threshold, penalty)
        state = replace(
            state,
            models=torch.where(drawn.models.unsqueeze(1), models, state.models),
            split=torch.where(drawn.pairs.unsqueeze(2), split, state.split),
        )
        dual, damped = update_dual(state.view(pairs), state.dual, drawn.duals, penalty, steps)
        state = replace(state, dual=dual, damped=damped)
    return state


def objective(values: Tensor, models: Tensor, pairs: Pairs, weight: float) -> Tensor:
    r"""Compute :math:`\sum_i f_i + \Lambda \sum_{i<j} a_{ij} \lVert x_i - x_j \rVert`, a scalar.

    Args:
        values: :math:`f_i(x_i)`, ``(clients,)``.
        models: :math:`x_i`, ``(clients, dim)``.
        pairs: The pairs.
        weight: :math:`\Lambda`.
    """
    distances = (models.unsqueeze(1) - models[pairs.neighbours]).norm(dim=2)
    coupled: Tensor = (pairs.weights.to(distances) * distances).sum()
    return values.sum() + weight / 2 * coupled
