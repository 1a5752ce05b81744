"""Checks for clients without samples or without a minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_pfl.data.datasets import (
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
)
from lightning_pfl.engine.steps import Limits, minibatches_per_epoch
from lightning_pfl.federation.ranks import Ranks
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
            f"Clients without training samples {consequence} ({len(empty)} of {data.num_clients}): "
            f"{', '.join(empty[:10])}."
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
    consequence: str,
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


def check_budgets(phases: tuple[Phase, ...], names: Sequence[str], clients: Tensor) -> None:
    """Require numbers of passes or steps by client name to name the clients that train.

    Args:
        phases: A round's local training.
        names: Names of all clients of the federation.
        clients: Ids of those that train.

    Raises:
        MisconfigurationException: If one of them is missing, or another name is no client's.
    """
    for number in (number for phase in phases for number in (phase.epochs, phase.steps)):
        if not isinstance(number, Mapping):
            continue
        missing = [names[client] for client in clients.tolist() if names[client] not in number]
        unknown = [repr(name) for name in number if name not in names]
        if missing or unknown:
            found = f"none for {_some(missing)}" if missing else f"one for {_some(unknown)}"
            raise MisconfigurationException(
                "Expected a number of passes or steps for each client that trains, by its name "
                f"such as {names[0]!r}, but got {found}. Name the clients of the data."
            )


def warn_of_single_samples(data: FederatedDataset, clients: Tensor, module: nn.Module) -> None:
    """Warn of last minibatches of one sample, on which ``BatchNorm1d`` can't train.

    Such a client would end the run in the round in which it is first drawn.

    Args:
        data: The training data.
        clients: Ids of the clients that train.
        module: The module, or those of all architectures.
    """
    layers = [name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm1d)]
    samples = data.num_samples[clients]
    if isinstance(data, FederatedTensorDataset):
        batch = torch.full_like(samples, data.batch_size)
        drops = torch.full_like(samples, bool(data.drop_last), dtype=torch.bool)
        skip = "drop_last='single', which leaves such a minibatch out"
    elif isinstance(data, FederatedLoaders):
        loaders = [data.loaders[client] for client in clients.tolist()]
        batch = torch.tensor([loader.batch_size or 0 for loader in loaders])
        drops = torch.tensor([loader.drop_last for loader in loaders], dtype=torch.bool)
        skip = "drop_last=True, which leaves out clients with fewer samples than a minibatch"
    else:
        return
    known = ~drops & (batch > 0)
    single = known & (samples % batch.clamp_min(1) == 1 % batch.clamp_min(1)) & (samples > 0)
    if not layers or not single.any():
        return
    names = [data.names[client] for client in clients[single].tolist()]
    fits = [size for size in range(2, 257) if not (samples % size == 1).any()]
    nearest = min(fits, key=lambda size: abs(size - int(batch[single][0])), default=None)
    other = "a larger `batch_size`" if nearest is None else f"batch_size={nearest}"
    rank_zero_warn(
        f"The last minibatch of {len(names)} clients is one sample ({_some(names)}), on which "
        f"{layers[0]!r}, a BatchNorm1d, can't train unless it has further axes: the run would end "
        f"when one of them is drawn. Use {other}, or {skip}."
    )


def warn_of_nan_samples(data: FederatedDataset, rows: Tensor, split: str, ranks: Ranks) -> None:
    """Warn of clients whose samples in memory hold NaN, which an accuracy counts as some class.

    Args:
        data: The split.
        rows: Clients to look at.
        split: Its name, for the message.
        ranks: The processes, which may have samples of some clients each.
    """
    if not isinstance(data, FederatedTensorDataset):
        return
    mine = _with_nan(data, rows)
    if data.held is not None:
        mine = sorted(row for some in ranks.all_gather_objects(mine) for row in some)
    if mine:
        rank_zero_warn(
            f"The {split} data of {len(mine)} clients hold NaN: "
            f"{_some([data.names[row] for row in mine])}. A prediction from it may be NaN, which "
            "an accuracy counts as a class. Clean the data, unless the module expects NaN."
        )


def _with_nan(data: FederatedTensorDataset, rows: Tensor) -> list[int]:
    rows = rows if data.held is None else rows[data.held[rows]]
    broken = torch.zeros(len(data.fields[0]), dtype=torch.bool, device=data.fields[0].device)
    for field in data.fields:
        if field.is_floating_point():
            broken |= field.isnan().flatten(1).any(1) if field.ndim > 1 else field.isnan()
    if not broken.any():
        return []
    broken = broken.cpu()
    return [row for row in rows.tolist() if broken[data.indices[row].cpu()].any()]


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
