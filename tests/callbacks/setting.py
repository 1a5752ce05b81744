"""Federations for the tests of callbacks.

In the quadratic federation client k has n_k equal samples (a_k, c_k), and the model is the sum of
``backbone.weight`` v and ``head.weight`` h. A step on the head alone maps h to
(c - v) + (1 - lr a) (h - (c - v)), with v frozen.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_pfl import FederatedStrategy, PersonalizedModule
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import quadratic_clients
from lightning_pfl.testing.fitting import QUIET
from tests.methods.split_quadratic import SplitQuadraticModule

LR = 0.1
CURVATURES = torch.tensor([1.0, 3.0, 2.0, 0.5], dtype=torch.float64)
CENTERS = torch.tensor([0.0, 1.0, -2.0, 4.0], dtype=torch.float64)
SIZES = (4, 1, 3, 5)
BATCH = 2


def quadratics(samples: Any = SIZES, **kwargs: Any) -> FederatedTensorDataset:
    return quadratic_clients(CURVATURES, CENTERS, samples, BATCH, **kwargs)


def steps_of(samples: int) -> int:
    """Minibatches in an epoch."""
    return -(-samples // BATCH)


def loss_at(point: Tensor, client: int) -> float:
    return float(CURVATURES[client] / 2 * (point - CENTERS[client]).square().sum())


class Data(L.LightningDataModule):
    """Each split as it is given."""

    def __init__(self, train: Any, val: Any = None, test: Any = None) -> None:
        super().__init__()
        self.train, self.val, self.test = train, val or train, test or val or train

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return self.val

    def test_dataloader(self) -> Any:
        return self.test


def split(**kwargs: Any) -> SplitQuadraticModule:
    return SplitQuadraticModule(lr=LR, backbone=0.5, head=-0.25, **kwargs)


def network(seed: int = 0, backbone: nn.Module | None = None, **kwargs: Any) -> PersonalizedModule:
    """A small network in two halves, with BatchNorm; double precision."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        body = backbone or nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **kwargs}
        return PersonalizedModule(body, nn.Linear(8, 3), **settings).double()


def classes(clients: int = 5, shuffle: bool = False) -> tuple[Any, Any]:
    """Training and held-out data of a three-class problem, of unequal sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * 20, 6, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
    train = [list(range(k * 20, k * 20 + 14 - 2 * k)) for k in range(clients)]
    held_out = [list(range(k * 20 + 14, k * 20 + 20)) for k in range(clients)]
    return (
        FederatedTensorDataset((x, y), train, batch_size=4, shuffle=shuffle),
        FederatedTensorDataset((x, y), held_out, batch_size=4),
    )


def trainer(method: Method, *callbacks: Any, **kwargs: Any) -> Any:
    """A quiet Trainer; settings of the strategy are told from flags by name."""
    names = ("participation", "seed", "engine", "chunk_size", "feature_cache")
    settings: dict[str, Any] = {"seed": 3, "engine": "sequential"}
    settings |= {name: kwargs.pop(name) for name in names if name in kwargs}
    flags: dict[str, Any] = {
        "max_epochs": 1,
        **QUIET,
        "num_sanity_val_steps": 0,
        **kwargs,
    }
    strategy = FederatedStrategy(method, **settings)
    return L.Trainer(strategy=strategy, callbacks=list(callbacks), **flags)
