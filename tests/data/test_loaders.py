"""What users pass as data: plain loaders become resident tensors, all others stay as they are."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
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

from lightning_pfl.data import (
    FederatedLoaders,
    FederatedTensorDataset,
    as_federated,
)

X, Y = torch.arange(30.0).reshape(10, 3), torch.arange(10)
DATA = TensorDataset(X, Y)


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * leaf[index] for leaf in self.tensors)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([1.0, 2.0])


class SizedStream(Stream):
    def __len__(self) -> int:
        return 2


def resident(source: Any) -> FederatedTensorDataset:
    data = as_federated(source, what="train_dataloaders")
    assert isinstance(data, FederatedTensorDataset)
    return data


def test_federated_data_pass_through() -> None:
    data = FederatedTensorDataset((X, Y), [[0], [1]])
    loaders = FederatedLoaders([DataLoader(DATA)])
    assert as_federated(data, what="x") is data
    assert as_federated(loaders, what="x") is loaders


def test_resident_batches_equal_the_loaders_batches() -> None:
    """Sequential loaders over different and nested datasets: same batches, in order."""
    other = TensorDataset(X[:4] + 100, Y[:4])
    loaders = [
        DataLoader(Subset(Subset(DATA, [9, 7, 5, 3, 1]), [4, 0, 2]), batch_size=2),
        DataLoader(other, batch_size=2),
        DataLoader(DATA, batch_size=2),
        DataLoader(Subset(DATA, []), batch_size=2),
    ]
    data = resident(loaders)
    assert (data.batch_size, data.shuffle, data.drop_last) == (2, False, False)
    for loader, row in zip(loaders, data.indices, strict=True):
        batches = list(loader)
        assert len(batches) == -(-len(row) // 2)
        for batch, positions in zip(batches, torch.split(row, 2) if len(row) else (), strict=True):
            ours = data.gather(positions)
            assert type(ours) is type(batch)
            assert all(torch.equal(a, b) for a, b in zip(ours, batch, strict=True))


def test_a_shared_dataset_is_pooled_once() -> None:
    data = resident([DataLoader(Subset(DATA, [0, 1])), DataLoader(Subset(DATA, [2]))])
    assert data.pool_size == 10
    assert data.fields[0] is X


def test_subset_samplers_over_one_dataset() -> None:
    loaders = {
        "b": DataLoader(DATA, batch_size=3, sampler=SubsetRandomSampler([4, 2])),
        "a": DataLoader(DATA, batch_size=3, sampler=SubsetRandomSampler([7])),
    }
    data = resident(loaders)
    assert data.names == ("b", "a")
    assert data.shuffle
    assert data.num_samples.tolist() == [2, 1]
    assert [sorted(row.tolist()) for row in data.indices] == [[2, 4], [7]]


def test_settings_are_taken_over() -> None:
    data = resident([DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True)])
    assert (data.batch_size, data.shuffle, data.drop_last) == (4, True, True)


STAYS: dict[str, Callable[[], list[DataLoader[Any]]]] = {
    "own __getitem__": lambda: [DataLoader(Doubled(X, Y))],
    "own collate": lambda: [DataLoader(DATA, collate_fn=lambda items: default_collate(items))],
    "worker_init_fn": lambda: [DataLoader(DATA, worker_init_fn=lambda worker: None)],
    "replacement": lambda: [DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True))],
    "fewer draws": lambda: [DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5))],
    "sampler over other data": lambda: [DataLoader(DATA, sampler=SequentialSampler(range(3)))],
    "weights": lambda: [DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10))],
    "list as sampler": lambda: [DataLoader(DATA, sampler=[3, 1])],
    "own batch sampler": lambda: [
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, False))
    ],
    "no batching": lambda: [DataLoader(DATA, batch_size=None)],
    "concatenation": lambda: [DataLoader(ConcatDataset([DATA, DATA]))],
    "stream with length": lambda: [DataLoader(SizedStream())],
    "batch sizes differ": lambda: [DataLoader(DATA, batch_size=2), DataLoader(DATA, batch_size=3)],
    "orders differ": lambda: [DataLoader(DATA, shuffle=True), DataLoader(DATA)],
    "types differ": lambda: [DataLoader(DATA), DataLoader(TensorDataset(X.double(), Y))],
    "shapes differ": lambda: [DataLoader(DATA), DataLoader(TensorDataset(X[:, :2], Y))],
    "one is not plain": lambda: [DataLoader(DATA), DataLoader(Doubled(X, Y))],
}


@pytest.mark.parametrize("case", STAYS)
def test_anything_beyond_plain_indexing_stays_loaders(case: str) -> None:
    loaders = STAYS[case]()
    data = as_federated(loaders, what="train_dataloaders")
    assert isinstance(data, FederatedLoaders)
    assert data.loaders == tuple(loaders)
    assert data.num_clients == len(loaders)


def test_loaders_count_what_their_samplers_draw() -> None:
    data = FederatedLoaders.from_any(
        {
            "all": DataLoader(Doubled(X, Y), batch_size=3),
            "subset": DataLoader(Doubled(X, Y), sampler=SubsetRandomSampler([1, 2, 3])),
            "stream": DataLoader(SizedStream()),
        }
    )
    assert data.names == ("all", "subset", "stream")
    assert data.num_samples.tolist() == [10, 3, 2]
    assert data.subset([2, 0]).names == ("stream", "all")


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "single loader": (DataLoader(DATA), TypeError, "`train_dataloaders` .* a single DataLoader"),
    "empty list": ([], ValueError, "at least one client, but got train_dataloaders=\\[\\]"),
    "empty dict": ({}, ValueError, "at least one client"),
    "a dataset": (DATA, TypeError, "one DataLoader per client .* but got train_dataloaders=<"),
    "None": (None, TypeError, "but got train_dataloaders=None"),
    "loaders in a row": (
        [CombinedLoader([DataLoader(DATA)], "sequential")],
        TypeError,
        "client '0' has a CombinedLoader in mode 'sequential', .* Use 'max_size_cycle'",
    ),
    "datasets in a list": ([DataLoader(DATA), DATA], TypeError, "client '1' has a TensorDataset"),
    "stream": ({"ward": DataLoader(Stream())}, TypeError, "client 'ward' has .* without length"),
    "no length": (
        [DataLoader(NoLength(), sampler=SubsetRandomSampler([1])), DataLoader(Stream())],
        TypeError,
        "client '1' has a DataLoader without length over Stream.*Give the dataset",
    ),
    "equal names": ({1: DataLoader(DATA), "1": DataLoader(DATA)}, ValueError, r"unique.*\['1'\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_are_refused(case: str) -> None:
    source, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        as_federated(source, what="train_dataloaders")
