"""Proximal terms and maps."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.core.tree import Model, per_client, tmap


def pull(grads: Model, model: Model, anchor: Model, weight: float) -> Model:
    r"""Add the gradient of :math:`\frac{\mu}{2}\lVert y - x\rVert^2` to ``grads``.

    Args:
        grads: Gradients; only their names get the term.
        model: :math:`y`.
        anchor: :math:`x`, a constant.
        weight: :math:`\mu`.
    """
    return tmap(lambda g, y, x: g.add(y - x, alpha=weight), grads, model, anchor)


def towards(model: Model, target: Model, share: float | Tensor) -> Model:
    r"""Move a model towards another: :math:`y + s\,(x - y)`.

    Args:
        model: :math:`y`, ``(clients, ...)``; only its names move.
        target: :math:`x`.
        share: :math:`s`, one number or one per client, ``(clients,)``.
    """

    def move(y: Tensor, x: Tensor) -> Tensor:
        return y + (per_client(share, y) if isinstance(share, Tensor) else share) * (x - y)

    return tmap(move, model, target)


def block_soft_threshold(values: Tensor, threshold: Tensor) -> Tensor:
    r"""Apply the proximal map of a norm: :math:`v \max(0, 1 - t / \lVert v \rVert)`.

    Exactly zero where :math:`\lVert v \rVert \le t`.

    Args:
        values: :math:`v`, ``(..., dim)``.
        threshold: :math:`t \ge 0`, ``(...)``.

    Example:
        >>> block_soft_threshold(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([1.0, 0.5]))
        tensor([[2.4000, 3.2000],
                [0.0000, 0.0000]])
    """
    norm = torch.linalg.vector_norm(values, dim=-1)
    share = 1 - threshold / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    # A row of zeros stays zero for the threshold 0 too.
    kept = torch.where(norm > threshold, share, 0.0)
    return values * kept.unsqueeze(-1)
