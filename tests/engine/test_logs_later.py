"""Tensors that a step changes after it has logged them: as Lightning, it logs what they were."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import FedAvg, FedMAP, LocalOnly
from lightning_pfl.testing.fitting import fit

SIZES = (8, 6, 3)
STEPS = [4, 3, 2]
ENGINES = ["reference", "sequential", "vectorized"]


class Changes(L.LightningModule):
    """Learns ``w`` by 1 a step, and logs it, a buffer and losses that it changes."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def losses(self, batch: Any, name: str) -> Tensor:
        loss: Tensor = batch[0].mean() - self.w
        self.log(f"{name}_w", self.w, batch_size=1)
        self.log(f"{name}_before", loss, batch_size=1)
        loss += 5.0
        self.log(f"{name}_after", loss, batch_size=1)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1.0
        self.log("count", self.count, batch_size=1)
        return self.losses(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def data() -> FederatedTensorDataset:
    x = torch.full((sum(SIZES),), 3.0)
    return FederatedTensorDataset((x,), torch.arange(sum(SIZES)).split(SIZES), batch_size=2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [LocalOnly, FedAvg, FedMAP])
def test_what_is_logged_stays_as_it_was(engine: str, method: Any) -> None:
    run = fit(method(), data(), Changes(), 1, engine, val_data=data())
    logged = {name: float(value) for name, value in run.metrics.items()}
    # In a client's step number i from 0, w is i and the buffer i + 1.
    w = sum((steps - 1) / 2 for steps in STEPS) / len(STEPS)
    assert logged["count"] == pytest.approx(w + 1)
    if method is not FedMAP:  # whose prior moves w, too
        assert logged["train_w"] == pytest.approx(w)
        assert logged["train_before"] == pytest.approx(3 - w)
    assert logged["train_before"] == pytest.approx(3 - logged["train_w"])
    for name in ("train", "val"):
        assert logged[f"{name}_after"] == pytest.approx(logged[f"{name}_before"] + 5)
