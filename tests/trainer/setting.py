"""Small federations for the tests of the loop.

Client k of the quadratic federation has n_k copies of a point c_k and the loss (w - c_k)^2 / 2, so
that one step with rate lr maps w to c_k + (1 - lr) (w - c_k), and K steps to c_k + (1 - lr)^K (w -
c_k).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_pfl import FederatedStrategy, PersonalizedModule
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedAvg
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import QUIET

LR = 0.25
BATCH = 2
SIZES = (4, 6, 3, 5)
CENTRES = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0], [4.0, 4.0]], dtype=torch.float64)


class Quadratic(L.LightningModule):
    """The point w, pulled to the samples."""

    def __init__(self, lr: float = LR) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.lr = lr

    def loss(self, batch: Any) -> Tensor:
        x: Tensor = batch[0]
        return ((self.w - x) ** 2).sum(1).mean() / 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w - batch[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def points(
    sizes: tuple[int, ...] = SIZES, centres: Tensor = CENTRES, **kwargs: Any
) -> FederatedTensorDataset:
    """n_k copies of c_k for every client."""
    fields = (torch.repeat_interleave(centres, torch.tensor(sizes), dim=0),)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    indices = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    return FederatedTensorDataset(fields, indices, batch_size=BATCH, **kwargs)


def steps_of(size: int) -> int:
    """Minibatches in an epoch."""
    return -(-size // BATCH)


def trained(w: Tensor, client: int, steps: int | None = None, lr: float = LR) -> Tensor:
    """Where a client ends that starts at w."""
    steps = steps_of(SIZES[client]) if steps is None else steps
    return CENTRES[client] + (1 - lr) ** steps * (w - CENTRES[client])


def mean(rows: list[Tensor], weights: list[float]) -> Tensor:
    """Weighted mean."""
    share = torch.tensor(weights, dtype=torch.float64)
    return (torch.stack(rows) * (share / share.sum())[:, None]).sum(0)


def trainer(
    method: Method | None = None, strategy: FederatedStrategy | str | None = None, **kwargs: Any
) -> Any:
    """A quiet Trainer; Any, because its strategy is the federated one."""
    settings = {
        k: kwargs.pop(k)
        for k in ("participation", "seed", "engine", "max_update_norm", "chunk_size")
        if k in kwargs
    }
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        **QUIET,
        "strategy": strategy
        or FederatedStrategy(method or FedAvg(), **{"seed": 3, "engine": "sequential", **settings}),
    }
    return L.Trainer(**{**defaults, **kwargs})


def classes(
    clients: int = 5, seed: int = 0, **kwargs: Any
) -> tuple[FederatedTensorDataset, FederatedTensorDataset]:
    """Training and validation data of a three-class problem, of unequal sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(clients * 20, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    train = [list(range(k * 20, k * 20 + 14 - 2 * k)) for k in range(clients)]
    val = [list(range(k * 20 + 14, k * 20 + 20)) for k in range(clients)]
    return (
        FederatedTensorDataset((x, y), train, batch_size=4, shuffle=True, **kwargs),
        FederatedTensorDataset((x, y), val, batch_size=4, **kwargs),
    )


def network(
    seed: int = 0, kind: type[PersonalizedModule] = PersonalizedModule, **kwargs: Any
) -> Any:
    """A small network in two halves, with BatchNorm and dropout."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
    return kind(backbone, nn.Linear(8, 3), **{"lr": 0.1, "num_classes": 3, **kwargs})


class SaveInsideTheRound(Callback):
    """Writes a checkpoint between the validation and the end of the round."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)
