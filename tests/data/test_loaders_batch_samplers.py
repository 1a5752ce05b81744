"""Loaders with a ``batch_sampler``: what they draw is counted, and its order is the client's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.data.loaders import as_loader, count_samples, reseed
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.rounds import assert_trees_equal, local_round
from tests.engine.nets import cnn, compare, image_clients

POOL = image_clients((40,))
DATA = TensorDataset(*POOL.gather(torch.arange(40)))


class Buckets:
    """Batches of a user's own, in an order of its own; no ``sampler``, no ``generator``."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng
        self.passes = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        batches = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
        order = [0, 1, 2]
        self.rng.shuffle(order)
        return iter([batches[k] for k in order])


def cut(sampler: Any, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last))


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (cut(SubsetRandomSampler(range(7))), 7),
        (cut(SubsetRandomSampler(range(7)), drop_last=True), 7),
        (cut(SequentialSampler(range(13))), 13),
        (cut(WeightedRandomSampler([1.0] * 40, 11)), 11),
        (cut(RandomSampler(DATA, num_samples=9)), 9),
        (DataLoader(DATA, batch_sampler=[[0, 1], [5], [2, 3, 4]]), 6),
        (DataLoader(DATA, batch_sampler=Buckets(random.Random(0))), 11),
        (DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler(range(7))), 7),
        (DataLoader(DATA, batch_size=4), 40),
        (DataLoader([(torch.zeros(3), 0)] * 5, batch_size=None), 5),  # type: ignore[arg-type]
    ],
)
def test_samples_of_an_epoch(loader: DataLoader[Any], samples: int) -> None:
    assert count_samples(loader) == samples


def test_counting_leaves_the_sampler_and_the_generators_alone() -> None:
    buckets = Buckets(random)
    state = random.getstate()
    count_samples(DataLoader(DATA, batch_sampler=buckets))
    assert buckets.passes == 0
    assert random.getstate() == state


def test_clients_weigh_what_their_batches_hold() -> None:
    """Two clients over one dataset with 2 and 14 of its samples: weights 1/8 and 7/8."""
    loaders = [cut(SubsetRandomSampler(range(2))), cut(SubsetRandomSampler(range(2, 16)))]
    outcome = local_round(FedAvg(), cnn(), FederatedLoaders(loaders))
    assert outcome.info.num_samples.tolist() == [2, 14]
    torch.testing.assert_close(
        outcome.info.weights, torch.tensor([1 / 8, 7 / 8]).to(outcome.info.weights)
    )


class Shuffled(Sampler[int]):
    """A sampler with a generator of its own under a name of its own."""

    def __init__(self, rng: Any) -> None:
        self.dice = rng

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        self.dice.shuffle(order)
        return iter(order)


def with_torch() -> DataLoader[Any]:
    return cut(SubsetRandomSampler(range(12), generator=torch.Generator().manual_seed(0)))


OWNERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "torch in the batches' sampler": with_torch,
    "numpy generator": lambda: cut(Shuffled(np.random.default_rng(0))),
    "numpy of another kind": lambda: cut(Shuffled(np.random.Generator(np.random.Philox(0)))),
    "numpy state": lambda: cut(Shuffled(np.random.RandomState(0))),
    "python": lambda: cut(Shuffled(random.Random(0))),
    "global numpy": lambda: cut(Shuffled(np.random)),
    "global python": lambda: cut(Shuffled(random)),
    "plain sampler": lambda: DataLoader(DATA, 4, sampler=Shuffled(random.Random(0))),
    "batches of its own": lambda: DataLoader(
        DATA,
        batch_sampler=Buckets(np.random.default_rng(0)),
    ),
}


@pytest.mark.parametrize("make", OWNERS.values(), ids=OWNERS)
def test_the_order_belongs_to_the_client_and_the_round(
    make: Callable[[], DataLoader[Any]],
) -> None:
    """Whatever was drawn before: by another engine, in another chunk, before a resume."""
    data = FederatedLoaders([make(), make()])
    expected = compare(lambda: cnn(norm=False), data, chunk_sizes=(None, 1))
    again = FederatedLoaders([make(), make()])
    for loader in again.loaders:
        list(loader)
    torch.manual_seed(2)
    outcome = local_round(FedAvg(local_epochs=2), cnn(norm=False), again, "sequential")
    assert_trees_equal(outcome.models, expected.models)


@pytest.mark.parametrize("combined", [False, True])
def test_keys_give_orders(combined: bool) -> None:
    class Numbers(Dataset[int]):
        def __getitem__(self, at: int) -> int:
            return at

        def __len__(self) -> int:
            return 12

    sampler = BatchSampler(Shuffled(np.random.default_rng(0)), 4, False)
    loader: Any = DataLoader(Numbers(), batch_sampler=sampler)
    if combined:
        other = DataLoader(Numbers(), batch_size=5)
        loader = as_loader(CombinedLoader({"a": loader, "b": other}, "max_size_cycle"))

    def order(key: int) -> list[int]:
        batches = list(reseed(loader, key))
        return torch.cat([batch["a"] for batch in batches] if combined else batches).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(2**62)) == list(range(12))
