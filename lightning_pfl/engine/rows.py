"""Data sets of users whose samples are rows of their tensors, gathered for a minibatch at once.

To get each sample by itself and stack them takes as long as a small step. Where the code by which
a data set gets a sample is known (``known_items.py``), and a sample that it has got is made of the
rows of its tensors at that position, these rows make the sample whenever it is asked for, whatever
they hold by then. Minibatches are such samples, stacked by ``default_collate`` or by a function of
the user's that does nothing else (``stacking.py``). Where code is known and makes other samples or
minibatches, they are read without the DataLoader, whose own steps take as long as small ones do,
and no generators are seeded but torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
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
)

from lightning_pfl.engine.known_code import Read, UnknownCodeError, is_still
from lightning_pfl.engine.known_items import read_by_item
from lightning_pfl.engine.safety.global_rng import Elsewhere, States
from lightning_pfl.engine.stacking import Stacking

SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw a whole epoch's positions at once, from torch's generators."""
_ABSENT = object()


class Source:
    """Samples of a data set, which may be that of many clients, as far as they are known.

    Args:
        dataset: The data set.

    Attributes:
        known: Whether the code by which it gets a sample, and what that reads, are what they were.
        differs: Whether it was found that samples aren't rows.
        form: A sample's structure with the names of the tensors of which it has rows, once known.
        stackings: Functions that make minibatches, as far as they are known.

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
        self.known, self.differs = True, any(one.is_inference() for one in every)
        # By these, code may choose rows.
        self._versions = [(one, one._version) for one in every if not self.differs]
        self._tensors = {name: _Tensor(one) for name, one in found.items() if _has_rows(one)}
        self.form: Any = None
        self.stackings: dict[Callable[[list[Any]], Any], Stacking] = {}
        self._seen = bytearray(max((len(one.tensor) for one in self._tensors.values()), default=0))

    def holds(self, dataset: Any) -> bool:
        """Whether samples are got by the code that was read, and from the same tensors.

        Samples that were found to be rows still are then, whatever these hold by now.
        """
        if self.known:
            now = vars(dataset)
            same = all(now.get(name, _ABSENT) is value for name, value in self._held)
            same = same and all(one._version == version for one, version in self._versions)
            same = same and type(dataset) is self._kind and is_still(self._read)
            self.known = same
        return self.known

    def gathered(self, positions: list[int], form: Any) -> Any:
        """Return a minibatch of samples that were found to be rows; None if one wasn't.

        Args:
            positions: The samples' positions.
            form: The minibatch's structure with the names of the tensors.
        """
        seen = self._seen
        try:
            known = (
                bool(positions) and min(positions) >= 0 and all(map(seen.__getitem__, positions))
            )
        except (IndexError, TypeError):  # the data set has its own words
            return None
        return self._gathered(form, torch.tensor(positions)) if known else None

    def _gathered(self, form: Any, at: Tensor) -> Any:
        if type(form) is dict:
            return {key: self._gathered(part, at) for key, part in form.items()}
        if type(form) in (tuple, list):
            return type(form)(self._gathered(part, at) for part in form)
        return self._tensors[form].tensor.index_select(0, at)

    def note(self, positions: list[int], samples: list[Any]) -> None:
        """Note whether samples are rows."""
        # A sampler's positions may be anything.
        if not all(type(at) is int and at < len(self._seen) for at in positions):
            self.differs = True
            return
        if self.form is None and samples:
            self.form = self._find(positions[0], samples[0])
        self.differs = not self._are_rows(self.form, positions, samples)
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


class Rows:
    """The minibatches of a data set.

    Args:
        dataset: The data set, or a ``Subset`` of it.
        collate: Makes minibatches of lists of samples.

    Raises:
        UnknownCodeError: As :class:`Source` and :class:`~lightning_pfl.engine.stacking.Stacking`.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._subsets = list[Subset[Any]]()
        while type(dataset) is Subset:
            self._subsets.append(dataset)
            dataset = dataset.dataset
        self._dataset = dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__dict__"):
            raise UnknownCodeError("it has no samples by position")
        try:
            if dataset not in _SOURCES:
                _SOURCES[dataset] = Source(dataset)
            self._source = _SOURCES[dataset]
            stackings = self._source.stackings
            if collate not in stackings:
                stackings[collate] = Stacking(collate)
        except TypeError as error:  # one can't be a key
            raise UnknownCodeError(str(error)) from error
        self._stacking = stackings[collate]

    def are_by(self, collate: Any) -> bool:
        """Whether a function makes the minibatches."""
        return collate is self._stacking.function

    def hold(self) -> bool:
        """Whether samples and minibatches are made by the code that was read."""
        return self._source.holds(self._dataset) and self._stacking.holds()

    def gathered(self, positions: list[int]) -> Any:
        """Return a minibatch of rows; None where it has to be read."""
        if self._source.differs or self._stacking.differs or not self.hold():
            return None
        form = self._stacking.form(len(positions))
        return None if form is None else self._source.gathered(self._inner(positions), form)

    def read(self, positions: list[int]) -> Any:
        """Return a minibatch as a DataLoader does, and note whether it is one of rows."""
        source, stacking = self._source, self._stacking
        positions = self._inner(positions)
        if source.differs or stacking.differs or not self.hold():
            return stacking.function([self._dataset[position] for position in positions])
        before, drawn = States(torch_alone=True), Elsewhere()
        samples = [self._dataset[position] for position in positions]
        before.compare(drawn)
        source.differs = drawn.moved_torch
        if self.hold() and not source.differs:
            source.note(positions, samples)
        if source.differs or not (samples and self.hold()):
            return stacking.function(samples)
        return stacking.note(samples, source.form)

    def _inner(self, positions: list[int]) -> list[int]:
        for subset in self._subsets:
            positions = [subset.indices[position] for position in positions]
        return positions


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


class Orders(Dataset[Any]):
    """The positions of an epoch's minibatches, drawn as a DataLoader draws them.

    Args:
        loader: The DataLoader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batches, self._count = loader.batch_sampler, 0
        self._loader: DataLoader[Any] = DataLoader(self, batch_sampler=self, collate_fn=_as_it_is)

    def draw(self, count: int, generator: torch.Generator | None) -> list[list[int]]:
        """Draw the positions of the first minibatches.

        Args:
            count: How many there are at most.
            generator: The DataLoader's.
        """
        self._count, self._loader.generator = count, generator
        found: list[list[int]] = next(iter(self._loader))
        return found

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Iterate over all minibatches at once."""
        yield list(islice(iter(self._batches or ()), self._count))

    def __getitems__(self, positions: list[list[int]]) -> list[list[int]]:
        """Return what is asked for."""
        return positions


class RowEpoch:
    """The minibatches of an epoch, in turn.

    Args:
        rows: The minibatches of the data set.
        orders: Draws positions.
        loader: The DataLoader, whose first minibatches they are.
        count: How many there are at most.
    """

    def __init__(self, rows: Rows, orders: Orders, loader: DataLoader[Any], count: int) -> None:
        self.rows, self._orders, self._loader, self._count = rows, orders, loader, count
        self._positions: list[list[int]] | None = None
        self._at = 0

    def gathered(self) -> Any:
        """Return the next minibatch if it is one of rows, for which nothing is drawn; else None."""
        if self._positions is None or self._at == len(self._positions):
            return None
        found = self.rows.gathered(self._positions[self._at])
        self._at += found is not None
        return found

    def __next__(self) -> Any:
        """Return the next minibatch."""
        if self._positions is None:
            self._positions = self._orders.draw(self._count, self._loader.generator)
        if (found := self.gathered()) is not None:
            return found
        if self._at == len(self._positions):
            raise StopIteration
        self._at += 1
        return self.rows.read(self._positions[self._at - 1])


_LOADERS: WeakKeyDictionary[DataLoader[Any], tuple[Rows, Orders] | None] = WeakKeyDictionary()


def row_epoch(loader: DataLoader[Any], count: int) -> RowEpoch | None:
    """Return the first minibatches of an epoch of a loader, if code that is known makes them."""
    if not _is_plain(loader):
        return None
    found = _LOADERS.get(loader)
    if loader not in _LOADERS or (found and not found[0].are_by(loader.collate_fn)):
        try:
            found = Rows(loader.dataset, loader.collate_fn), Orders(loader)
        except UnknownCodeError:
            found = None
        _LOADERS[loader] = found
    return RowEpoch(*found, loader, count) if found is not None and found[0].hold() else None


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads samples in this process, in an order drawn when an epoch begins."""
    return (
        type(loader) is DataLoader
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.batch_sampler.sampler) in SAMPLERS
        and not loader.num_workers
        and not loader.pin_memory
    )


def _as_it_is(batch: Any) -> Any:
    return batch
