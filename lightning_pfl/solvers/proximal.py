"""Pulls towards an anchor: the gradient of a squared distance."""

from __future__ import annotations

from torch import Tensor

from lightning_pfl.tree import Model, per_client, tmap


def pull(grads: Model, model: Model, anchor: Model, weight: float) -> Model:
    r"""Add the gradient of :math:`\frac{\mu}{2}\lVert y - x\rVert^2` to ``grads``.

    Args:
        grads: Gradients; only their names are pulled.
        model: :math:`y`.
        anchor: :math:`x`, which has no gradient.
        weight: :math:`\mu`.
    """
    return tmap(lambda g, y, x: g.add(y - x, alpha=weight), grads, model, anchor)


def towards(model: Model, target: Model, share: float | Tensor) -> Model:
    r"""Move by a share of the way: :math:`y + s\,(x - y)`.

    Args:
        model: :math:`y`, ``(clients, ...)``; only its names move.
        target: :math:`x`.
        share: :math:`s`, a number or one per client, ``(clients,)``.
    """

    def move(y: Tensor, x: Tensor) -> Tensor:
        return y + (per_client(share, y) if isinstance(share, Tensor) else share) * (x - y)

    return tmap(move, model, target)
