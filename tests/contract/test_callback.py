"""Methods, monitors and own callbacks in a run that isn't federated: they would hear of nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import FederatedCallback, callbacks, methods
from lightning_pfl.inspect import ClientHistogram
from lightning_pfl.testing import QuadraticModule
from lightning_pfl.testing.fitting import QUIET


class Hears(FederatedCallback):
    """A user's callback."""


def made(name: str) -> FederatedCallback:
    arguments: dict[str, Any] = {"NewClientAdaptation": {"samples": [1]}}
    callback: FederatedCallback = getattr(callbacks, name)(**arguments.get(name, {}))
    return callback


CASES: list[tuple[str, Callable[[], FederatedCallback]]] = [
    ("FedAvg", methods.FedAvg),
    ("FedMAP", methods.FedMAP),
    ("Hears", Hears),
    *((name, lambda name=name: made(name)) for name in callbacks.__all__),
]


def pairs() -> DataLoader[Any]:
    ones = torch.ones(4, dtype=torch.float64)
    return DataLoader(TensorDataset(ones, ones.unsqueeze(1)), batch_size=2)


def trainer(callback: FederatedCallback) -> L.Trainer:
    return L.Trainer(max_epochs=1, callbacks=[callback], **QUIET)


@pytest.mark.parametrize(("name", "make"), CASES, ids=[name for name, _ in CASES])
def test_a_callback_of_rounds_is_refused_without_the_strategy(
    name: str, make: Callable[[], FederatedCallback]
) -> None:
    expected = f"Expected a federated run, but {name} is used with SingleDeviceStrategy. Pass"
    with pytest.raises(MisconfigurationException, match=expected):
        trainer(make()).fit(QuadraticModule(), pairs(), pairs())


def test_it_is_refused_in_a_test_too() -> None:
    with pytest.raises(MisconfigurationException, match="Expected a federated run, but Client"):
        trainer(ClientHistogram()).test(QuadraticModule(), pairs(), verbose=False)
