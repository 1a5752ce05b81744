"""A piece of local training in double precision, where rounding switches no unit of a network."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_pfl.core.tree import is_expanded, tmap
from lightning_pfl.data.batch import map_batch
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import LocalWork


def in_double(work: LocalWork) -> LocalWork | None:
    """Return the same work with trees and samples in double precision.

    None where samples aren't in memory, or others than training samples take part.
    """
    data = work.data
    if not isinstance(data, FederatedTensorDataset):
        return None
    if any(phase.data != "training" for phase in work.phases):
        return None
    rows = [data.indices[client] for client in work.info.index.tolist()]
    clients = torch.arange(len(rows))
    # Of these clients alone, as there may be many others.
    samples = FederatedTensorDataset(
        map_batch(data.gather(torch.cat(rows)), _double),
        torch.arange(sum(map(len, rows))).split([len(row) for row in rows]),
        batch_size=data.batch_size,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
        augment=data.augment,
    )
    return replace(
        work,
        received=tmap(_double, work.received),
        client_state=tmap(_double, work.client_state),
        info=replace(work.info, index=clients),
        data=samples,
    )


def _double(leaf: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        return leaf
    if is_expanded(leaf):
        return leaf[:1].double().expand(leaf.shape)
    return leaf.double()
