"""Checks for clients without samples or without a minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.steps import Limits, minibatches_per_epoch
from lightning_pfl.federation.state import FederationState
from lightning_pfl.methods.base import Phase


def require_samples(data: FederatedDataset, consequence: str, warn: bool) -> None:
    """Require a client with training samples, and warn of those without.

    Args:
        data: The training data.
        consequence: Consequence for clients without samples, for the warning.
        warn: Whether to warn.

    Raises:
        ValueError: If no client has any.
    """
    empty = [
        name for name, samples in zip(data.names, data.num_samples, strict=True) if not samples
    ]
    if empty and warn:
        rank_zero_warn(
            f"{len(empty)} clients without training samples {consequence}: {', '.join(empty[:10])}."
        )
    if len(empty) == data.num_clients:
        raise ValueError(
            f"Expected at least one client with training samples, but none of the "
            f"{data.num_clients} clients has any. Check the partition, or the datasets of "
            "`train_dataloaders`."
        )


def learners(
    federation: FederationState,
    data: FederatedDataset,
    phases: tuple[Phase, ...],
    limit: str,
    consequence: str = "are never sampled",
) -> Tensor:
    """Find the clients with a minibatch to train on, int64 ``(learners,)``; warn of others.

    Args:
        federation: The federation, which counts steps.
        data: The training data.
        phases: A round's local training, of any length. Without phases, all clients with samples
            count.
        limit: The Trainer's flag and its value, for messages.
        consequence: Consequence for the others, for messages.

    Raises:
        MisconfigurationException: If no client has any.
    """
    clients = data.num_samples.nonzero().flatten()
    if not phases or not len(clients):
        return clients
    one = tuple(replace(phase, epochs=1, steps=None, batches_per_step=1) for phase in phases)
    batches = federation.count_steps(data, clients, one)
    return clients[_busy(data, clients, batches, "train", limit, consequence)]


def can_be_evaluated(
    data: FederatedDataset, rows: Tensor, split: str, limit: float | int
) -> Tensor:
    """Find the clients with a minibatch to evaluate, bool ``(rows,)``; warn of others.

    Args:
        data: The split.
        rows: Clients with samples.
        split: ``"val"``, ``"test"`` or ``"predict"``.
        limit: ``limit_<split>_batches``.

    Raises:
        MisconfigurationException: If no client has any.
    """
    limits = Limits(batches=limit)
    batches = [minibatches_per_epoch(data, row, limits) for row in rows.tolist()]
    text = f"limit_{split}_batches={limit!r}"
    counts = torch.tensor(batches, dtype=torch.int64)
    return _busy(data, rows, counts, split, text, "are not evaluated")


def _busy(
    data: FederatedDataset,
    clients: Tensor,
    batches: Tensor,
    split: str,
    limit: str,
    consequence: str,
) -> Tensor:
    busy = batches > 0
    idle = [data.names[client] for client in clients[~busy].tolist()]
    why = f"{limit} and the batch size (with drop_last) leave no minibatch"
    if len(clients) and not busy.any():
        raise MisconfigurationException(
            f"Expected a client with a minibatch, but {why} to any of the {len(clients)} clients "
            f"with samples in the {split} split. Use a larger limit (fractions are per client, "
            "rounded down), smaller batches or drop_last=False."
        )
    if idle:
        rank_zero_warn(f"{len(idle)} clients {consequence}, as {why} to them: {_some(idle)}.")
    return busy


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
