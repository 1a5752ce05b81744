"""Federated datasets: one split (train, val or test) of all clients.

``FederatedTensorDataset`` has all samples in one set of tensors and a list of sample positions for
each client; batches are gathers, on the device. ``FederatedLoaders`` has one DataLoader of the user
for each client. Both have ``num_clients``, ``names`` and ``num_samples``. The order of samples is a
function of (seed, round, client, epoch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import Self

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.transfer import send
from lightning_pfl.data.batch import Batch, batch_leaves, map_batch
from lightning_pfl.data.loaders import as_loader, count_samples, loader_problem, resident_parts
from lightning_pfl.data.positions import Positions, as_positions, not_here

__all__ = [
    "Batch",
    "FederatedDataset",
    "FederatedLoaders",
    "FederatedTensorDataset",
    "as_federated",
    "batch_leaves",
    "label_counts",
    "map_batch",
]


DropLast = bool | Literal["single"]
"""Which last batches of an epoch are left out: short ones, or those of a single sample."""


def check_drop_last(drop_last: DropLast, batch_size: int) -> None:
    """Raise ValueError unless ``drop_last`` is a bool, or ``"single"`` for batches of several."""
    if not (isinstance(drop_last, bool) or drop_last == "single"):
        raise ValueError(
            f"Expected `drop_last` to be True, False or 'single', but got {drop_last=}. Use "
            "'single' to leave out last batches of one sample."
        )
    if drop_last == "single" and batch_size == 1:
        raise ValueError(
            "Expected a `batch_size` of at least 2 for drop_last='single', but got batch_size=1, "
            "which makes only batches of one sample. Use a larger one."
        )


class FederatedTensorDataset:
    """One split's samples in one set of tensors, with the positions of each client's samples.

    Args:
        fields: Pytree of tensors, each ``(samples, ...)``: the pool that all clients index. A
            batch has the same structure, so ``(images, labels)`` gives ``(x, y)`` batches. Those
            that require gradients are detached, with a warning.
        indices: One integer tensor per client: positions in the pool, any length, may be empty.
            Clients may share positions.
        names: Client names, unique. ``None``: ``"0"``, ``"1"``, ...
        batch_size: Samples per batch, at least 1.
        shuffle: Whether an epoch visits a client's samples in a random order.
        drop_last: Whether an epoch leaves out a last batch with fewer than ``batch_size`` samples;
            ``"single"``: only one of a single sample, on which BatchNorm can't train.
        transform: Deterministic function of a batch that treats every sample alone, applied by
            `gather` on the device (for example uint8 pixels to normalised floats).
        augment: Random function of one client's batch, applied after ``transform`` and in training
            only. `gather` does not call it: the engine does, under keyed randomness.

    Attributes:
        indices: Positions of each client in the pool, a sequence of long tensors
            ``(num_samples[k],)``.
        num_samples: Samples per client, ``(num_clients,)`` long, always on the CPU.
        pool_size: Number of samples in the pool.
        held: Which clients' samples are here, bool ``(num_clients,)``; None for all. See `keep`.
        label_counts: Each client's samples by class, also of those that aren't here; None where
            they can be counted, by :func:`label_counts`.
        named: Whether names were given; clients are otherwise identified by position.

    Raises:
        ValueError: A field has another number of samples, a position is outside the pool, the
            names are not unique or not one per client, or ``batch_size`` is below 1.
        TypeError: A field is not a tensor or the positions are not integers.

    Example:
        >>> data = FederatedTensorDataset((torch.arange(4.0), torch.arange(4)), [[0, 2], [3]])
        >>> data.num_samples
        tensor([2, 1])
        >>> data.gather(data.indices[0])
        (tensor([0., 2.]), tensor([0, 2]))
    """

    def __init__(
        self,
        fields: Batch,
        indices: Sequence[Any],
        *,
        names: Sequence[str] | None = None,
        batch_size: int = 10,
        shuffle: bool = False,
        drop_last: DropLast = False,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(
                f"Expected `batch_size` to be an int of at least 1, but got {batch_size=}. "
                "Use a large number for full-batch steps."
            )
        check_drop_last(drop_last, batch_size)
        check_types(FederatedTensorDataset.__init__, {"shuffle": shuffle})
        _check_list("indices", indices, "a tensor of positions for each client")
        self.fields: Any = _detached(fields)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.transform = transform
        self.augment = augment
        self.pool_size = _pool_size(fields)
        rows = [as_positions(row, client) for client, row in enumerate(indices)]
        self.names, self.named = _as_names(names, len(rows)), names is not None
        self.num_samples = torch.tensor([len(row) for row in rows], dtype=torch.long)
        self.held: Tensor | None = None
        self.label_counts: Tensor | None = None
        device = next(batch_leaves(fields)).device
        # One flat tensor: moving 100,000 clients to a device is one copy.
        self._flat = send(torch.cat(rows or [torch.empty(0, dtype=torch.long)]), device)
        self.indices = Positions(self._flat, self.num_samples, self.names)
        self._check_range()

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.names)

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self._flat.device

    def __len__(self) -> int:
        return self.num_clients

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_clients={self.num_clients}, "
            f"num_samples={int(self.num_samples.sum())}, pool_size={self.pool_size}, "
            f"batch_size={self.batch_size}, shuffle={self.shuffle}, drop_last={self.drop_last!r})"
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the dataset with pool and positions on ``device`` (no copy if they are there)."""
        fields = map_batch(self.fields, lambda leaf: leaf.to(device))
        return self._replace(fields, self.indices, self.names, flat=self._flat.to(device))

    def gather(self, positions: Tensor) -> Any:
        """Collect samples and apply ``transform`` (but not ``augment``).

        Args:
            positions: Positions in the pool, a long tensor ``(...)`` of any shape and device.

        Returns:
            A batch with leaves ``(*positions.shape, ...)``.
        """
        shape = positions.shape
        flat = positions if len(shape) == 1 else positions.reshape(-1)
        flat = send(flat, self.device)
        batch = map_batch(self.fields, lambda leaf: leaf.index_select(0, flat))
        if self.transform is not None:
            batch = self.transform(batch)
        if len(shape) == 1:
            return batch
        return map_batch(batch, lambda leaf: leaf.reshape((*shape, *leaf.shape[1:])))

    def positions_of(self, clients: Tensor) -> Tensor:
        """Return the positions of some clients' samples, in their order.

        Args:
            clients: Clients, int64 ``(clients,)`` on the CPU.

        Returns:
            int64 ``(clients, longest)`` on the device of the pool; a client with fewer samples
            repeats one to fill up.

        Raises:
            RuntimeError: If another process has the samples of one of them.
        """
        sizes = self.sizes_here()
        self._require_here(clients)
        counts = sizes[clients].unsqueeze(1)
        first = (sizes.cumsum(0) - sizes)[clients].unsqueeze(1)
        within = torch.arange(int(counts.max()) if len(clients) else 0)
        # Also of a client without samples, which may be the last one.
        at = (first + within.minimum((counts - 1).clamp_min(0))).clamp_max(len(self._flat) - 1)
        return self._flat[send(at, self.device)]

    def keep(self, clients: Tensor) -> Self:
        """Copy the samples of some clients alone, for a process that reads no others.

        All clients stay, with their names and numbers of samples.

        Args:
            clients: Those whose samples are kept, int64 ``(some,)``.

        Returns:
            The dataset with a pool of these samples; to read other clients' samples is an error.

        Raises:
            RuntimeError: If another process has the samples of one of them.
        """
        held = self.num_samples == 0
        held[clients] = True
        self._require_here(clients)
        if self.held is not None and torch.equal(held, self.held):
            return self
        here = held.repeat_interleave(self.sizes_here()).to(self.device)
        used, flat = self._flat[here].unique(return_inverse=True)
        fields = map_batch(self.fields, lambda leaf: leaf.index_select(0, used))
        return self._replace(
            fields, self.indices, self.names, flat, held=held, label_counts=label_counts(self)
        )

    def some_positions(self, most: int) -> Tensor:
        """Return the positions of the first samples that are here, ``most`` of them or fewer."""
        return self._flat[:most]

    def sizes_here(self) -> Tensor:
        """Count each client's samples in this pool, int64 ``(num_clients,)``."""
        return self.num_samples if self.held is None else self.num_samples.where(self.held, 0)

    def _require_here(self, clients: Tensor) -> None:
        if self.held is not None and len(away := clients[~self.held[clients]]):
            raise not_here(self.names[int(away[0])])

    def subset(self, clients: Iterable[int]) -> Self:
        """Return the dataset of some clients, in the given order, over the same pool.

        Raises:
            IndexError: A client number is outside ``0 .. num_clients - 1``.
        """
        chosen = [int(client) for client in clients]
        for client in chosen:
            if not 0 <= client < self.num_clients:
                raise IndexError(
                    f"Expected `clients` to be numbers in 0..{self.num_clients - 1}, "
                    f"but got {client}. Choose among the dataset's {self.num_clients} clients."
                )
        rows = self.indices
        new = self._replace(
            self.fields, [rows[client] for client in chosen], [self.names[c] for c in chosen]
        )
        new.named = True  # positions no longer identify the clients
        return new

    def arranged(self, rows: Sequence[int | None], names: Sequence[str]) -> Self:
        """Arrange the clients anew.

        Args:
            rows: Which client comes where; None for a client without samples.
            names: Their names.
        """
        if list(rows) == list(range(self.num_clients)):
            return self._replace(self.fields, self.indices, names, flat=self._flat)
        nothing, at = self._flat[:0], torch.tensor([-1 if row is None else row for row in rows])
        held = self.num_samples >= 0 if self.held is None else self.held
        here = [row is not None and bool(held[row]) for row in rows]
        new = self._replace(
            self.fields,
            [nothing if row is None or not held[row] else self.indices[row] for row in rows],
            names,
        )
        if self.held is None:
            return new
        counts = self.label_counts
        return new._replace(
            self.fields,
            new.indices,
            names,
            new._flat,
            num_samples=torch.where(at < 0, 0, self.num_samples[at]),
            held=torch.tensor(here) | (at < 0),
            label_counts=None if counts is None else counts[at] * (at >= 0).unsqueeze(1),
        )

    def take(self, samples_per_client: int, seed: int) -> Self:
        """Keep the first samples of a seeded shuffle of each client's samples.

        With one seed a smaller take is the beginning of a larger one, so that comparisons by number
        of samples use nested sets. A client with fewer samples keeps all of them.

        Raises:
            ValueError: ``samples_per_client`` is negative.
        """
        if samples_per_client < 0:
            raise ValueError(
                "Expected `samples_per_client` to be non-negative, but got "
                f"{samples_per_client=}. Use 0 for clients without samples."
            )
        rows = []
        for client, row in enumerate(self.indices):
            order = np.random.default_rng((seed, client)).permutation(len(row))
            rows.append(row[torch.from_numpy(order[:samples_per_client]).to(row.device)])
        return self._replace(self.fields, rows, self.names)

    def resized(self, counts: Tensor) -> Self:
        """Give each client another number of samples: the first of its own, or all again and again.

        Args:
            counts: How many, int64 ``(clients,)``; 0 for a client that has none.
        """
        new = copy(self)
        rows = [self.indices[k] for k in counts.nonzero().flatten().tolist()]
        wanted = counts[counts > 0].tolist()
        new.num_samples, new.held, new.label_counts = counts, None, None
        new._flat = torch.cat(
            [
                self._flat[:0],
                *(row.repeat(-(-n // len(row)))[:n] for row, n in zip(rows, wanted, strict=True)),
            ]
        )
        new.indices = Positions(new._flat, counts, new.names)
        return new

    def _replace(
        self,
        fields: Batch,
        rows: Sequence[Tensor],
        names: Sequence[str],
        flat: Tensor | None = None,
        **facts: Tensor | None,
    ) -> Self:
        """Copy the settings to other samples, without repeating checks.

        Args:
            fields: The pool.
            rows: Positions of each client in it.
            names: The clients' names.
            flat: The positions of all clients that are here; None where ``rows`` are others.
            facts: Attributes that change: ``num_samples``, ``held``, ``label_counts``.
        """
        new: Self = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.fields, new.names, new.pool_size = fields, tuple(names), _pool_size(fields)
        if flat is None:
            new.num_samples = torch.tensor([len(row) for row in rows], dtype=torch.long)
            new.held = new.label_counts = None
            flat = torch.cat([*rows, self._flat[:0]])
        new.__dict__.update(facts)
        new._flat = flat
        new.indices = Positions(new._flat, new.sizes_here(), new.names, new.held)
        return new

    def _check_range(self) -> None:
        outside = (self._flat < 0) | (self._flat >= self.pool_size)
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            client = int((self.num_samples.cumsum(0) <= at).sum())
            raise ValueError(
                f"Expected `indices` to be positions in 0..{self.pool_size - 1}, but got "
                f"{int(self._flat[at])} for client {self.names[client]!r}. "
                "Give positions in the pool of samples."
            )


class FederatedLoaders:
    """One DataLoader per client, with its own sampler, collate function and random transforms.

    Args:
        loaders: One sized DataLoader per client.
        names: Client names, unique. ``None``: ``"0"``, ``"1"``, ...
        num_samples: Samples per client, where they are known.

    Attributes:
        num_samples: Samples that a client's loader draws per epoch, ``(num_clients,)``, on the CPU.
            A loader with ``batch_size=None`` counts its batches, until their samples are counted.
        named: Whether names were given; clients are otherwise identified by position.
    """

    def __init__(
        self,
        loaders: Sequence[DataLoader[Any]],
        names: Sequence[str] | None = None,
        num_samples: Tensor | None = None,
    ) -> None:
        _check_list("loaders", loaders, "a DataLoader for each client", DataLoader)
        self.loaders = tuple(loaders)
        self.names, self.named = _as_names(names, len(self.loaders)), names is not None
        if num_samples is None:
            num_samples = torch.tensor([count_samples(loader) for loader in self.loaders])
        if not isinstance(num_samples, Tensor) or num_samples.shape != (len(self.loaders),):
            raise TypeError(
                f"Expected `num_samples` to be a tensor ({len(self.loaders)},), but got "
                f"{num_samples=}. Leave it out to have the samples counted."
            )
        self.num_samples = num_samples.long()

    @classmethod
    def from_any(cls, loaders: Any, *, what: str = "loaders") -> FederatedLoaders:
        """Check a list or dict of DataLoaders and wrap it.

        Args:
            loaders: A list or tuple of DataLoaders, or a dict from client name to DataLoader. A
                client may have a ``CombinedLoader``.
            what: Name of the argument for error messages.

        Raises:
            TypeError: It is a single DataLoader, something else, or holds an unsized loader.
            ValueError: It is empty or two names are equal.
        """
        if isinstance(loaders, DataLoader):
            raise TypeError(
                f"Expected `{what}` to be one DataLoader per client (a list, or a dict by client "
                "name), but got a single DataLoader. Use FederatedDataModule, or pass a list with "
                "one DataLoader for each client."
            )
        if not isinstance(loaders, list | tuple | Mapping):
            raise TypeError(
                f"Expected `{what}` to be one DataLoader per client (a list, or a dict by client "
                f"name), but got {what}={loaders!r}. Pass a list of DataLoaders or a "
                "FederatedDataModule."
            )
        if len(loaders) == 0:
            raise ValueError(
                f"Expected `{what}` to hold at least one client, but got {what}={loaders!r}. "
                "Pass one DataLoader per client."
            )
        names = [str(key) for key in loaders] if isinstance(loaders, Mapping) else None
        items = list(map(as_loader, loaders.values() if isinstance(loaders, Mapping) else loaders))
        shown = names or [str(client) for client in range(len(items))]
        for name, loader in zip(shown, items, strict=True):
            if (problem := loader_problem(loader)) is not None:
                raise TypeError(
                    f"Expected `{what}` to hold one sized DataLoader per client, but client "
                    f"{name!r} has {problem}."
                )
        return cls(items, names)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.loaders)

    def __len__(self) -> int:
        return self.num_clients

    def __repr__(self) -> str:
        total = int(self.num_samples.sum())
        return f"{type(self).__name__}(num_clients={self.num_clients}, num_samples={total})"

    def subset(self, clients: Iterable[int]) -> FederatedLoaders:
        """Return the loaders of some clients, in the given order."""
        chosen = [int(client) for client in clients]
        return FederatedLoaders(
            [self.loaders[client] for client in chosen],
            [self.names[client] for client in chosen],
            self.num_samples[chosen],
        )


FederatedDataset = FederatedTensorDataset | FederatedLoaders


def as_federated(source: Any, *, what: str) -> FederatedDataset:
    """Convert a user's data to a federated dataset.

    Loaders that only index tensors (a ``TensorDataset`` or ``Subset`` of one, default collate,
    sequential, random or subset-random sampler without replacement, no ``worker_init_fn``, equal
    batch sizes) become a resident `FederatedTensorDataset` with the same batches. Their order then
    depends on the run's seed, even if a loader has its own ``generator``. All others become
    `FederatedLoaders`.

    Args:
        source: A federated dataset, a list or tuple of DataLoaders, or a dict from client name to
            DataLoader.
        what: Name of the argument for error messages, for example ``"train_dataloaders"``.

    Raises:
        TypeError: ``source`` is something else, or a loader has no length.
        ValueError: ``source`` is empty or two names are equal.
    """
    if isinstance(source, FederatedTensorDataset | FederatedLoaders):
        return source
    wrapped = FederatedLoaders.from_any(source, what=what)
    parts = resident_parts(wrapped.loaders)
    if parts is None:
        return wrapped
    first = wrapped.loaders[0]
    assert first.batch_size is not None  # resident_parts accepts only batching loaders
    return FederatedTensorDataset(
        parts.fields,
        parts.indices,
        names=wrapped.names if wrapped.named else None,
        batch_size=first.batch_size,
        shuffle=parts.shuffle,
        drop_last=first.drop_last,
    )


def label_counts(dataset: FederatedDataset) -> Tensor | None:
    """Count each client's samples by class, int64 ``(num_clients, classes)``, on the CPU.

    The classes are 0 to the largest label of the pool, whoever holds it. None where the samples
    aren't pairs with whole numbers from 0 as second entries, and for `FederatedLoaders`, whose
    batches are produced by user code.
    """
    if isinstance(dataset, FederatedLoaders) or not isinstance(dataset.fields, (tuple, list)):
        return None
    if dataset.held is not None:
        return dataset.label_counts
    labels = dataset.fields[1] if len(dataset.fields) > 1 else None
    if not isinstance(labels, Tensor) or labels.ndim != 1 or not len(labels):
        return None
    if labels.dtype == torch.bool or labels.is_floating_point() or int(labels.min()) < 0:
        return None
    classes = int(labels.max()) + 1
    held = labels[dataset._flat]
    owner = torch.arange(dataset.num_clients).repeat_interleave(dataset.num_samples)
    flat = owner * classes + held.cpu().long()
    return torch.bincount(flat, minlength=dataset.num_clients * classes).view(-1, classes)


def _detached(fields: Batch) -> Any:
    """Detach fields that require gradients: minibatches would share the graph that made them."""
    if not any(leaf.requires_grad for leaf in batch_leaves(fields)):
        return fields
    rank_zero_warn(
        "A field of samples has requires_grad=True, which no client's training changes. It is "
        "detached: pass `field.detach()`, or call `x.requires_grad_()` in a step that "
        "differentiates by its inputs."
    )
    return map_batch(fields, lambda leaf: leaf.detach())


def _pool_size(fields: Batch) -> int:
    sizes = {tuple(leaf.shape[:1]) for leaf in batch_leaves(fields)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            "Expected `fields` to be tensors with one common leading dimension (samples), but got "
            f"shapes {[tuple(leaf.shape) for leaf in batch_leaves(fields)]}. "
            "Stack one row per sample in every field."
        )
    return int(sizes.pop()[0])


def _as_names(names: Sequence[str] | None, num_clients: int) -> tuple[str, ...]:
    if names is None:
        return tuple(str(client) for client in range(num_clients))
    _check_list("names", names, "a name for each client")
    given = tuple(str(name) for name in names)
    if len(given) != num_clients:
        raise ValueError(
            f"Expected `names` to hold one name per client ({num_clients}), but got {len(given)}. "
            "Leave names out to number the clients."
        )
    twice = sorted(name for name, count in Counter(given).items() if count > 1)
    if twice:
        raise ValueError(
            f"Expected client names to be unique, but got {twice[:5]} more than once. "
            "Rename these clients."
        )
    return given


def _check_list(name: str, given: Any, what: str, kind: type = object) -> None:
    """Raise TypeError unless ``given`` is a list, or another sequence, of entries of a kind."""
    plain = isinstance(given, Iterable) and hasattr(given, "__len__")
    if not plain or isinstance(given, (str, bytes)) or getattr(given, "ndim", 1) == 0:
        found = repr(given)
    elif wrong := [entry for entry in given if not isinstance(entry, kind)]:
        found = f"an entry {wrong[0]!r}"
    else:
        return
    raise TypeError(f"Expected `{name}` to be a list with {what}, but got {found}. Give one each.")
