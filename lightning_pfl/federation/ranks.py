"""The processes of a run: which clients each works on, and how they share results.

One process is the trivial case: it works on every client and knows every result, so the code around
asks no question about the number of processes. ``federation.shard(clients)`` is this process's part
of a list of clients, ``shard.slice(tree)`` its rows, and ``shard.all_gather(tree)`` the rows of all
processes in the order of the list.

- Client states stay: process r holds those of the clients with id = r modulo the number of
  processes, and trains and evaluates these clients. Without client states a cohort is split
  evenly. All processes load all data.
- The uploads of all clients reach every process before they are accepted. Each process decides
  about its clients, the decisions are shared, and every process computes the same server update
  on the same tensors. With the sequential engine the result has the bits of one process.
- Evaluations and predictions are shared in the same way, so loggers, ``EarlyStopping`` and
  ``ModelCheckpoint`` decide alike everywhere.
- A checkpoint holds all client states, and resumes with any number of processes.
- Hooks per client fire in all processes for all clients of the cohort, after the training: a hook
  may wait for the other processes. A callback that works on clients calls ``personal_models`` and
  ``evaluate_clients`` in all processes with the same clients.
- After a run every process has all client states, if they take at most 1 GiB, so that
  ``client_state_dict`` needs no other process. Inside ``without_communication()`` nothing waits.
- A process that dies closes its connections, and the others end with an error. One that is stopped
  gives no signs of life, and the others end with an error that names it: ``presence.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightning_pfl.contract.records import Evaluation, LocalResult, LogOptions
from lightning_pfl.core.tree import Tree, leaf_at, map_items, rows, tmap
from lightning_pfl.engine.logs import LOSS
from lightning_pfl.federation.presence import Presence


class Ranks:
    """The processes of a run, which must make the same collective calls in the same order.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
        device: Device of this process, used for communication.
        presence: Signs of life of the processes; None without.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | str = "cpu",
        presence: Presence | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.presence = presence
        self._without_communication = False

    @property
    def alone(self) -> bool:
        """Whether collective calls are skipped."""
        return self.size == 1 or self._without_communication

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make a collective call of ``torch.distributed``.

        Raises:
            StoppedProcessError: If it waits for a process that gives no sign of life.
        """
        if self.presence is None:
            function(*args, **kwargs)
        else:
            self.presence.call(partial(function, *args, **kwargs))

    @contextmanager
    def without_communication(self) -> Iterator[None]:
        """Skip collective calls inside a ``with`` block, to work on this process's clients only."""
        before, self._without_communication = self._without_communication, True
        try:
            yield
        finally:
            self._without_communication = before

    def shard(self, keys: Tensor) -> RankShard:
        """Return this process's shard of clients: those whose key modulo the size is its rank.

        Args:
            keys: One number per client, int64 ``(clients,)``.
        """
        return RankShard(self, keys)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Gather the small objects of all processes, in the order of their ranks."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        self.call(distributed.all_gather_object, found, value)
        return found

    def broadcast_module(self, module: nn.Module) -> None:
        """Send the parameters and buffers of process 0 to all processes."""
        if self.alone:
            return
        for leaf in chain(module.parameters(), module.buffers()):
            sent = leaf.detach().contiguous()
            self.call(distributed.broadcast, sent, 0)
            leaf.detach().copy_(sent)


class RankShard:
    """A process's shard of a list of clients.

    Attributes:
        index: Positions in the list; a full slice with one process.
    """

    def __init__(self, ranks: Ranks, keys: Tensor) -> None:
        self.ranks, self.total, self.alone = ranks, len(keys), ranks.alone
        self.index: slice | Tensor = slice(None)
        if not self.alone:
            owner = keys.cpu() % ranks.size
            self._shards = [(owner == rank).nonzero().flatten() for rank in range(ranks.size)]
            self.index = self._shards[ranks.rank]

    def slice(self, tree: Tree) -> Tree:
        """Select this process's rows of a tree ``(clients, ...)``; views with one process."""
        if isinstance(self.index, slice):
            return tree
        return rows(tree, self.index.to(self.ranks.device))

    def all_gather(self, tree: Tree) -> Tree:
        """Gather all processes' rows in the order of the list, on this process's device.

        Args:
            tree: This process's rows; empty without clients.
        """
        if self.alone:
            return tree
        # Names, shapes without the client axis, and dtypes.
        form = tmap(lambda leaf: (tuple(leaf.shape[1:]), leaf.dtype), tree)
        mine = form if len(self._shards[self.ranks.rank]) else None
        known = [found for found in self.ranks.all_gather_objects(mine) if found is not None]
        if not known:
            return tree
        return map_items(lambda path, kind: self._gather(leaf_at(tree, path), *kind), known[0])

    def all_gather_values(self, values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Gather logged values, float64 ``(clients,)``; NaN where a process has no such name.

        Args:
            values: This process's values, ``(count,)``.
            count: Number of this process's clients.
        """
        if self.alone:
            return dict(values)
        names = dict.fromkeys(
            name for found in self.ranks.all_gather_objects([*values]) for name in found
        )
        gap = torch.full((count,), torch.nan)
        return self.all_gather({name: values.get(name, gap).double() for name in names})

    def all_gather_each(self, values: Sequence[Any]) -> list[Any]:
        """Gather objects, one per client, in the order of the list."""
        if self.alone:
            return list(values)
        found: list[Any] = [None] * self.total
        for share, sent in zip(
            self._shards, self.ranks.all_gather_objects(list(values)), strict=True
        ):
            for position, value in zip(share.tolist(), sent, strict=True):
                found[position] = value
        return found

    def _gather(self, leaf: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Gather one leaf from all processes as bytes, since backends don't support every dtype."""
        counts = [len(share) for share in self._shards]
        width, numbers = max(counts), torch.Size(shape).numel()
        device = self.ranks.device
        # All processes must send equal sizes: short shards are padded.
        sent = torch.zeros(width, numbers, dtype=dtype, device=device)
        if leaf is not None and len(leaf):
            sent[: len(leaf)] = leaf.detach().reshape(len(leaf), numbers)
        received = sent.new_empty(len(counts) * width, numbers)
        if numbers:
            parts = [part.view(torch.uint8) for part in received.split(width)]
            self.ranks.call(distributed.all_gather, parts, sent.view(torch.uint8))
        place = torch.empty(self.total, dtype=torch.int64)
        for rank, share in enumerate(self._shards):
            place[share] = rank * width + torch.arange(len(share))
        return received.index_select(0, place.to(device)).view(self.total, *shape)


# --- results --------------------------------------------------------------------------------------


def gather_work(shard: RankShard, work: LocalResult) -> LocalResult:
    """Gather the cohort's uploads and values on every process, but no client states."""
    uploads = shard.all_gather(work.uploads)
    logs = shard.all_gather_values({**work.logs, LOSS: work.loss}, len(work.loss))
    loss = logs.pop(LOSS)
    return LocalResult(uploads, work.client_state, logs, _options(shard, work.options), loss)


def gather_evaluation(shard: RankShard, found: Evaluation) -> Evaluation:
    """Gather the results of all clients on every process."""
    values = shard.all_gather_values(found.values, len(found.counts))
    counts = shard.all_gather({"counts": found.counts})["counts"].cpu()
    return Evaluation(
        values, counts, _options(shard, found.options), shard.all_gather_each(found.predictions)
    )


def _options(shard: RankShard, options: Mapping[str, LogOptions]) -> dict[str, LogOptions]:
    return {
        name: o
        for found in shard.ranks.all_gather_objects(dict(options))
        for name, o in found.items()
    }
