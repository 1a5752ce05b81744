"""Device, precision and clients of a split's samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler

from lightning_pfl._lightning import call_batch_hook, connected, is_overridden, with_sampler
from lightning_pfl.data.datasets import (
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
    as_federated,
    map_batch,
)
from lightning_pfl.engine.base import BatchHooks
from lightning_pfl.federation.architectures import modules_by_name
from lightning_pfl.federation.hooks import BATCH_HOOKS
from lightning_pfl.federation.state import FederationState


class Then:
    """A composition of two functions, as a class that can be pickled for worker processes.

    Args:
        first: Called first; None for nothing.
        second: Called with the result.
    """

    def __init__(self, first: Callable[[Any], Any] | None, second: Callable[[Any], Any]) -> None:
        self.first, self.second = first, second

    def __call__(self, batch: Any) -> Any:
        """Apply both functions."""
        return self.second(batch if self.first is None else self.first(batch))


class ToDtype:
    """Converts a batch's floating-point tensors, as a class that can be pickled.

    Args:
        dtype: The type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, batch: Any) -> Any:
        """Convert a batch."""
        return map_batch(batch, self._convert)

    def _convert(self, leaf: Tensor) -> Tensor:
        return leaf.to(self.dtype) if leaf.is_floating_point() else leaf


def true_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype of modules and data with ``"64-true"``, ``"16-true"`` or ``"bf16-true"``."""
    if type(precision) not in (DoublePrecision, HalfPrecision):
        return None
    known = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}
    return known[str(precision.precision)]


def move_to_device(data: FederatedDataset, trainer: L.Trainer) -> FederatedDataset:
    """Move resident samples to the training device, and convert batches to its precision."""
    if isinstance(data, FederatedTensorDataset):
        data = data.to(trainer.strategy.root_device)
    dtype = true_dtype(trainer.precision_plugin)
    if dtype is None:
        return data
    if isinstance(data, FederatedTensorDataset):
        converted = copy.copy(data)
        converted.transform = Then(data.transform, ToDtype(dtype))
        return converted
    loaders = [copy.copy(loader) for loader in data.loaders]
    for loader in loaders:
        loader.collate_fn = Then(loader.collate_fn, ToDtype(dtype))
    names = data.names if data.named else None
    return FederatedLoaders(loaders, names, data.num_samples)


def placed(
    data: FederatedDataset, trainer: L.Trainer, federation: FederationState
) -> FederatedDataset:
    """Move samples to the training device, of this process's clients where processes split them.

    They stay where they are until it's known whose clients are whose.
    """
    if federation.splits_data and federation.ranks.size > 1 and not federation.knows_owners:
        return data
    return move_to_device(federation.own_part(data), trainer)


@dataclass(frozen=True)
class EvaluationSets:
    """The data sets of a split.

    Attributes:
        first: The clients' own; without clients where there are only central samples.
        further: Further sets of the clients by name, each with its place among all sets.
        central: Sets of one owner for the global model, likewise; named ``""`` where it is alone.
    """

    first: FederatedDataset
    further: Mapping[str, tuple[int, FederatedDataset]] = field(default_factory=dict)
    central: Mapping[str, tuple[int, FederatedDataset]] = field(default_factory=dict)

    @property
    def several(self) -> bool:
        """Whether steps get the number of a batch's set."""
        return len(self.further) + len(self.central) + bool(self.first.num_clients) > 1

    @classmethod
    def from_any(cls, source: Any, what: str) -> EvaluationSets:
        """Read what a user gives.

        Args:
            source: Clients, as for training; a DataLoader of central samples; or a dict of several
                such sets by name, of which the first has the clients' own.
            what: Name of the argument for error messages.

        Raises:
            TypeError: If it is something else.
            MisconfigurationException: If the first of several sets isn't the clients'.
        """
        if _is_loader(source):
            data = as_federated({what: source}, what=what)
            return cls(FederatedLoaders((), ()), central={"": (0, data)})
        kinds = (FederatedTensorDataset, FederatedLoaders, list, tuple, Mapping)
        if not isinstance(source, Mapping) or not any(
            isinstance(given, kinds) for given in source.values()
        ):
            return cls(as_federated(source, what=what))
        found: dict[bool, dict[str, tuple[int, FederatedDataset]]] = {False: {}, True: {}}
        for place, (name, given) in enumerate(source.items()):
            central = _is_loader(given)
            data = as_federated({name: given} if central else given, what=f"{what}[{name!r}]")
            found[central][str(name)] = (place, data)
        first, (place, own) = next(iter(found[False].items()))
        if place:
            raise MisconfigurationException(
                f"Expected the first of several sets in `{what}` to be the clients' own, as its "
                f"values have no prefix, but got {next(iter(source))!r}, a DataLoader of central "
                f"samples. Name {first!r} first."
            )
        del found[False][first]
        return cls(own, found[False], found[True])

    def each(
        self,
        change: Callable[[FederatedDataset], FederatedDataset],
        central: Callable[[FederatedDataset], FederatedDataset],
    ) -> EvaluationSets:
        """Change the clients' sets, and the central ones."""
        return EvaluationSets(
            change(self.first),
            {name: (place, change(data)) for name, (place, data) in self.further.items()},
            {name: (place, central(data)) for name, (place, data) in self.central.items()},
        )


def _is_loader(source: Any) -> bool:
    return isinstance(source, (DataLoader, CombinedLoader))


def in_order(data: FederatedDataset) -> FederatedDataset:
    """Replace the shuffling samplers of DataLoaders, so that results are in the order of samples.

    Data in memory are never shuffled outside of training. Samplers and DataLoaders of the user's
    own stay, and samplers that draw with replacement, which have no order.
    """
    if isinstance(data, FederatedTensorDataset):
        return data
    loaders = list(data.loaders)
    for client, loader in enumerate(loaders):
        sampler = loader.sampler
        if type(sampler) is SubsetRandomSampler:
            order: Sequence[int] = list(sampler.indices)
        elif type(sampler) is RandomSampler and not sampler.replacement:
            order = range(len(loader.dataset))  # type: ignore[arg-type]
        else:
            continue
        if type(loader) is DataLoader and type(loader.batch_sampler) in (BatchSampler, type(None)):
            loaders[client] = with_sampler(loader, order)
    return FederatedLoaders(loaders, data.names if data.named else None, data.num_samples)


def batch_hooks(trainer: L.Trainer) -> BatchHooks | None:
    """Make the function that passes a minibatch through Lightning's hooks; None without any.

    Samples may be on the device before.
    """
    owners = [connected(trainer).datamodule, *modules_by_name(trainer.lightning_module).values()]
    names = [
        name
        for name in BATCH_HOOKS
        if any(one is not None and is_overridden(name, one) for one in owners)
    ]
    device = trainer.strategy.root_device

    def run(module: L.LightningModule, batch: Any) -> Any:
        for name in names:
            where = (device,) if name == "transfer_batch_to_device" else ()
            batch = call_batch_hook(trainer, module, name, batch, *where, 0)
        return batch

    return run if names else None


def due_reload(trainer: L.Trainer) -> int:
    """Return the last round so far in which data were due to be loaded.

    These are every ``reload_dataloaders_every_n_epochs`` rounds from round 0, so that a resumed run
    loads data in the same rounds.
    """
    every = connected(trainer).reload_dataloaders_every_n_epochs
    return int(trainer.current_epoch) // every * every if every else int(trainer.current_epoch)


def align_clients(data: FederatedDataset, names: Sequence[str], what: str) -> tuple[Tensor, Tensor]:
    """Find the clients of a split in the federation.

    Args:
        data: The split.
        names: The federation's clients.
        what: Name of the split's argument for error messages.

    Returns:
        Rows of ``data`` with samples, and the ids of these clients, each int64 ``(clients,)``.

    Raises:
        ValueError: If the split has other clients. Named splits (a dict of loaders) are matched by
            name and may leave clients out; a list must have one for each client.
    """
    unnamed = not data.named
    if unnamed and data.num_clients != len(names):
        raise ValueError(
            f"Expected `{what}` to hold one DataLoader for each of the {len(names)} clients, but "
            f"got {data.num_clients}. Give one per client, or a dict by client name."
        )
    ids = {name: client for client, name in enumerate(names)}
    if not unnamed and (unknown := [name for name in data.names if name not in ids]):
        raise ValueError(
            f"Expected `{what}` to hold clients of the training data, but got {unknown[:5]}, not "
            f"in {list(names[:5])}{'...' if len(names) > 5 else ''}. Use the same names; "
            "new clients need NewClientAdaptation beside some of these, or "
            "`load_clients(path, module, method).adapt(loader)`."
        )
    rows = data.num_samples.nonzero().flatten()
    clients = torch.tensor(
        [row if unnamed else ids[data.names[row]] for row in rows.tolist()], dtype=torch.int64
    )
    return rows, clients


def by_client(data: FederatedDataset, names: Sequence[str], what: str) -> FederatedDataset:
    """Give a split a row for each client of the federation, empty where it has none.

    Args:
        data: The split.
        names: The federation's clients.
        what: Name of the split's argument for error messages.

    Raises:
        ValueError: If the split has other clients; see :func:`align_clients`.
    """
    rows, clients = align_clients(data, names, what)
    found = dict(zip(clients.tolist(), rows.tolist(), strict=True))
    if isinstance(data, FederatedTensorDataset):
        return data.arranged([found.get(client) for client in range(len(names))], names)
    empty: DataLoader[Any] = DataLoader([])  # type: ignore[arg-type]
    loaders = [data.loaders[found[k]] if k in found else empty for k in range(len(names))]
    counts = [data.num_samples[found[k]] if k in found else 0 for k in range(len(names))]
    return FederatedLoaders(loaders, names, torch.tensor(counts))
