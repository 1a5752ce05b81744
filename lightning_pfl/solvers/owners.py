"""Means over the clients that own an entry."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.core.tree import Model, per_client


def owners_mean(old: Model, uploads: Model, owned: Model, weights: Tensor) -> Model:
    r"""Average every entry over its owners, :math:`\sum_k w_k o_k y_k / \sum_k w_k o_k`.

    An entry without an owner keeps its old value, bit for bit. Counters take the maximum over
    their owners.

    Args:
        old: The values before, without client axis.
        uploads: :math:`y_k`, ``(clients, ...)``.
        owned: :math:`o_k`, bool, of a shape that broadcasts against the upload's; names that are
            missing are owned by all.
        weights: :math:`w_k \ge 0`, float64 ``(clients,)``.

    Example:
        >>> old, uploads = {"w": torch.zeros(3)}, {"w": torch.tensor([[1.0, 2, 3], [5, 6, 0]])}
        >>> owned = {"w": torch.tensor([[True, True, False], [True, False, False]])}
        >>> owners_mean(old, uploads, owned, torch.tensor([0.5, 0.5]))["w"]
        tensor([3., 2., 0.])
    """

    def mean(name: str, leaf: Tensor, before: Tensor) -> Tensor:
        mine = owned.get(name, torch.ones_like(leaf, dtype=torch.bool)).expand_as(leaf)
        if not leaf.is_floating_point():
            found = leaf.where(mine, torch.iinfo(leaf.dtype).min).amax(0)
            return found.where(mine.any(0), before)
        shares = mine * per_client(weights.to(leaf.device), leaf)
        total = shares.sum(0)
        found = (shares * leaf.where(mine, 0)).sum(0) / total.where(total > 0, 1)
        return found.where(total > 0, before)

    return {name: mean(name, leaf, old[name]) for name, leaf in uploads.items()}
