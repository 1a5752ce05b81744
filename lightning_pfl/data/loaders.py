"""Checks and counts of users' DataLoaders, and the tensors of plain ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from lightning_pfl.core.randomness import seeded


class SideBySide(IterableDataset[Any]):
    """The batches of a ``CombinedLoader``, for a DataLoader with ``batch_size=None``.

    Args:
        combined: The loader, in a mode that combines batches of all its DataLoaders.
    """

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined

    def __len__(self) -> int:
        """Return the number of batches, which the loader itself knows only while it runs."""
        longest = self.combined._mode != "min_size"
        lengths = [len(loader) for loader in self.combined.flattened]
        return max(lengths) if longest else min(lengths)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches; an exhausted DataLoader gives None in mode ``max_size``."""
        return (batch for batch, _, _ in self.combined)


def as_loader(loader: Any) -> Any:
    """Make a ``CombinedLoader`` a DataLoader; return anything else as it is."""
    if isinstance(loader, CombinedLoader) and loader._mode != "sequential":
        return DataLoader(SideBySide(loader), batch_size=None, collate_fn=_as_it_is)
    return loader


def _as_it_is(batch: Any) -> Any:
    return batch


_NO_GENERATORS = (int, float, bool, str, type(None), list, dict, FunctionType)


def reseed(loader: DataLoader[Any], key: int) -> DataLoader[Any]:
    """Seed the torch, NumPy and Python generators of a loader and its samplers by a key."""
    for owner in _samplers(loader):
        for attribute in list(getattr(owner, "__dict__", {}).values()):
            if type(attribute) in _NO_GENERATORS:  # torch's generators are slow to ask for
                continue
            if isinstance(attribute, torch.Generator):
                attribute.manual_seed(key)
            elif isinstance(attribute, np.random.Generator):
                attribute.bit_generator.state = type(attribute.bit_generator)(key).state
            elif isinstance(attribute, np.random.RandomState):
                attribute.seed(key % 2**32)
            elif isinstance(attribute, random.Random):
                attribute.seed(key)
    return loader


def _samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over the loader, its samplers, and the samplers inside these."""
    yield loader
    if isinstance(loader.dataset, SideBySide):
        for part in loader.dataset.combined.flattened:
            yield from _samplers(part)
    for sampler in (loader.sampler, loader.batch_sampler):
        inner: Any = sampler
        while inner is not None:
            yield inner
            inner = getattr(inner, "sampler", None)


@dataclass(frozen=True)
class ResidentParts:
    """The tensors behind a list of plain DataLoaders.

    Attributes:
        fields: Pool of samples; a list, because that is what the default collate returns.
        indices: Positions in the pool, one long tensor per client.
        shuffle: Whether the loaders shuffle.
    """

    fields: list[Tensor]
    indices: list[Tensor]
    shuffle: bool


def loader_problem(loader: Any) -> str | None:
    """Describe why ``loader`` can't be a client's data, or return None if it can."""
    if isinstance(loader, CombinedLoader):
        return (
            "a CombinedLoader in mode 'sequential', whose batches come from one DataLoader after "
            "another. Use 'max_size_cycle', or torch.utils.data.ConcatDataset"
        )
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}. Wrap its data in torch.utils.data.DataLoader"
    try:
        len(loader)
        count_samples(loader)
    except TypeError:
        return (
            f"a DataLoader without length over {type(loader.dataset).__name__}. "
            "Give the dataset (or its sampler) a `__len__`, because aggregation weights are "
            "sample counts"
        )
    return None


def count_samples(loader: DataLoader[Any]) -> int:
    """Count the samples that one epoch of ``loader`` draws, before ``drop_last``.

    The sampler decides, not the dataset: clients often share one dataset and differ in a
    SubsetRandomSampler. A ``batch_sampler`` replaces the loader's own sampler.
    """
    if isinstance(loader.dataset, IterableDataset):
        return len(loader.dataset)  # type: ignore[arg-type]
    batches: Any = loader.batch_sampler
    if loader.batch_size is not None or batches is None:
        return len(loader.sampler)  # type: ignore[arg-type]
    if isinstance(batches, BatchSampler) and isinstance(batches.sampler, Sized):
        return len(batches.sampler)
    # Only iteration shows how many samples a user's own sampler draws.
    with seeded(0, everything=True):
        return sum(len(batch) for batch in copy.copy(batches))


def resident_parts(loaders: Sequence[DataLoader[Any]]) -> ResidentParts | None:
    """Return the tensors of the loaders, or None if one of them does more than index tensors.

    Datasets that several clients share are pooled once; different ones are concatenated.
    """
    if not all(_is_plain(loader) for loader in loaders):
        return None
    settings = {(loader.batch_size, loader.drop_last, _shuffles(loader)) for loader in loaders}
    if len(settings) != 1:
        return None
    found = [_tensors_and_positions(loader) for loader in loaders]
    datasets = {id(dataset): dataset for dataset, _ in found}
    parameter_splits = {
        tuple((leaf.dtype, leaf.device, leaf.shape[1:]) for leaf in dataset.tensors)
        for dataset in datasets.values()
    }
    if len(parameter_splits) != 1:
        return None
    starts, end = {}, 0
    for key, dataset in datasets.items():
        starts[key], end = end, end + len(dataset)
    indices = [positions + starts[id(dataset)] for dataset, positions in found]
    columns = zip(*(dataset.tensors for dataset in datasets.values()), strict=True)
    fields = [column[0] if len(column) == 1 else torch.cat(column) for column in columns]
    return ResidentParts(fields, indices, _shuffles(loaders[0]))


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the loader's batches are exactly rows of tensors, in a plain order."""
    dataset: Any = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    sampler: Any = loader.sampler
    if type(sampler) is SubsetRandomSampler:
        plain_order = True
    elif type(sampler) in (RandomSampler, SequentialSampler):
        plain_order = sampler.data_source is loader.dataset
    else:
        plain_order = False
    if type(sampler) is RandomSampler and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)  # type: ignore[arg-type]
    ):
        plain_order = False
    # Exact types: a subclass may change __getitem__ or __iter__.
    return (
        plain_order
        and type(loader) is DataLoader
        and type(dataset) is TensorDataset
        and loader.batch_size is not None
        and loader.collate_fn is default_collate
        and loader.worker_init_fn is None
    )


def _shuffles(loader: DataLoader[Any]) -> bool:
    return type(loader.sampler) is not SequentialSampler


def _tensors_and_positions(loader: DataLoader[Any]) -> tuple[TensorDataset, Tensor]:
    """Return the TensorDataset inside the Subsets, and the rows that the loader visits."""
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    if type(sampler) is SubsetRandomSampler:
        positions = torch.as_tensor(sampler.indices, dtype=torch.long)
    else:
        positions = torch.arange(len(dataset))
    while type(dataset) is Subset:
        positions = torch.as_tensor(dataset.indices, dtype=torch.long)[positions]
        dataset = dataset.dataset
    return dataset, positions
