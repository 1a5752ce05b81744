"""The gate between clients and server: what isn't finite, or is too large, stays outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo, LocalResult
from lightning_pfl.core.tree import Path, Tree, as_rows, finite, items, leaf_at
from lightning_pfl.federation.ranks import RankShard


def accept_uploads(
    result: LocalResult, received: Tree, info: ClientInfo, max_norm: float | None
) -> tuple[Tensor, dict[int, str]]:
    r"""Decide whose work counts in this round.

    A client is left out if its upload, its memory or its training loss isn't finite, or if
    :math:`\lVert \text{upload} - \text{received} \rVert_2` is above ``max_norm``. Entries of an
    upload that have no counterpart in what was received count as they are, but for those of one
    number per client, such as the logarithm of a weight.

    Args:
        result: The cohort's work.
        received: What the clients started from, ``(clients, ...)``.
        info: The cohort.
        max_norm: Largest norm of an update; None for no bound.

    Returns:
        Who is accepted, bool ``(clients,)`` on the CPU, and the reason by client id for those who
        aren't.
    """
    loss = result.loss
    everyone = torch.ones(len(info), dtype=torch.bool, device=loss.device)
    norm = update_norm(result.uploads, received, everyone)
    checks = {
        "upload is not finite": everyone & finite(result.uploads),
        "memory is not finite": everyone & finite(result.client_state),
        # NaN says that no loss was computed: by a client that took no step, or by a method that
        # solves in closed form.
        "loss is not finite": ~loss.isinf(),
    }
    if max_norm is not None:
        checks[f"update norm above max_update_norm={max_norm}"] = norm <= max_norm
    passed = torch.stack(list(checks.values())).cpu()  # the round's one wait for the device
    accepted = passed.all(0)
    rejected = {}
    for position in (~accepted).nonzero().flatten().tolist():
        failed = [
            reason
            for reason, ok in zip(checks, passed[:, position].tolist(), strict=True)
            if not ok
        ]
        rejected[int(info.index[position])] = failed[0]
    return accepted, rejected


def accept_cohort(
    shard: RankShard, work: LocalResult, received: Tree, info: ClientInfo, max_norm: float | None
) -> tuple[Tensor, dict[int, str]]:
    """Decide about a whole cohort: every process judges its own clients, and hears of all.

    Args:
        shard: This process's share of the cohort.
        work: All clients' uploads, and what this process's clients remember and lost.
        received: What the cohort started from, ``(clients, ...)``.
        info: The cohort.
        max_norm: As in :func:`accept_uploads`.

    Returns:
        As :func:`accept_uploads`, for the cohort.
    """
    mine = replace(work, uploads=shard.slice(work.uploads), loss=shard.slice({"": work.loss})[""])
    accepted, rejected = accept_uploads(
        mine, shard.slice(received), info.rows(shard.index), max_norm
    )
    reasons = {
        k: reason
        for found in shard.ranks.all_gather_objects(rejected)
        for k, reason in found.items()
    }
    accepted = shard.all_gather({"": accepted})[""].cpu()
    return accepted, {k: reasons[k] for k in info.index.tolist() if k in reasons}


def update_norm(uploads: Tree, received: Tree, like: Tensor) -> Tensor:
    """Norm of the difference between what clients send and what they received, ``(clients,)``.

    Args:
        uploads: What they send, ``(clients, ...)``.
        received: What they received, ``(clients, ...)``.
        like: A tensor ``(clients,)`` on the device, for uploads without any entry.
    """
    total = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    for _, change in changes(uploads, received):
        total = total + as_rows(change).double().square().sum(1)
    return total.sqrt()


def changes(uploads: Tree, received: Tree) -> Iterator[tuple[Path, Tensor]]:
    """Iterate over the paths and the changes of floating-point entries, ``(clients, ...)`` each.

    An entry that wasn't received changes from zero; a number per client, such as a loss, is none.

    Args:
        uploads: Trees that clients send, ``(clients, ...)``.
        received: Trees that they received, ``(clients, ...)``.
    """
    for path, leaf in items(uploads):
        before = leaf_at(received, path)
        if not leaf.is_floating_point():
            continue
        if before is not None and before.shape == leaf.shape:
            yield path, leaf - before
        elif leaf.ndim > 1:
            yield path, leaf
