"""The first samples of new clients: of a shuffle of each client's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.callbacks.new_clients.samples import take_samples
from lightning_pfl.data import FederatedLoaders, FederatedTensorDataset

CLIENTS, EACH = 4, 20


def tensors() -> FederatedTensorDataset:
    numbers = torch.arange(CLIENTS * EACH)
    return FederatedTensorDataset((numbers, numbers), numbers.split(EACH), batch_size=5)


def loaders() -> FederatedLoaders:
    parts = torch.arange(CLIENTS * EACH).split(EACH)
    return FederatedLoaders([DataLoader(TensorDataset(part, part), batch_size=5) for part in parts])


def taken(data: Any, samples: int, seed: int = 0) -> list[list[int]]:
    """Which of its own samples each client keeps, from 0, in their order."""
    kept = take_samples(data, samples, seed)
    if isinstance(kept, FederatedTensorDataset):
        each = [index.tolist() for index in kept.indices]
    else:
        loaders: Any = kept
        each = [[int(n) for batch in loader for n in batch[0]] for loader in loaders.loaders]
    return [[number - client * EACH for number in mine] for client, mine in enumerate(each)]


@pytest.mark.parametrize("make", [tensors, loaders])
def test_each_client_has_a_shuffle_of_its_own(make: Any) -> None:
    found = taken(make(), 6)
    assert all(len(set(mine)) == 6 and set(mine) <= set(range(EACH)) for mine in found)
    assert len({tuple(sorted(mine)) for mine in found}) == CLIENTS


@pytest.mark.parametrize("make", [tensors, loaders])
def test_fewer_samples_are_the_beginning_of_more(make: Any) -> None:
    for few, many in zip(taken(make(), 3), taken(make(), 8), strict=True):
        assert many[:3] == few
    assert taken(make(), 8, seed=1) != taken(make(), 8)
