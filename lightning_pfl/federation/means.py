"""The weighted mean over the clients of all processes, which send each other sums alone.

It has the bits that one process finds. A plain sum takes less time than one that is the same in any
order of the clients, so that one is made of those columns alone in which the plain one may round to
another number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, distributed

from lightning_pfl.core.sums import (
    as_rows,
    double_sum,
    largest,
    round_to,
    rounded,
    rounding,
    sum_above,
)
from lightning_pfl.core.tree import Path, Tree, leaf_at, map_items
from lightning_pfl.federation.ranks import Kind, Ranks, RankShard, kinds_of

WORTH_A_CALL = 2**17
"""Entries of all clients' uploads from which plain sums save more than a collective call takes."""


def mean_over_ranks(
    shard: RankShard, tree: Tree, weights: Tensor, form: Tree | None = None
) -> Tree:
    """Average over the clients of all processes, with the bits of ``core.tree.weighted_mean``.

    Args:
        shard: This process's shard of the clients.
        tree: This process's rows; empty without clients.
        weights: Their weights, ``(clients,)``; those of all processes sum to 1.
        form: The :class:`Kind` of a row of each leaf, where all processes know it.

    Returns:
        A tree without client axis; empty if no process has a client.
    """
    form = shard.agree_on_form(tree) if form is None else form
    if form is None:
        return {}
    kinds = kinds_of(form)
    rows_of = {
        path: None if (leaf := leaf_at(tree, path)) is None else as_rows(leaf) for path in kinds
    }
    means, doubtful = _plain_means(shard, rows_of, weights, kinds)
    rest: dict[Path, tuple[Tensor | None, Kind]] = {}
    for path, kind in kinds.items():
        flat = rows_of[path]
        if path not in means:
            rest[path] = flat, Kind((kind.numel,), kind.dtype)
        elif len(at := doubtful[path]):
            some = None if flat is None else flat.index_select(1, at)
            rest[path] = some, Kind((len(at),), kind.dtype)
    for path, exact in (_exact_means(shard.ranks, rest, weights) if rest else {}).items():
        if path in means:
            means[path][doubtful[path]] = exact
        else:
            means[path] = exact
    return map_items(lambda path, kind: means[path].view(kind.shape), form)


def _plain_means(
    shard: RankShard,
    rows_of: Mapping[Path, Tensor | None],
    weights: Tensor,
    kinds: Mapping[Path, Kind],
) -> tuple[dict[Path, Tensor], dict[Path, Tensor]]:
    """Average leaves by plain sums, one for all processes, where that takes less time.

    Returns:
        The means ``(columns,)``, and the columns in which that of exact sums may round to another
        number: few, so that these take a third of the time and half of the bytes.
    """
    device, ranks = shard.ranks.device, shard.ranks
    paths = [
        path
        for path, kind in kinds.items()
        if kind.dtype.is_floating_point and kind.dtype != torch.float64
    ]
    if device.type != "cpu" or shard.total * sum(kinds[p].numel for p in paths) < WORTH_A_CALL:
        return {}, {}
    # What a bound of the error needs from each process, in rows that the others leave 0.
    ends = torch.zeros(ranks.size, 1 + len(paths), dtype=torch.float64)
    ends[ranks.rank, 0] = weights.double().sum()
    sums = []
    for column, path in enumerate(paths, 1):
        flat = rows_of[path]
        if flat is None or not flat.numel():
            sums.append(torch.zeros(kinds[path].numel, dtype=torch.float64))
            continue
        ends[ranks.rank, column] = largest(flat)
        sums.append(double_sum(flat, weights))
    ends, *sums = ranks.all_reduce([ends, *sums], distributed.ReduceOp.SUM)
    weight, most = float(ends[:, 0].sum()), ends[:, 1:].amax(0).tolist()
    means, doubtful = {}, {}
    for path, total, end in zip(paths, sums, most, strict=True):
        bound = end * rounding(shard.total, weight)
        means[path], unsure = rounded(total, bound, kinds[path].dtype)
        doubtful[path] = unsure.nonzero().flatten()
    return means, doubtful


def _exact_means(
    ranks: Ranks, leaves: Mapping[Path, tuple[Tensor | None, Kind]], weights: Tensor
) -> dict[Path, Tensor]:
    """Average rows ``(clients, columns)`` by sums whose bits no order of clients changes.

    Of integers the largest.
    """
    device, kinds = ranks.device, {path: kind for path, (_, kind) in leaves.items()}
    mine = {path: flat for path, (flat, _) in leaves.items()}
    floats = [path for path, kind in kinds.items() if kind.dtype.is_floating_point]
    high = {path: _largest(mine[path], kind, device) for path, kind in kinds.items()}
    below = [-_smallest(mine[path], kinds[path], device) for path in floats]
    # Backends don't have every dtype, and these values change none of its numbers.
    sent = [_widened(leaf) for leaf in (*high.values(), *below)]
    reduced = ranks.all_reduce(sent, distributed.ReduceOp.MAX)
    high = dict(zip(high, reduced, strict=False))
    low = {path: -leaf for path, leaf in zip(floats, reduced[len(high) :], strict=True)}
    sums = [
        torch.zeros(kinds[path].shape, dtype=torch.float64, device=device)
        if (flat := mine[path]) is None
        else sum_above(flat, weights, (low[path], high[path]))[1]
        for path in floats
    ]
    total = dict(zip(floats, ranks.all_reduce(sums, distributed.ReduceOp.SUM), strict=True))
    return {
        path: round_to(low[path].double() + total[path], kind.dtype)
        if path in total
        else high[path].to(kind.dtype)
        for path, kind in kinds.items()
    }


def _largest(leaf: Tensor | None, kind: Kind, device: torch.device) -> Tensor:
    if leaf is not None:
        return leaf.amax(0)
    least = -torch.inf if kind.dtype.is_floating_point else _least(kind.dtype)
    return torch.full(kind.shape, least, dtype=kind.dtype, device=device)


def _least(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _smallest(leaf: Tensor | None, kind: Kind, device: torch.device) -> Tensor:
    if leaf is not None:
        return leaf.amin(0)
    return torch.full(kind.shape, torch.inf, dtype=kind.dtype, device=device)


def _widened(leaf: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        return leaf.long()
    return leaf.float() if leaf.dtype.itemsize < 4 else leaf
