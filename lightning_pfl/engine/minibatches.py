"""The minibatches of one client, in sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.data.batch import batch_leaves, batch_length, map_batch
from lightning_pfl.data.datasets import FederatedDataset, FederatedLoaders, FederatedTensorDataset
from lightning_pfl.data.loaders import reseed
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.orders import CohortOrders
from lightning_pfl.engine.rows import row_epoch
from lightning_pfl.engine.steps import (
    Budget,
    Limits,
    epoch_minibatches,
    fitting_samples,
    joined,
    minibatches_per_epoch,
    samples_of_one_model,
    step_bounds,
    step_size,
)

IMAGES, MOST = 64, 1024
"""Samples that are gathered at once, of images of 28 x 28 numbers and of smaller ones, at most:
they are still in the cache when the last step reads them."""
ALIGNED = 64
"""Bytes at whose multiples new memory begins on a CPU."""


class Featured(tuple[Any, Tensor]):
    """Samples of a minibatch, and their features by the backbone of the client's model."""


def samples_of(minibatch: Any) -> Any:
    """Return the samples of a minibatch, with or without features."""
    return minibatch[0] if isinstance(minibatch, Featured) else minibatch


class ClientMinibatches:
    """An iterator over the steps of a phase: each a list of (number, minibatch).

    Numbers are those of :class:`~lightning_pfl.engine.vectorized.ticks.Minibatch`.

    Args:
        orders: The cohort's data, and the orders of its clients' samples.
        client: The client's id.
        budget: Length of the phase.
        limits: Accumulation and limits.
        device: Where minibatches go.
        first_epoch: Number of the phase's first epoch within the round.
        join: Whether steps may have several minibatches as one, as they add up what they find of
            each sample.
    """

    def __init__(
        self,
        orders: CohortOrders,
        client: int,
        budget: Budget,
        limits: Limits,
        device: torch.device,
        first_epoch: int,
        join: bool,
    ) -> None:
        self.data = data = orders.data
        self.client, self.limits, self.device = client, limits, device
        self.orders, self.first_epoch = orders, first_epoch
        if isinstance(data, FederatedTensorDataset):
            self.samples = int(data.num_samples[client])
        self.whole = budget.full_batch
        self.per_epoch = minibatches_per_epoch(data, client, self.limits, budget.full_batch)
        mine = budget.of(data.names[client])
        if isinstance(data, FederatedTensorDataset):
            self._cuts = self._cut(data, self.per_epoch, join and mine.epochs is not None)
            self.per_epoch = len(self._cuts)
        self.bounds = step_bounds(self.per_epoch, mine, self.limits.accumulate)
        self.size = step_size(budget, self.limits)
        self.epochs_used = -(-self.bounds[-1][1] // self.per_epoch) if self.bounds else 0
        self._features: Tensor | None = None

    def cache(self, features: Tensor) -> None:
        """Let minibatches have features, ``(samples, ...)`` in the client's order."""
        self._features = features

    def _cut(self, data: FederatedTensorDataset, minibatches: int, join: bool) -> list[int]:
        """Return the samples of each minibatch of an epoch, of which several may be one."""
        size = max(1, self.samples) if self.whole else data.batch_size
        complete, rest = divmod(min(self.samples, minibatches * size), size)
        most = samples_of_one_model(data) // size if join else 1
        # The last one may have any size, and would make one of a group that is another client's.
        return [size * some for some in joined(complete, most)] + ([rest] if rest else [])

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        stream = (
            self._resident() if isinstance(self.data, FederatedTensorDataset) else self._drawn()
        )
        for step, (begin, end) in enumerate(self.bounds):
            first = step * self.size
            yield [(first + offset, next(stream)) for offset in range(end - begin)]

    def _epochs(self) -> range:
        return range(self.first_epoch, self.first_epoch + self.epochs_used)

    def _resident(self) -> Iterator[Any]:
        assert isinstance(self.data, FederatedTensorDataset)
        shuffle = self.data.shuffle and not self.limits.overfit and not self.whole
        used = sum(self._cuts)
        at = torch.arange(used, device=self.data.device)
        for epoch in self._epochs():
            if shuffle:
                at = self.orders.of(self.client, epoch)[:used]
            mine = self.data.indices[self.client].index_select(0, at).split_with_sizes(self._cuts)
            batches = gathered(self.data, mine)
            if self._features is None:
                yield from batches
                continue
            features = (self._features.index_select(0, some) for some in at.split(self._cuts))
            yield from map(Featured, zip(batches, features, strict=True))

    def _drawn(self) -> Iterator[Any]:
        assert not isinstance(self.data, FederatedTensorDataset)
        loader = self.data.loaders[self.client]
        client = self.data.names[self.client]
        for epoch in self._epochs():
            key = self.orders.key(self.client, epoch)
            for batch in fetch(loader, key, self.per_epoch, client):
                yield _move(batch, self.device)


def count_ready_batches(data: FederatedDataset) -> FederatedDataset:
    """Count the samples in batches that the datasets make, by reading an epoch of them once.

    A loader with ``batch_size=None`` says only how many batches it has, and weights of clients are
    numbers of samples.

    Args:
        data: The training data; returned as it is without such loaders.

    Raises:
        ClientError: If reading a batch fails.
    """
    if isinstance(data, FederatedTensorDataset):
        return data
    ready = [client for client, loader in enumerate(data.loaders) if loader.batch_sampler is None]
    if not ready:
        return data
    samples = data.num_samples.clone()
    for client in ready:
        loader = data.loaders[client]
        batches = fetch(loader, derive(0, "count", client), len(loader), data.names[client])
        samples[client] = sum(map(batch_length, batches))
    return FederatedLoaders(data.loaders, data.names if data.named else None, samples)


def fetch(loader: DataLoader[Any], key: int, count: int, client: str) -> Iterator[Any]:
    """Iterate over the first batches of an epoch of a user's DataLoader.

    Shuffling and random transforms use the global generators, which are seeded for each batch, so
    that samples don't depend on other code.

    Args:
        loader: The client's loader.
        key: The key of the epoch's order.
        count: Number of batches, at most the loader's length.
        client: The client's name.

    Raises:
        ClientError: If reading a batch fails, or the loader has fewer batches than its length.
    """
    iterator: Any = None
    epoch = row_epoch(loader, count)
    for within in range(count):
        if epoch is not None and (batch := epoch.gathered()) is not None:
            yield batch
            continue
        everything = epoch is None or not epoch.rows.hold()
        with seeded(derive(key, "fetch", within), everything):
            # Not `iterator or ...`: the truth of an iterator may be its length, or undefined.
            if iterator is None:
                reseed(loader, key)
                iterator = iter(loader) if epoch is None else epoch
            try:
                batch = next(iterator)
            except StopIteration:
                raise ClientError(
                    "reading a batch",
                    [client],
                    None,
                    f"Expected the DataLoader to give {len(loader)} batches, as its length says, "
                    f"but got {within}. Correct the `__len__` of its dataset or sampler.",
                ) from None
            except torch.OutOfMemoryError:  # it isn't about one client
                raise
            # A data set may raise anything, and a worker process may be killed.
            except Exception as cause:
                last = (str(cause).strip().splitlines() or [""])[-1]
                kind = type(cause).__name__
                text = last if last.startswith(kind) else f"{kind}: {last}"
                raise ClientError("reading a batch", [client], None, text) from cause
        yield batch


def gathered(data: FederatedTensorDataset, positions: Iterable[Tensor]) -> Iterator[Any]:
    """Gather minibatches, as many small ones at once as the cache holds.

    Each is a view of its own rows then, to which a step may write, and begins where new memory
    might: products round by that, and must not by which other minibatches there are.

    Args:
        data: The dataset.
        positions: Positions of each minibatch's samples.
    """
    rows = _rows_to_begin(data)
    # A transform gets minibatches as they are.
    most = fitting_samples(data, IMAGES, MOST, MOST) if data.transform is None else 0
    some: list[Tensor] = []
    samples = 0
    for mine in positions:
        if some and samples + mine.numel() > most:
            yield from _together(data, some, rows)
            some, samples = [], 0
        some.append(mine)
        samples += mine.numel()
    if some:
        yield from _together(data, some, rows)


def _rows_to_begin(data: FederatedTensorDataset) -> int:
    """Return after how many samples all fields of products are where new memory may begin."""
    fields = [leaf for leaf in batch_leaves(data.fields) if leaf.is_floating_point()]
    sizes = [leaf.shape[1:].numel() * leaf.element_size() for leaf in fields if leaf.ndim > 1]
    return max((ALIGNED // math.gcd(ALIGNED, size) for size in sizes), default=1)


def _together(data: FederatedTensorDataset, positions: list[Tensor], rows: int) -> Iterator[Any]:
    if len(positions) == 1:
        yield data.gather(positions[0])
        return
    cuts = [mine.numel() for mine in positions]
    gaps = [-size % rows for size in cuts[:-1]] + [0]
    if gapped := any(gaps):
        any_sample = positions[0].new_zeros(rows)
        fillers = {gap: any_sample[:gap] for gap in {*gaps}}
        cuts = [size for pair in zip(cuts, gaps, strict=True) for size in pair]
        pairs = zip(positions, map(fillers.__getitem__, gaps), strict=True)
        positions = [part for pair in pairs for part in pair]
    batch = data.gather(torch.cat(positions))
    # Parts that autograd takes for tensors of their own, of which a step may change one.
    apart = torch.unsafe_split_with_sizes
    leaves = [apart(leaf, cuts)[:: 1 + gapped] for leaf in batch_leaves(batch)]
    parts = zip(*leaves, strict=True)
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        yield from parts  # the usual batches
        return
    for each in parts:
        yield _replaced(batch, iter(each))


def _replaced(batch: Any, leaves: Iterator[Tensor]) -> Any:
    return map_batch(batch, lambda _: next(leaves))


def _move(batch: Any, device: torch.device) -> Any:
    return apply_to_collection(batch, Tensor, lambda leaf: leaf.to(device))


def evaluation_minibatches(
    data: FederatedDataset, clients: Sequence[int], limits: Limits, settings: EngineSettings
) -> Iterator[Iterator[tuple[int, Any]]]:
    """Iterate over clients, and once over each one's samples, unshuffled: (number, minibatch).

    Those of a client are to be taken before the next client's.
    """
    if isinstance(data, FederatedTensorDataset):
        size = data.batch_size
        numbers = [
            limits.of_epoch(epoch_minibatches(samples, size, data.drop_last))
            for samples in data.num_samples[list(clients)].tolist()
        ]
        stream = gathered(
            data,
            (
                mine[first : first + size]
                for client, number in zip(clients, numbers, strict=True)
                for mine in (data.indices[client],)
                for first in range(0, number * size, size)
            ),
        )
        for number in numbers:
            yield enumerate(islice(stream, number))
        return
    for client in clients:
        loader = data.loaders[client]
        key = derive(settings.seed, "evaluation order", client, 0)
        batches = fetch(loader, key, limits.of_epoch(len(loader)), data.names[client])
        yield enumerate(_move(batch, settings.device) for batch in batches)
