"""From ragged clients to ticks: groups of clients whose next batches have the same shape.

A *minibatch* is what the user's step sees. A *step* is one optimizer step: ``accumulate``
minibatches, fewer at the end of an epoch. At tick ``s`` every client takes its own step ``s``;
clients whose minibatches have equal sizes run together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pfl.data.batch import map_batch
from lightning_pfl.data.clients import FederatedDataset, FederatedLoaders, FederatedTensorDataset
from lightning_pfl.randomness import derive, permutation, seeded


@dataclass(frozen=True)
class Budget:
    """How far a phase goes: exactly one of ``epochs`` and ``steps`` is a number."""

    epochs: int | None
    steps: int | None


@dataclass(frozen=True)
class Limits:
    """How minibatches are cut and grouped; the Trainer's flags.

    Args:
        accumulate: Minibatches per optimizer step.
        batches: Minibatches per client and epoch: a count or a fraction.
        overfit: When not 0, that many (or that fraction of) minibatches, never shuffled.
    """

    accumulate: int = 1
    batches: float | int = 1.0
    overfit: float | int = 0.0

    def of_epoch(self, minibatches: int) -> int:
        """How many of an epoch's minibatches are used."""
        limit = self.overfit if self.overfit else self.batches
        return min(limit, minibatches) if isinstance(limit, int) else int(minibatches * limit)


@dataclass
class Minibatch:
    """One minibatch of several clients.

    Attributes:
        data: Leaves ``(clients, batch, ...)``.
        sizes: Real samples per client, int64 ``(clients,)`` on the CPU.
        mask: Which samples are real, float ``(clients, batch)``; None if all are.
        features: Cached backbone features ``(clients, batch, ...)``; None without a cache.
        number: The minibatch's number within the phase.
        size: Samples of every client's minibatch; None if they differ.
    """

    data: Any
    sizes: Tensor
    mask: Tensor | None = None
    features: Tensor | None = None
    number: int = 0
    size: int | None = None


@dataclass
class Tick:
    """One optimizer step of some clients of the chunk.

    Attributes:
        rows: Which clients: None for all, else a slice or positions.
        minibatches: The step's minibatches.
    """

    rows: slice | Tensor | None
    minibatches: list[Minibatch]


def epoch_minibatches(samples: int, batch_size: int, drop_last: bool) -> int:
    """Minibatches in a pass over ``samples`` samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def count_steps(per_epoch: int, budget: Budget, accumulate: int) -> int:
    """Optimizer steps of a phase for a client with ``per_epoch`` minibatches.

    None for a client without any.
    """
    if per_epoch == 0:
        return 0
    if budget.steps is not None:
        return budget.steps
    assert budget.epochs is not None
    return budget.epochs * -(-per_epoch // accumulate)


def step_bounds(per_epoch: int, budget: Budget, accumulate: int) -> list[tuple[int, int]]:
    """First and last-plus-one minibatch number of every step.

    Minibatches are numbered through all epochs.
    """
    bounds = []
    for step in range(count_steps(per_epoch, budget, accumulate)):
        epoch, within = divmod(step, -(-per_epoch // accumulate))
        start = within * accumulate
        bounds.append(
            (epoch * per_epoch + start, epoch * per_epoch + min(start + accumulate, per_epoch))
        )
    return bounds


def minibatches_per_epoch(data: FederatedDataset, client: int, limits: Limits) -> int:
    """Minibatches that a client uses in one epoch."""
    if isinstance(data, FederatedTensorDataset):
        number = epoch_minibatches(int(data.num_samples[client]), data.batch_size, data.drop_last)
    else:
        number = len(data.loaders[client])
    return limits.of_epoch(number)


def order_key(seed: int, stream: str, round: int, client: int, epoch: int) -> int:
    """The key of a client's order of samples in one epoch of one round."""
    return derive(seed, "order", stream, round, client, epoch)


class ResidentBatches:
    """Minibatches of a chunk gathered from tensors on the device.

    Args:
        data: The federated dataset.
        clients: Client ids of the chunk, in the chunk's order.
        budget: How far the phase goes.
        limits: Accumulation and limits.
        key: From (client id, epoch) to the key of its order; None never shuffles (evaluation).
        pad: Whether minibatches of different sizes may share a padded batch with a mask; else they
            form groups.
        first_epoch: Number of the phase's first epoch within the round, for ``key``.
        batch_size: Samples per minibatch; None for the dataset's own.
    """

    def __init__(
        self,
        data: FederatedTensorDataset,
        clients: Sequence[int],
        budget: Budget,
        limits: Limits,
        key: Callable[[int, int], int] | None,
        pad: bool = False,
        first_epoch: int = 0,
        batch_size: int | None = None,
    ) -> None:
        self.data, self.pad, self.clients = data, pad, list(clients)
        self.batch_size = batch_size or data.batch_size
        key = key if data.shuffle and not limits.overfit else None
        samples = [int(data.num_samples[client]) for client in clients]
        per_epoch = [
            limits.of_epoch(epoch_minibatches(n, self.batch_size, data.drop_last)) for n in samples
        ]
        self.bounds = [step_bounds(n, budget, limits.accumulate) for n in per_epoch]
        self.steps = torch.tensor([len(b) for b in self.bounds])
        total = max((b[-1][1] for b in self.bounds if b), default=0)
        # Position within the client's own samples; -1 pads. Local positions index the feature cache
        # as well.
        longest = max(samples, default=0)
        # A batch size beyond every client's data means full batches; it must not cost the memory
        # that it says.
        width = max(min(self.batch_size, longest), 1)
        local = torch.full((len(clients), total, width), -1)
        for row, client in enumerate(clients):
            used = self.bounds[row][-1][1] if self.bounds[row] else 0
            for epoch in range(-(-used // per_epoch[row]) if used else 0):
                self._fill(
                    local[row],
                    samples[row],
                    per_epoch[row],
                    epoch,
                    used,
                    key(client, first_epoch + epoch) if key is not None else None,
                )
        sizes = (local >= 0).sum(2)
        self.sizes = sizes
        self._full = bool((sizes == width).all())
        device = data.device
        owned = torch.zeros(len(clients), max(longest, 1), dtype=torch.long, device=device)
        for row, client in enumerate(clients):
            owned[row, : samples[row]] = data.indices[client]
        self._mask = None if self._full else (local >= 0).to(device)
        self.local = local.clamp_min(0).to(device)
        flat = self.local.flatten(1)
        self.positions = owned.gather(1, flat).view_as(self.local)
        self.features: Tensor | None = None
        self._targets: Any = None
        self._aligned = self._full and all(b == self.bounds[0] for b in self.bounds)
        self.epochs_used = max(
            (-(-b[-1][1] // n) for b, n in zip(self.bounds, per_epoch, strict=True) if b), default=0
        )

    def _fill(
        self, out: Tensor, samples: int, per_epoch: int, epoch: int, used: int, key: int | None
    ) -> None:
        order = torch.arange(samples) if key is None else permutation(samples, key)
        minibatches = min(per_epoch, used - epoch * per_epoch)
        taken = order[: minibatches * self.batch_size]
        out[epoch * per_epoch : epoch * per_epoch + minibatches].view(-1)[: len(taken)] = taken

    def cache(self, features: Tensor, targets: Any = None) -> None:
        """Use cached features beside every batch.

        Args:
            features: ``(clients, longest, ...)`` in the order of each client's samples.
            targets: The rest of the batch in the same order, where it is known to be all that the
                step needs; the samples then aren't gathered any more.
        """
        self.features, self._targets = features.flatten(0, 1), targets
        first = torch.arange(len(features), device=features.device) * features.shape[1]
        self._feature_rows = self.local + first.view(-1, 1, 1)

    def at(self, step: int) -> Iterator[Tick]:
        """The ticks of one step number."""
        first, last = self.bounds[0][step]
        if self._aligned:
            yield self._aligned_tick(len(self.steps), range(first, last))
            return
        active = int((self.steps > step).sum())  # the chunk is sorted by steps, longest first
        if self._full and all(self.bounds[row][step] == (first, last) for row in range(active)):
            yield self._aligned_tick(active, range(first, last))
            return
        groups: dict[Any, list[int]] = {}
        for row in range(active):
            begin, end = self.bounds[row][step]
            sizes = tuple(self.sizes[row, begin:end].tolist())
            groups.setdefault(len(sizes) if self.pad else sizes, []).append(row)
        for signature, members in groups.items():
            count = signature if isinstance(signature, int) else len(signature)
            yield self._tick(
                torch.tensor(members),
                [self.bounds[r][step][0] for r in members],
                count,
                padded=self.pad,
            )

    def _aligned_tick(self, active: int, numbers: range) -> Tick:
        """The usual case.

        Full minibatches, with the same number for the first ``active`` clients.
        """
        minibatches = []
        width = self.local.shape[2]
        for number in numbers:
            features, data = self._cached(slice(0, active), number, width)
            if data is None:
                data = self.data.gather(self.positions[:active, number])
            sizes = self.sizes[:active, number]
            minibatches.append(Minibatch(data, sizes, None, features, number, width))
        return Tick(None if active == len(self.steps) else slice(0, active), minibatches)

    def _cached(self, rows: slice | Tensor, numbers: Any, width: int) -> tuple[Tensor | None, Any]:
        """Features, and the batch to go with them if its samples aren't needed."""
        if self.features is None:
            return None, None
        at = self._feature_rows[rows, numbers][:, :width]
        flat = at.flatten()

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, flat).view(*at.shape, *leaf.shape[1:])

        features = pick(self.features)
        if self._targets is None:
            return features, None
        return features, (features, *map_batch(self._targets, pick))

    def _tick(self, rows: Tensor, starts: list[int], count: int, padded: bool) -> Tick:
        minibatches = []
        device = self.positions.device
        index = rows.to(device)
        for offset in range(count):
            numbers = torch.tensor([start + offset for start in starts])
            sizes = self.sizes[rows, numbers]
            width = int(sizes.max())
            at = (index, numbers.to(device))
            positions = self.positions[at][:, :width]
            ragged = padded and bool((sizes != width).any())
            features, data = self._cached(*at, width)
            data = self.data.gather(positions) if data is None else data
            mask = (
                self._mask[at][:, :width].to(torch.get_default_dtype())
                if ragged and self._mask is not None
                else None
            )
            minibatches.append(Minibatch(data, sizes, mask, features, starts[0] + offset))
        return Tick(_as_rows(rows, len(self.steps)), minibatches)


class LoaderBatches:
    """Minibatches of a chunk drawn from one DataLoader per client, as the user made it.

    A loader's shuffling and its dataset's random transforms draw from torch's global generator: it
    is seeded for each (client, epoch, minibatch), so that the samples don't depend on which clients
    share a chunk.
    """

    def __init__(
        self,
        data: FederatedLoaders,
        clients: Sequence[int],
        budget: Budget,
        limits: Limits,
        key: Callable[[int, int], int],
        device: torch.device,
        first_epoch: int = 0,
    ) -> None:
        self.clients, self.device, self._key = list(clients), device, key
        self.first_epoch = first_epoch
        self.loaders = [data.loaders[client] for client in clients]
        self.per_epoch = [limits.of_epoch(len(loader)) for loader in self.loaders]
        self.bounds = [step_bounds(n, budget, limits.accumulate) for n in self.per_epoch]
        self.steps = torch.tensor([len(b) for b in self.bounds])
        self.epochs_used = max(
            (-(-b[-1][1] // n) for b, n in zip(self.bounds, self.per_epoch, strict=True) if b),
            default=0,
        )
        self._iterators: list[Iterator[Any] | None] = [None] * len(self.loaders)

    def at(self, step: int) -> Iterator[Tick]:
        """The ticks of one step number.

        Clients whose minibatches have the same structure and shapes.
        """
        groups: dict[Any, list[tuple[int, list[Any]]]] = {}
        for row in range(int((self.steps > step).sum())):
            batches = [self._next(row, number) for number in range(*self.bounds[row][step])]
            groups.setdefault(tuple(map(signature, batches)), []).append((row, batches))
        for members in groups.values():
            rows = torch.tensor([row for row, _ in members])
            number = self.bounds[members[0][0]][step][0]
            minibatches = []
            for offset, parts in enumerate(zip(*(batches for _, batches in members), strict=True)):
                data = stack_batches(parts, self.device)
                sizes = torch.full((len(rows),), batch_length(parts[0]))
                minibatches.append(Minibatch(data, sizes, number=number + offset))
            yield Tick(_as_rows(rows, len(self.steps)), minibatches)

    def _next(self, row: int, number: int) -> Any:
        epoch, within = divmod(number, self.per_epoch[row])
        with seeded(
            derive(self._key(self.clients[row], self.first_epoch + epoch), "fetch", within)
        ):
            if within == 0:
                self._iterators[row] = iter(
                    reseed(
                        self.loaders[row], self._key(self.clients[row], self.first_epoch + epoch)
                    )
                )
            iterator = self._iterators[row]
            assert iterator is not None
            return next(iterator)


Batches = ResidentBatches | LoaderBatches


def reseed(loader: DataLoader[Any], key: int) -> DataLoader[Any]:
    """Seed the generators that the loader and its sampler own: their order follows from the key."""
    for owner in (loader, loader.sampler):
        own = getattr(owner, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(key)
    return loader


def _as_rows(rows: Tensor, clients: int) -> slice | Tensor | None:
    """None for all clients, a slice for the first ones, else the positions."""
    if len(rows) == clients:
        return None
    if int(rows[-1]) == len(rows) - 1:
        return slice(0, len(rows))
    return rows


def signature(batch: Any) -> Any:
    """Structure, shapes and dtypes of a batch: batches with equal signatures can be stacked."""
    if isinstance(batch, Tensor):
        return ("tensor", tuple(batch.shape), batch.dtype)
    if isinstance(batch, dict):
        return ("dict", *((key, signature(value)) for key, value in batch.items()))
    if isinstance(batch, (list, tuple)):
        return (type(batch).__name__, *map(signature, batch))
    return ("object", id(batch))


def batch_length(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor.

    1 for a scalar or a batch without tensors.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = (
        batch.values()
        if isinstance(batch, dict)
        else batch
        if isinstance(batch, (list, tuple))
        else ()
    )
    for part in parts:
        if isinstance(part, (Tensor, dict, list, tuple)):
            return batch_length(part)
    return 1


def stack_batches(batches: Sequence[Any], device: torch.device) -> Any:
    """Stack batches of equal signature along a new client axis, on the device."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches)).to(device, non_blocking=True)
    if isinstance(first, dict):
        return {key: stack_batches([batch[key] for batch in batches], device) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(stack_batches(parts, device) for parts in zip(*batches, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(stack_batches(parts, device) for parts in zip(*batches, strict=True))
    return first
