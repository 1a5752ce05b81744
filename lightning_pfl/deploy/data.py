"""The numbers of the clients' samples, all that a server knows of a deployment's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_pfl.data.datasets import (
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
)
from lightning_pfl.deploy.packet import PacketError
from lightning_pfl.engine.steps import epoch_minibatches

SPLITS = ("train", "val", "test")
CLASSES = 10_000
"""Classes at most."""


@dataclass(frozen=True)
class Counts:
    """The numbers of one client's split.

    Args:
        samples: Samples.
        minibatches: Minibatches of an epoch.
        batch_size: Samples of a minibatch; 0 for a DataLoader of the node's own.
        drop_last: Whether a last minibatch that is too short is left out.
    """

    samples: int = 0
    minibatches: int = 0
    batch_size: int = 0
    drop_last: bool = False

    @classmethod
    def read(cls, found: Any, what: str, max_samples: int) -> Counts:
        """Read the numbers that a node has sent.

        Args:
            found: What arrived.
            what: Client and split, for the reason.
            max_samples: Samples at most.

        Raises:
            PacketError: If it is no such numbers, or if they are negative or too large.
        """
        names = asdict(cls()).keys()
        if not isinstance(found, dict) or found.keys() != names:
            raise PacketError(f"numbers of {what} aren't {', '.join(names)}")
        for name, value in found.items():
            kind = bool if name == "drop_last" else int
            if type(value) is not kind or not 0 <= value <= max_samples:
                raise PacketError(f"{name} of {what} is {value!r}, not within 0..{max_samples}")
        return cls(**found)


def count(data: FederatedDataset | None, row: int) -> Counts:
    """Count a client's samples and minibatches.

    Args:
        data: The split; None where there is none.
        row: The client's row.
    """
    if data is None:
        return Counts()
    samples = int(data.num_samples[row])
    if isinstance(data, FederatedTensorDataset):
        size, drop_last = data.batch_size, data.drop_last
        number = epoch_minibatches(samples, size, drop_last)
        # On the wire it is True or False; of any other rule the number of minibatches is enough.
        if drop_last == "single":
            return Counts(samples, number)
        return Counts(samples, number, size, drop_last)
    return Counts(samples, len(data.loaders[row]))


class _Elsewhere(Dataset[Any]):
    """Samples that are on a node."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("Expected no sample to be asked for, but it is on a client's node.")


class _Minibatches(Sampler[list[int]]):
    """Minibatches of which only the number is known."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return self.counts.minibatches

    def __iter__(self) -> Iterator[list[int]]:
        yield from (
            part.tolist()
            for part in torch.arange(self.counts.samples).tensor_split(self.counts.minibatches)
        )


def read_labels(found: Any, samples: int, what: str) -> list[int]:
    """Read how many training samples of each class a client has.

    Args:
        found: What arrived.
        samples: Its training samples.
        what: The client, for the reason.

    Raises:
        PacketError: If it is no such list, or if it isn't for all samples.
    """
    if not isinstance(found, list) or len(found) > CLASSES:
        raise PacketError(f"numbers of labels of {what} aren't a list of at most {CLASSES}")
    if not all(type(number) is int and number >= 0 for number in found) or sum(found) != samples:
        raise PacketError(f"numbers of labels of {what} aren't those of its {samples} samples")
    return found


def counted_dataset(
    names: Sequence[str], counts: Sequence[Counts], labels: Sequence[Sequence[int]] | None
) -> FederatedDataset:
    """Make a split without samples, of which a run can count minibatches and steps.

    Args:
        names: The federation's clients.
        counts: The numbers of each.
        labels: By client, the samples of each class; None if they are not needed.
    """
    sizes = {(c.batch_size, c.drop_last) for c in counts if c.samples}
    if len(sizes) <= 1 and 0 not in {size for size, _ in sizes}:
        size, drop_last = next(iter(sizes), (1, False))
        samples = [c.samples for c in counts]
        indices = torch.arange(sum(samples)).split(samples)
        fields = [torch.empty(sum(samples), 0)]
        if labels is not None:
            held = [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in labels]
            fields.append(torch.cat(held))
        return FederatedTensorDataset(
            tuple(fields), indices, names=names, batch_size=size, drop_last=drop_last
        )
    loaders: list[DataLoader[Any]] = [
        DataLoader(_Elsewhere(c.samples), batch_sampler=_Minibatches(c)) for c in counts
    ]
    return FederatedLoaders(loaders, names)


class CountedDataModule(L.LightningDataModule):
    """The server's data module: numbers in the place of data.

    Args:
        names: The federation's clients.
        counts: By client, the numbers of every split.
        labels: By client, its training samples of each class; empty if they are not needed.
        val_split: As for :class:`~lightning_pfl.FederatedDataModule`.
    """

    def __init__(
        self,
        names: Sequence[str],
        counts: Mapping[str, Mapping[str, Counts]],
        labels: Mapping[str, Sequence[int]],
        val_split: str,
    ) -> None:
        super().__init__()
        self.val_split = val_split
        held = {"train": [labels[name] for name in names]} if labels else {}
        self._splits = {
            split: counted_dataset(names, [counts[name][split] for name in names], held.get(split))
            for split in SPLITS
        }

    def train_dataloader(self) -> FederatedDataset:
        """Return the training split."""
        return self._splits["train"]

    def val_dataloader(self) -> FederatedDataset:
        """Return the validation split."""
        return self._splits["val"]

    def test_dataloader(self) -> FederatedDataset:
        """Return the test split."""
        return self._splits["test"]


def in_federation(
    data: FederatedDataset, names: Sequence[str], rows: Mapping[str, int]
) -> FederatedDataset:
    """Give a node's data the rows of the whole federation: other clients' rows are empty.

    The engines draw random numbers by a client's id, which is its row.

    Args:
        data: A split of this node.
        names: The federation's clients.
        rows: Rows of ``data`` of this node's clients, by name.
    """
    if isinstance(data, FederatedTensorDataset):
        nothing = torch.empty(0, dtype=torch.long)
        indices = [data.indices[rows[name]] if name in rows else nothing for name in names]
        return FederatedTensorDataset(
            data.fields,
            indices,
            names=names,
            batch_size=data.batch_size,
            shuffle=data.shuffle,
            drop_last=data.drop_last,
            transform=data.transform,
            augment=data.augment,
        )
    empty: DataLoader[Any] = DataLoader(_Elsewhere(0))
    loaders = [data.loaders[rows[name]] if name in rows else empty for name in names]
    counts = [data.num_samples[rows[name]] if name in rows else 0 for name in names]
    return FederatedLoaders(loaders, names, torch.tensor(counts))


class NodeDataModule(L.LightningDataModule):
    """A node's data as a part of the federation's.

    Args:
        splits: The splits, with the federation's rows.
    """

    def __init__(self, splits: Mapping[str, FederatedDataset]) -> None:
        super().__init__()
        self.splits = splits

    def train_dataloader(self) -> FederatedDataset:
        """Return the training split."""
        return self.splits["train"]

    def val_dataloader(self) -> FederatedDataset:
        """Return the validation split, or the training split: no fit here uses it."""
        return self.splits.get("val", self.splits["train"])
