"""The minibatches of one client, in sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.randomness import derive, permutation, seeded
from lightning_pfl.data.batch import batch_length
from lightning_pfl.data.datasets import FederatedDataset, FederatedLoaders, FederatedTensorDataset
from lightning_pfl.data.loaders import reseed
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.steps import (
    Budget,
    Limits,
    epoch_minibatches,
    joined,
    minibatches_per_epoch,
    order_key,
    samples_of_one_model,
    step_bounds,
    step_size,
)


class Featured(tuple[Any, Tensor]):
    """Samples of a minibatch, and their features by the backbone of the client's model."""


def samples_of(minibatch: Any) -> Any:
    """Return the samples of a minibatch, with or without features."""
    return minibatch[0] if isinstance(minibatch, Featured) else minibatch


class ClientMinibatches:
    """An iterator over the steps of a phase: each a list of (number, minibatch).

    Numbers are those of :class:`~lightning_pfl.engine.vectorized.ticks.Minibatch`.

    Args:
        data: The federated dataset.
        client: The client's id.
        budget: Length of the phase.
        limits: Accumulation and limits.
        settings: Device and seed.
        round: The communication round.
        stream: Name of the random stream.
        first_epoch: Number of the phase's first epoch within the round.
        join: Whether steps may have several minibatches as one, as they add up what they find of
            each sample.
    """

    def __init__(
        self,
        data: FederatedDataset,
        client: int,
        budget: Budget,
        limits: Limits,
        settings: EngineSettings,
        round: int,
        stream: str,
        first_epoch: int,
        join: bool = False,
    ) -> None:
        self.data, self.client, self.limits = data, client, limits
        self.device, self.seed = settings.device, settings.seed
        self.stream, self.round = stream, round
        self.first_epoch = first_epoch
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

    def key(self, epoch: int) -> int:
        """Return the key of an epoch's order."""
        epoch += self.first_epoch
        return order_key(self.seed, self.stream, self.round, self.client, epoch)

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        stream = (
            self._resident() if isinstance(self.data, FederatedTensorDataset) else self._drawn()
        )
        for step, (begin, end) in enumerate(self.bounds):
            first = step * self.size
            yield [(first + offset, next(stream)) for offset in range(end - begin)]

    def _resident(self) -> Iterator[Any]:
        assert isinstance(self.data, FederatedTensorDataset)
        shuffle = self.data.shuffle and not self.limits.overfit and not self.whole
        used = sum(self._cuts)
        for epoch in range(self.epochs_used):
            order = (
                permutation(self.samples, self.key(epoch))
                if shuffle
                else torch.arange(self.samples)
            )
            at = order.to(self.data.device)[:used]
            mine = self.data.indices[self.client][at].split(self._cuts)
            batches = map(self.data.gather, mine)
            if self._features is None:
                yield from batches
                continue
            features = (self._features.index_select(0, some) for some in at.split(self._cuts))
            yield from map(Featured, zip(batches, features, strict=True))

    def _drawn(self) -> Iterator[Any]:
        assert not isinstance(self.data, FederatedTensorDataset)
        loader = self.data.loaders[self.client]
        for epoch in range(self.epochs_used):
            client = self.data.names[self.client]
            for batch in fetch(loader, self.key(epoch), self.per_epoch, client):
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
    iterator: Iterator[Any] | None = None
    for within in range(count):
        with seeded(derive(key, "fetch", within), everything=True):
            # Not `iterator or ...`: the truth of an iterator may be its length, or undefined.
            if iterator is None:
                iterator = iter(reseed(loader, key))
            try:
                batch = next(iterator)
            except StopIteration:
                raise ClientError(
                    "reading a batch",
                    client,
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
                raise ClientError("reading a batch", client, None, text) from cause
        yield batch


def _move(batch: Any, device: torch.device) -> Any:
    return apply_to_collection(batch, Tensor, lambda leaf: leaf.to(device))


def evaluation_minibatches(
    data: FederatedDataset, client: int, limits: Limits, settings: EngineSettings
) -> Iterator[tuple[int, Any]]:
    """Iterate once over a client's samples, unshuffled: (number, minibatch)."""
    if isinstance(data, FederatedTensorDataset):
        batches = data.indices[client].split(data.batch_size)
        number = limits.of_epoch(
            epoch_minibatches(int(data.num_samples[client]), data.batch_size, data.drop_last)
        )
        yield from enumerate(map(data.gather, batches[:number]))
        return
    loader = data.loaders[client]
    key = derive(settings.seed, "evaluation order", client, 0)
    count = limits.of_epoch(len(loader))
    for within, batch in enumerate(fetch(loader, key, count, data.names[client])):
        yield within, _move(batch, settings.device)
