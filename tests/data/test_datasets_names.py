"""Which client of the federation a split's clients are."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.data import FederatedLoaders
from lightning_pfl.data.datasets import as_federated
from lightning_pfl.trainer.data import align_clients, move_to_device
from tests.trainer.setting import points


def loader(rows: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(rows, 2)), batch_size=2)


@pytest.mark.parametrize("collate", [None, list], ids=["in memory", "as loaders"])
def test_names_that_look_like_positions_are_names(collate: Any) -> None:
    """Client "1" has 3 samples in the split, client "0" has 2; the federation's order is 1, 0."""
    loaders = {0: loader(2), 1: loader(3)}
    for one in loaders.values():
        one.collate_fn = collate or one.collate_fn
    data = as_federated(loaders, what="val_dataloaders")
    assert isinstance(data, FederatedLoaders) == (collate is not None)
    double = L.Trainer(precision="64-true", accelerator="cpu", logger=False)
    for split in (data, move_to_device(data, double)):
        rows, clients = align_clients(split, ["1", "0"], "val_dataloaders")
        assert dict(zip(clients.tolist(), split.num_samples[rows].tolist(), strict=True)) == {
            0: 3,
            1: 2,
        }
    unknown = as_federated({0: loader(1), 2: loader(1)}, what="val_dataloaders")
    with pytest.raises(ValueError, match=r"clients of the training data, but got \['2'\]"):
        align_clients(unknown, ["0", "1"], "val_dataloaders")


def test_some_clients_of_a_numbered_split_keep_their_numbers() -> None:
    for some in (points().subset([2, 0]), FederatedLoaders([loader(1)] * 4).subset([2, 0])):
        assert align_clients(some, list("0123"), "val_dataloaders")[1].tolist() == [2, 0]
    first = points().subset([0, 1])
    assert align_clients(first, list("0123"), "val_dataloaders")[1].tolist() == [0, 1]


@pytest.mark.parametrize("collate", [None, list], ids=["in memory", "as loaders"])
def test_a_list_goes_by_position(collate: Any) -> None:
    loaders = [loader(2), loader(3)]
    for one in loaders:
        one.collate_fn = collate or one.collate_fn
    data = as_federated(loaders, what="val_dataloaders")
    assert align_clients(data, ["1", "0"], "val_dataloaders")[1].tolist() == [0, 1]
