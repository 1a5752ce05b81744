"""Data sets of users whose samples are rows of their tensors, gathered for a minibatch at once.

To get each sample by itself and stack them takes as long as a small step. Where the code by which
a data set gets a sample is known (``known_code.py``), and a sample that it has got is made of the
rows of its tensors at that position, these rows make the sample whenever it is asked for, whatever
they hold by then.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lightning_pfl.engine.known_code import Read, UnknownCodeError, is_still, read_by_item
from lightning_pfl.engine.safety.global_rng import Elsewhere, States

SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw from torch's generators alone."""
_ABSENT = object()


class Source:
    """Samples of a data set, which may be that of many clients, as far as they are known.

    Args:
        dataset: The data set.

    Attributes:
        differs: Whether it was found that samples aren't rows, or may not be any more.

    Raises:
        UnknownCodeError: If the code by which it gets a sample isn't known.
    """

    def __init__(self, dataset: Any) -> None:
        self._read: Read = {}
        held = vars(dataset)
        if type(dataset) is TensorDataset:
            names, found = frozenset({"tensors"}), dict[Any, Any](enumerate(dataset.tensors))
        else:
            self._read, names = read_by_item(dataset)
            found = {name: value for name, value in held.items() if name in names}
        self._kind, self._held = type(dataset), [(n, held.get(n, _ABSENT)) for n in names]
        every = [one for one in found.values() if isinstance(one, Tensor)]
        self.differs = any(one.is_inference() for one in every)
        # By these, code may choose rows.
        self._versions = [(one, one._version) for one in every if not self.differs]
        self._tensors = {name: _Tensor(one) for name, one in found.items() if _has_rows(one)}
        self._form: Any = None
        self._seen = bytearray(len(dataset))

    def holds(self, dataset: Any) -> bool:
        """Whether samples that were found to be rows still are; whatever these hold by now."""
        if not self.differs:
            now = vars(dataset)
            same = all(now.get(name, _ABSENT) is value for name, value in self._held)
            same = same and all(one._version == version for one, version in self._versions)
            same = same and type(dataset) is self._kind and is_still(self._read)
            self.differs = not same
        return not self.differs

    def gathered(self, positions: list[int]) -> Any:
        """Return a minibatch of samples that were found to be rows; None if one wasn't."""
        seen = self._seen
        try:
            known = (
                bool(positions) and min(positions) >= 0 and all(map(seen.__getitem__, positions))
            )
        except (IndexError, TypeError):  # the data set has its own words
            return None
        return self._gathered(self._form, torch.tensor(positions)) if known else None

    def _gathered(self, form: Any, at: Tensor) -> Any:
        if type(form) is dict:
            return {key: self._gathered(part, at) for key, part in form.items()}
        if type(form) in (tuple, list):
            return [self._gathered(part, at) for part in form]  # as collated ones
        return self._tensors[form].tensor.index_select(0, at)

    def note(self, positions: list[int], samples: list[Any]) -> None:
        """Note whether samples are rows."""
        if self._form is None and samples:
            self._form = self._find(positions[0], samples[0])
        self.differs = not self._are_rows(self._form, positions, samples)
        for position in positions if not self.differs else ():
            self._seen[position] = 1

    def _find(self, position: int, sample: Any) -> Any:
        """Return a sample's structure with the names of the tensors of which it has rows."""
        if type(sample) is dict:
            return {key: self._find(position, part) for key, part in sample.items()}
        if type(sample) in (tuple, list):
            return type(sample)(self._find(position, part) for part in sample)
        names = (name for name, one in self._tensors.items() if one.has(position, sample))
        return next(names, None)

    def _are_rows(self, form: Any, positions: list[int], samples: list[Any]) -> bool:
        """Whether samples have a structure, and the rows at their positions."""
        kind, parts = type(form), list[tuple[Any, Any]]()
        if kind is dict:
            parts = list(form.items())
            if not all(type(one) is dict and [*one] == [*form] for one in samples):
                return False
        elif kind in (tuple, list):
            parts = list(enumerate(form))
            if not all(type(one) is kind and len(one) == len(form) for one in samples):
                return False
        else:
            return form is not None and all(map(self._tensors[form].has, positions, samples))
        return all(self._are_rows(n, positions, [one[key] for one in samples]) for key, n in parts)


class Rows(Dataset[Any]):
    """The minibatches of a data set, for a DataLoader whose ``collate_fn`` does nothing.

    Args:
        dataset: The data set, or a ``Subset`` of it.

    Raises:
        UnknownCodeError: As :class:`Source` does.
    """

    def __init__(self, dataset: Any) -> None:
        self._whole, self._subsets = dataset, list[Subset[Any]]()
        while type(dataset) is Subset:
            self._subsets.append(dataset)
            dataset = dataset.dataset
        self.dataset = dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__dict__"):
            raise UnknownCodeError("it has no samples by position")
        try:
            if dataset not in _SOURCES:
                _SOURCES[dataset] = Source(dataset)
        except TypeError as error:  # it can't be a key
            raise UnknownCodeError(str(error)) from error
        self.source = _SOURCES[dataset]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._whole)

    def __getitem__(self, position: int) -> Any:
        """Return a sample."""
        return self._whole[position]

    def __getitems__(self, positions: list[int]) -> Any:
        """Return a minibatch."""
        for subset in self._subsets:
            positions = [subset.indices[position] for position in positions]
        found = self.source.gathered(positions) if self.hold() else None
        if found is not None:
            return found
        before, drawn = States(torch_alone=True), Elsewhere()
        samples = [self.dataset[position] for position in positions]
        before.compare(drawn)
        self.source.differs = self.source.differs or drawn.moved_torch
        if self.hold():
            self.source.note(positions, samples)
        return default_collate(samples)

    def hold(self) -> bool:
        """Whether samples that were found to be rows still are."""
        return self.source.holds(self.dataset)


_SOURCES: WeakKeyDictionary[Any, Source] = WeakKeyDictionary()


class _Tensor:
    """A tensor whose rows, stacked, are what ``index_select`` returns.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._shape, self._dtype = tensor, tensor.shape[1:], tensor.dtype
        self._first, self._step = tensor.data_ptr(), tensor.stride(0) * tensor.itemsize
        self._length = len(tensor)

    def has(self, position: int, part: Any) -> bool:
        """Whether a part of a sample is the row at a position, by its memory."""
        return (
            type(part) is Tensor
            and part.data_ptr() == self._first + position * self._step
            and part.dtype is self._dtype
            and part.shape == self._shape
            and part.is_contiguous()
            and position < self._length
        )


def _has_rows(value: Any) -> bool:
    """Whether a value is a tensor for :class:`_Tensor`."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_inference() or value.is_complex() or value.is_quantized)
        and not value.requires_grad
        and value.ndim > 0
        and value.numel() > 0
    )


class RowLoader:
    """A DataLoader with the minibatches of another one, whose samples may be rows.

    Args:
        loader: The other one, which is plain.

    Raises:
        UnknownCodeError: As :class:`Source` does.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.rows, batches = Rows(loader.dataset), loader.batch_sampler
        self.loader: DataLoader[Any] = DataLoader(
            self.rows, batch_sampler=batches, collate_fn=_as_it_is, generator=loader.generator
        )
        self._usual = type(batches) is BatchSampler and type(batches.sampler) in SAMPLERS

    def draws_elsewhere(self) -> bool:
        """Whether the next minibatch may draw from Python's or NumPy's generators."""
        return not (self._usual and self.rows.hold())


_LOADERS: WeakKeyDictionary[DataLoader[Any], RowLoader | None] = WeakKeyDictionary()


def row_loader(loader: DataLoader[Any]) -> RowLoader | None:
    """Return a loader of the same minibatches that may be faster; None if there is none."""
    if not _is_plain(loader):
        return None
    if loader not in _LOADERS:
        try:
            _LOADERS[loader] = RowLoader(loader)
        except UnknownCodeError:
            _LOADERS[loader] = None
    found = _LOADERS[loader]
    if found is None or found.loader.generator is not loader.generator:
        return None
    return found if found.rows.hold() else None


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader stacks the samples of a data set in this process, and does nothing else."""
    return (
        type(loader) is DataLoader
        and loader.collate_fn is default_collate
        and loader.batch_sampler is not None
        and not loader.num_workers
        and not loader.pin_memory
    )


def _as_it_is(batch: Any) -> Any:
    return batch
