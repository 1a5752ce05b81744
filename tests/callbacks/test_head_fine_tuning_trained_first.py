"""A head that trains first, as in a test from a checkpoint, must not freeze what trains later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.callbacks import HeadFineTuning, NewClientAdaptation
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedAvg
from tests.callbacks.setting import Data, trainer


class Recurrent(L.LightningModule):
    """An LSTM, which only runs under ``vmap`` of the gradient, where unreached names are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        inputs, target = batch
        return nn.functional.cross_entropy(self.head(self.body(inputs)[0][:, -1]), target)

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.log("test_loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def data() -> FederatedTensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 5, 3, generator=generator)
    target = torch.randint(2, (20,), generator=generator)
    return FederatedTensorDataset((inputs, target), [range(8), range(8, 20)], batch_size=4)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_everything_trains_after_a_head_alone(engine: str, tmp_path: Path) -> None:
    run = trainer(FedAvg())
    run.fit(Recurrent(), data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    new = NewClientAdaptation((data(), data()), samples=[8], scope="all")
    again = trainer(FedAvg(), HeadFineTuning(steps=1), new, engine=engine)
    again.test(Recurrent(), datamodule=Data(data()), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    start, models = again.strategy.global_state_dict(), new.results[0].models
    for name, leaf in start.items():
        assert all(not torch.equal(row, leaf) for row in models[name]), f"{name} didn't train"
