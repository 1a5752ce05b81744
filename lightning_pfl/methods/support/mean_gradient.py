"""The mean of a client's gradients over minibatches, collected step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Model, Tree, per_client, scale, tmap


def no_gradients(like: Model, info: ClientInfo) -> Tree:
    """Make the entries ``gradients`` and ``count`` of a state, before the first gradient.

    Args:
        like: The parameters, ``(clients, ...)``.
        info: The clients.
    """
    device = next(iter(like.values())).device
    return {
        "gradients": tmap(torch.zeros_like, like),
        "count": torch.zeros_like(info.weights, device=device),
    }


def collect(state: Tree, grads: Model, weight: Tensor | None = None) -> Tree:
    """Add a minibatch's gradient to the state, whose sum changes in place.

    Args:
        state: With the entries of :func:`no_gradients`.
        grads: The gradient; it lacks parameters that the loss doesn't reach.
        weight: Weight of each client's minibatch, ``(clients,)``; None for 1.
    """
    for name, leaf in state["gradients"].items():
        if name not in grads:
            continue
        if weight is None:
            leaf.add_(grads[name])
        else:
            leaf.addcmul_(per_client(weight, leaf), grads[name])
    return {**state, "count": state["count"] + (1 if weight is None else weight)}


def mean_gradient(state: Tree) -> Model:
    """Return each client's weighted mean, 0 before the first gradient."""
    mean: Model = scale(state["gradients"], 1 / state["count"].clamp_min(1))
    return mean
