"""The processes of a run: which clients each works on, and how they share results.

One process is the trivial case: it works on every client and knows every result, so the code around
asks no question about the number of processes. ``federation.shard(clients)`` is this process's part
of a list of clients, ``shard.slice(tree)`` its rows, and ``shard.all_gather(tree)`` the rows of all
processes in the order of the list.

- Each process owns clients, dealt once by their numbers of samples: it holds their states, which
  stay, and evaluates them. A cohort is dealt by what its clients cost, samples times
  steps: where one process has too much to do, the states of some clients visit another one for the
  round. So all processes have all samples. With ``split_data`` each has those of its clients, which
  train where they live.
- Each process decides about the uploads of its clients, and the decisions are shared. Where the
  server needs their weighted mean alone, each process adds up its own and the sums are added up
  (``means.py``): what is sent doesn't grow with the cohort. Otherwise, or if a callback looks at
  them, the uploads of all clients reach every process. Every process computes the same server
  update. Both ways give the bits of one process with the sequential engine, as sums have the same
  bits in any order.
- Evaluations and predictions are shared in the same way, so loggers, ``EarlyStopping`` and
  ``ModelCheckpoint`` decide alike everywhere.
- A checkpoint holds all client states, in a file, or in one of each process (``shards.py``), and
  resumes with any number of processes.
- Hooks per client fire in all processes for all clients of the cohort, after the training: a hook
  may wait for the other processes. A callback that works on clients calls ``personal_models`` and
  ``evaluate_clients`` in all processes with the same clients.
- After a run every process has all client states, if they take at most 1 GiB, so that
  ``client_state_dict`` needs no other process. Inside ``without_communication()`` nothing waits.
- A process that dies closes its connections, and the others end with an error. One that is stopped
  gives no signs of life, and the others end with an error that names it: ``presence.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain, count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_pfl.contract.records import Evaluation, LocalResult, LogOptions
from lightning_pfl.core.tree import Path, Tree, items, leaf_at, map_items, rows, tmap
from lightning_pfl.engine.client_logs import LOSS
from lightning_pfl.federation.presence import Presence

BLOCK = 2**26
"""Bytes that a process sends at once, if one leaf isn't more."""
SMALL = 2**13
"""Bytes of an object that processes send in one call."""
_AGREEMENTS = count()
"""Numbers of agreements, which processes count alike."""


class Ranks:
    """The processes of a run, which must make the same collective calls in the same order.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
        device: Device of this process, used for communication.
        presence: Signs of life of the processes; None without.
        store: Opens the store that all processes read and write; None with one process.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | str = "cpu",
        presence: Presence | None = None,
        store: Callable[[], Store] | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.presence, self.store = presence, store
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
            self.presence.call(partial(function, *args, async_op=True, **kwargs))

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
        """Gather objects of all processes, in the order of their ranks: small ones in one call."""
        return [value] if self.alone else self._all_gather_objects(value)

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return an object of one process in every process, whether or not it is alone now.

        Args:
            value: The object; of the other processes anything.
            source: The rank of the process.
        """
        return self._all_gather_objects(value if self.rank == source else None)[source]

    def _all_gather_objects(self, value: Any) -> list[Any]:
        said = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(said)]).view(torch.uint8)
        first, rest = said[: SMALL - len(size)], said[SMALL - len(size) :]
        found = self._all_gather_bytes(torch.cat([size, first]), SMALL)
        sizes = [int(row[: len(size)].view(torch.int64)) for row in found]
        found = found[:, len(size) :]
        if (longest := max(sizes) - found.shape[1]) > 0:
            found = torch.cat([found, self._all_gather_bytes(rest, longest)], 1)
        return [
            pickle.loads(row[:length].numpy().tobytes())
            for row, length in zip(found, sizes, strict=True)
        ]

    def _all_gather_bytes(self, sent: Tensor, width: int) -> Tensor:
        """Gather at most ``width`` bytes of each process, uint8 ``(processes, width)``."""
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(sent)] = sent
        padded = padded.to(self.device)
        received = padded.new_empty(self.size, width)
        self.call(distributed.all_gather, [*received], padded)
        return received.cpu()

    def agreement(self) -> Callable[[str, str], str]:
        """Return a function by which all processes take the choice of the first one to make it.

        It gets the name of the choice and this process's, and returns the first one's; it isn't
        collective, as some process may have nothing to choose. Processes make agreements in the
        same order.
        """
        if self.size == 1 or self.store is None:
            return lambda name, mine: mine
        store, number = cache(self.store), next(_AGREEMENTS)

        def agree(name: str, mine: str) -> str:
            key = f"lightning_pfl/choice/{number}/{name}"
            first: bytes = store().compare_set(key, "", f"={mine}")  # "": nobody has said anything
            return first.decode().removeprefix("=")

        return agree

    def all_reduce(self, parts: list[Tensor], operation: Any) -> list[Tensor]:
        """Reduce tensors over all processes, those of one dtype in one call.

        Args:
            parts: The same shapes and dtypes in every process.
            operation: ``ReduceOp.MAX`` or ``ReduceOp.SUM`` of ``torch.distributed``. A sum that
                isn't exact depends on the number of processes.
        """
        reduced: list[Tensor] = [torch.empty(0)] * len(parts)
        for dtype in dict.fromkeys(part.dtype for part in parts):
            at = [number for number, part in enumerate(parts) if part.dtype == dtype]
            flat = torch.cat([parts[number].flatten() for number in at])
            self.call(distributed.all_reduce, flat, operation)
            found = flat.split([parts[number].numel() for number in at])
            for number, part in zip(at, found, strict=True):
                reduced[number] = part.view(parts[number].shape)
        return reduced

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

    Args:
        ranks: The processes.
        keys: One number per client, int64 ``(clients,)``: modulo their number, the client's rank.

    Attributes:
        index: Positions in the list; a full slice with one process.
        owners: The rank of each client, int64 ``(clients,)``.
    """

    def __init__(self, ranks: Ranks, keys: Tensor) -> None:
        self.ranks, self.total, self.alone = ranks, len(keys), ranks.alone
        self.owners = keys.cpu() % (1 if self.alone else ranks.size)
        self.index: slice | Tensor = slice(None)
        if not self.alone:
            self._shards = [(self.owners == rank).nonzero().flatten() for rank in range(ranks.size)]
            self.index = self._shards[ranks.rank]

    def keep(self, chosen: Tensor) -> RankShard:
        """Return the shard of some of the clients, bool ``(clients,)``, each in its process."""
        return RankShard(self.ranks, self.owners[chosen])

    def slice(self, tree: Tree) -> Tree:
        """Select this process's rows of a tree ``(clients, ...)``; views with one process."""
        if isinstance(self.index, slice):
            return tree
        return rows(tree, self.index.to(self.ranks.device))

    def all_gather(self, tree: Tree, form: Tree | None = None) -> Tree:
        """Gather all processes' rows in the order of the list, on this process's device.

        Args:
            tree: This process's rows; empty without clients.
            form: The :class:`Kind` of a row of each leaf, where all processes know it.
        """
        if self.alone or not self.total:
            return tree
        form = self.agree_on_form(tree) if form is None else form
        if form is None:
            return tree
        found: dict[Path, Tensor] = {}
        for block in _blocks(form, max(map(len, self._shards))):
            found |= self._gather(tree, block)
        return map_items(lambda path, _: found[path], form)

    def agree_on_form(self, tree: Tree) -> Tree | None:
        """Describe a client's rows in all processes; None if none has a client."""
        mine = form_of(tree) if len(self._shards[self.ranks.rank]) else None
        return known_form(self.ranks.all_gather_objects(mine))

    def in_order(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Join what all processes have found for their clients in the order of the list."""
        if self.alone:
            return list(parts[0])
        found: list[Any] = [None] * self.total
        for share, part in zip(self._shards, parts, strict=True):
            for position, value in zip(share.tolist(), part, strict=True):
                found[position] = value
        return found

    def join_values(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Join values ``(clients,)`` of all processes; NaN where one has no such name.

        Args:
            parts: Each process's values, NumPy arrays, float64.

        Returns:
            float64 ``(clients,)`` in the order of the list, on this process's device.
        """
        names = dict.fromkeys(name for part in parts for name in part)
        joined = torch.full((len(names), self.total), torch.nan, dtype=torch.float64)
        for share, part in zip(self._shards, parts, strict=True):
            for row, name in enumerate(names):
                if name in part:
                    joined[row, share] = torch.from_numpy(part[name])
        return dict(zip(names, joined.to(self.ranks.device), strict=True))

    def _gather(self, tree: Tree, block: Mapping[Path, Kind]) -> dict[Path, Tensor]:
        """Gather leaves from all processes as bytes, since backends don't support every dtype."""
        device, counts = self.ranks.device, [len(share) for share in self._shards]
        # All processes must send equal sizes: short shards are padded. A leaf begins at a multiple
        # of 8, as every dtype may.
        sizes = [-(-max(counts) * kind.nbytes // 8) * 8 for kind in block.values()]
        sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for path, part in zip(block, sent.split(sizes), strict=True):
            leaf = leaf_at(tree, path)
            if leaf is not None and leaf.numel():
                plain = leaf.detach().to(device).contiguous().flatten().view(torch.uint8)
                part[: len(plain)] = plain
        received = sent.new_empty(len(counts), len(sent))
        if len(sent):
            self.ranks.call(distributed.all_gather, [*received], sent)
        found = {}
        for (path, kind), part in zip(block.items(), received.split(sizes, 1), strict=True):
            leaf = torch.empty(self.total, *kind.shape, dtype=kind.dtype, device=device)
            for share, bytes_of in zip(self._shards, part, strict=True):
                given = bytes_of[: len(share) * kind.nbytes].view(kind.dtype)
                leaf.index_copy_(0, share.to(device), given.view(len(share), *kind.shape))
            found[path] = leaf
        return found


class Kind(NamedTuple):
    """The form of a client's row of a leaf.

    Attributes:
        shape: Its shape, without client axis.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Entries of a row."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.numel * self.dtype.itemsize


def form_of(tree: Tree) -> Tree:
    """Describe a client's row of each leaf of a tree, ``(clients, ...)``, by its :class:`Kind`."""
    return tmap(lambda leaf: Kind(tuple(leaf.shape[1:]), leaf.dtype), tree)


def known_form(forms: Sequence[Tree | None]) -> Tree | None:
    """Return the form that processes with clients know; None if none has a client."""
    return next((form for form in forms if form is not None), None)


def kinds_of(form: Tree) -> dict[Path, Kind]:
    """Return the kinds of a form, by the paths of the leaves."""
    return cast("dict[Path, Kind]", dict(items(form)))


def _blocks(form: Tree, width: int) -> Iterator[dict[Path, Kind]]:
    """Group leaves so that those of ``width`` clients take at most :data:`BLOCK`, if one does."""
    block: dict[Path, Kind] = {}
    size = 0
    for path, kind in kinds_of(form).items():
        if block and size + width * kind.nbytes > BLOCK:
            yield block
            block, size = {}, 0
        block[path] = kind
        size += width * kind.nbytes
    if block:
        yield block


# --- results --------------------------------------------------------------------------------------


def gather_work(
    shard: RankShard, work: LocalResult, said: Any = None
) -> tuple[LocalResult, list[Any]]:
    """Gather the logged values of the cohort on every process, but no uploads and no states.

    Args:
        shard: This process's shard of the cohort.
        work: Its results.
        said: Something else that all processes should know.

    Returns:
        The results with the values of all clients, and what each process has said.
    """
    if shard.alone:
        return work, [said]
    mine = {**work.logs, LOSS: work.loss}
    found = shard.ranks.all_gather_objects((_as_arrays(mine), dict(work.options), said))
    logs = shard.join_values([values for values, _, _ in found])
    loss = logs.pop(LOSS)
    options = _merged([options for _, options, _ in found])
    return replace(work, logs=logs, loss=loss, options=options), [said for _, _, said in found]


def gather_evaluation(
    shard: RankShard, found: Evaluation, said: Any = None
) -> tuple[Evaluation, list[Any]]:
    """Gather the results of all clients on every process, their values as steps log them.

    Args:
        shard: This process's shard of the clients.
        found: Its results.
        said: Something else that all processes should know.

    Returns:
        The results of all clients, and what each process has said.
    """
    if shard.alone:
        return found.ordered(), [said]
    listed = found.counts.tolist(), found.options, found.predictions, found.orders
    values, counts, options, predictions, orders, heard = zip(
        *shard.ranks.all_gather_objects((_as_arrays(found.values), *listed, said)), strict=True
    )
    everything = Evaluation(
        shard.join_values(values),
        torch.tensor(shard.in_order(counts), dtype=torch.int64),
        _merged(options),
        shard.in_order(predictions) if any(predictions) else [],
        frozenset().union(*orders),
    )
    return everything.ordered(), list(heard)


def _as_arrays(values: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: value.detach().double().cpu().numpy() for name, value in values.items()}


def _merged(parts: Sequence[Mapping[str, LogOptions]]) -> dict[str, LogOptions]:
    return {name: options for part in parts for name, options in part.items()}
