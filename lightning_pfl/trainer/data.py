"""Where a split's samples lie, in which precision, and which clients they belong to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor

from lightning_pfl._lightning import connected
from lightning_pfl.data.datasets import (
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
    map_batch,
)


class Then:
    """One function after another; a class, so that worker processes can be given it.

    Args:
        first: Called first; None for nothing.
        second: Called with the result.
    """

    def __init__(self, first: Callable[[Any], Any] | None, second: Callable[[Any], Any]) -> None:
        self.first, self.second = first, second

    def __call__(self, batch: Any) -> Any:
        """Run both."""
        return self.second(batch if self.first is None else self.first(batch))


def to_double(batch: Any) -> Any:
    """Every floating-point tensor of a batch in double precision, for ``precision="64-true"``."""
    return map_batch(batch, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf)


def move_to_device(data: FederatedDataset, trainer: L.Trainer) -> FederatedDataset:
    """Move resident samples to the training device; convert batches to the Trainer's precision."""
    if isinstance(data, FederatedTensorDataset):
        data = data.to(trainer.strategy.root_device)
    if not isinstance(trainer.precision_plugin, DoublePrecision):
        return data
    if isinstance(data, FederatedTensorDataset):
        converted = copy.copy(data)
        converted.transform = Then(data.transform, to_double)
        return converted
    loaders = [copy.copy(loader) for loader in data.loaders]
    for loader in loaders:
        loader.collate_fn = Then(loader.collate_fn, to_double)
    return FederatedLoaders(loaders, data.names if data.named else None)


def due_reload(trainer: L.Trainer) -> int:
    """The last round, up to now, in which data were due to be loaded.

    Every ``reload_dataloaders_every_n_epochs`` rounds from round 0, not from whenever they were
    loaded: a resumed run loads its data where it begins, and must load the next where one that
    wasn't interrupted does.
    """
    every = connected(trainer).reload_dataloaders_every_n_epochs
    return int(trainer.current_epoch) // every * every if every else int(trainer.current_epoch)


def align_clients(data: FederatedDataset, names: Sequence[str], what: str) -> tuple[Tensor, Tensor]:
    """Find the clients of a split in the federation.

    Args:
        data: The split.
        names: The federation's clients.
        what: Name of the split's argument for error messages.

    Returns:
        Rows of ``data`` with samples, and the ids of these clients, each int64 ``(clients,)``.

    Raises:
        ValueError: If the split has other clients. What has names (a dict of loaders) goes by them,
            whatever its order, and may leave clients out; a list must have one for each client.
    """
    unnamed = not data.named
    if unnamed and data.num_clients != len(names):
        raise ValueError(
            f"Expected `{what}` to hold one DataLoader for each of the {len(names)} clients, but "
            f"got {data.num_clients}. "
            "Give every client one, or a dict by client name to leave some out."
        )
    ids = {name: client for client, name in enumerate(names)}
    if not unnamed and (unknown := [name for name in data.names if name not in ids]):
        raise ValueError(
            f"Expected `{what}` to hold clients of the training data, but got {unknown[:5]}, which "
            "are not among "
            f"{list(names[:5])}{'...' if len(names) > 5 else ''}. Use the same names; see "
            "NewClientAdaptation for new ones."
        )
    rows = data.num_samples.nonzero().flatten()
    clients = torch.tensor(
        [row if unnamed else ids[data.names[row]] for row in rows.tolist()], dtype=torch.int64
    )
    return rows, clients
