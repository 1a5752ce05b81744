"""Nested subsets of each client's samples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from lightning_pfl.core.randomness import derive, permutation, seeded
from lightning_pfl.data.datasets import FederatedDataset, FederatedLoaders, FederatedTensorDataset
from lightning_pfl.data.loaders import reseed


def take_samples(data: FederatedDataset, samples: int, seed: int) -> FederatedDataset:
    """Keep the first samples of a seeded shuffle of each client's samples.

    Args:
        data: All samples.
        samples: Number of samples to keep; a client with fewer keeps all of them.
        seed: Seed of the shuffle; with one seed, fewer samples are the beginning of more.

    Raises:
        TypeError: If a client's DataLoader doesn't batch samples by number.
    """
    if isinstance(data, FederatedTensorDataset):
        return data.take(samples, seed)
    loaders = [
        _shorten(loader, name, samples, derive(seed, "samples", client))
        for client, (name, loader) in enumerate(zip(data.names, data.loaders, strict=True))
    ]
    return FederatedLoaders(loaders, data.names)


def _shorten(loader: DataLoader[Any], name: str, samples: int, key: int) -> DataLoader[Any]:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_size is None:
        raise TypeError(
            "Expected the DataLoaders of new clients to have a map-style dataset and a "
            f"`batch_size`, but that of client {name!r} has a {type(dataset).__name__} and "
            f"batch_size={loader.batch_size!r}. Use a dataset with `__getitem__`, and no "
            "`batch_sampler`."
        )
    # The sampler defines the client's samples, as clients often share one dataset.
    with seeded(key, everything=True):
        mine = sorted(reseed(loader, key).sampler)
    chosen = [mine[position] for position in permutation(len(mine), key)[:samples].tolist()]
    # A loader refuses to shuffle a dataset without samples.
    shuffle = not isinstance(loader.sampler, SequentialSampler) and bool(chosen)
    return DataLoader(
        Subset(dataset, chosen),
        batch_size=loader.batch_size,
        shuffle=shuffle,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
    )
