"""What Lightning's own `self.log` refuses, steps of clients can't log either."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import ClientModules, FederatedStrategy
from lightning_pfl.core.errors import ClientError
from lightning_pfl.methods import FedAvg, LocalOnly
from lightning_pfl.testing.fitting import QUIET, quiet

ENGINES = ["sequential", "vectorized", "reference", "auto"]
STAGES = ["fit", "validate", "test"]
X = torch.arange(1.0, 7.0).view(3, 2)


class Logging(L.LightningModule):
    """Logs the first ``shape`` of its weighted samples in one of its steps."""

    def __init__(self, stage: str, *shape: int, manual: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.head.weight, 0.5)
        self.stage, self.shape = stage, shape
        self.automatic_optimization = not manual

    def step(self, batch: Any, stage: str) -> Tensor:
        outputs: Tensor = self.head(batch[0])
        if stage == self.stage:
            found = outputs.view(-1)[: torch.Size(self.shape).numel()].view(self.shape)
            self.log("value", found, on_step=False, on_epoch=True)
        return outputs.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "fit")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "validate")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "predict")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def run(module: L.LightningModule, stage: str, engine: Any = None) -> L.Trainer:
    """Run a stage for two clients, or, without an engine, in plain Lightning."""
    loader = DataLoader(TensorDataset(X), len(X))
    with quiet():
        if engine is None:
            trainer = L.Trainer(max_epochs=1, **QUIET)
            getattr(trainer, stage)(module, loader)
        else:
            strategy = FederatedStrategy(FedAvg(), engine=engine)
            trainer = L.Trainer(max_epochs=1, strategy=strategy, **QUIET)
            getattr(trainer, stage)(module, [loader, loader])
    return trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*number of training batches.*")
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_plain_lightning_refuses(stage: str) -> None:
    match = "must have a single element" if stage != "predict" else "doesn't support logging"
    with pytest.raises((ValueError, MisconfigurationException), match=match):
        run(Logging(stage, 3), stage)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shape", [(3,), (3, 1), (0,)], ids=str)
def test_several_numbers(shape: tuple[int, ...], stage: str, engine: str) -> None:
    got = rf"but got a tensor of shape {re.escape(str(shape))}\. Log its `mean"
    match = rf"Expected self.log\('value', ...\) to log one number, {got}"
    with pytest.raises(ClientError, match=match) as caught:
        run(Logging(stage, *shape), stage, engine)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("engine", [None, *ENGINES])
def test_a_text_of_a_number(engine: str | None) -> None:
    class Text(Logging):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", "1.5")  # type: ignore[arg-type]

    match = "`str` values cannot be logged" if engine is None else r"log a number.*got a str\. Use"
    with pytest.raises(ValueError if engine is None else ClientError, match=match):
        run(Text("validate"), "validate", engine)


def test_several_numbers_in_the_loop_of_a_client() -> None:
    with pytest.raises(ClientError, match="to log one number"):
        run(Logging("fit", 3, manual=True), "fit", "auto")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_number_of_any_shape(shape: tuple[int, ...], stage: str, engine: str) -> None:
    """The first output is (1 + 2) / 2."""
    assert float(run(Logging(stage, *shape), stage, engine).callback_metrics["value"]) == 1.5


@pytest.mark.parametrize("engine", ENGINES)
def test_prediction(engine: str) -> None:
    with pytest.raises(MisconfigurationException, match="`predict` hook, but it doesn't support"):
        run(Logging("predict"), "predict", engine)


def test_prediction_of_several_architectures() -> None:
    module = ClientModules({"a": Logging("predict"), "b": Logging("")}, groups=["b", "a"])
    trainer = L.Trainer(strategy=FederatedStrategy(LocalOnly()), **QUIET)
    loader = DataLoader(TensorDataset(X), len(X))
    with quiet(), pytest.raises(MisconfigurationException, match="doesn't support logging"):
        trainer.predict(module, [loader, loader])
