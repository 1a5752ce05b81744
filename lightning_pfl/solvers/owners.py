"""Means over the clients that own an entry."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model


def owners_mean(old: Model, uploads: Model, owned: Model, weights: Tensor) -> Model:
    r"""Average every entry over its owners, :math:`\sum_k w_k o_k y_k / \sum_k w_k o_k`.

    An entry without an owner keeps its old value, bit for bit, as does one that no owner moved:
    differences are averaged, in double precision. Counters take the maximum over their owners.

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
        mine = owned.get(name)
        if mine is None:
            mine = torch.ones(len(leaf), *[1] * (leaf.ndim - 1), dtype=torch.bool)
        mine = send(mine, leaf.device)
        if not leaf.is_floating_point():
            lowest = False if leaf.dtype == torch.bool else torch.iinfo(leaf.dtype).min
            found = leaf.where(mine, lowest).amax(0)
            return found.where(mine.any(0), before)
        origin = before.double()
        shares = mine * send(weights, leaf.device, torch.float64).view(-1, *[1] * before.ndim)
        total = shares.sum(0)
        moved = leaf.where(mine, before).double().sub_(origin).mul_(shares).sum(0)
        return (origin + moved / total.where(total > 0, 1)).to(leaf.dtype)

    return {name: mean(name, leaf, old[name]) for name, leaf in uploads.items()}
