"""Steps that write to a tensor which all clients share, and which is neither weight nor buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_pfl.engine.known_code import read_by_step, tensors_of
from lightning_pfl.methods import FedAvg, LpProj
from lightning_pfl.testing.fitting import Fit, fit
from tests.engine.nets import CLASSES, image_clients

SIZES, ROUNDS = (8, 5, 8, 12), 3
STEPS = (4 + 3 + 4 + 6) * ROUNDS
"""All clients' minibatches of two samples."""


class Layer(nn.Linear):
    """Counts its calls, and where it is asked to, in steps of training."""

    def __init__(self, write: str) -> None:
        super().__init__(25, CLASSES)
        self.count, self.table, self.write, self.silent = torch.zeros(()), torch.ones(3), write, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.silent:
            return super().forward(x)
        if self.write == "method":
            self.count.add_(1)
        if self.write == "operator":
            count = self.count
            count += 1
        if self.write == "entry":
            self.table[1] += 1
            self.table[:2] *= 1
        if self.write == "data":
            self.count.data.add_(1)
        if self.write == "argument":
            torch.add(self.count, 1, out=self.count)
        return super().forward(x)

    def counted(self) -> float:
        return float(self.count + self.table.sum()) - 3


WRITES = ["method", "operator", "entry", "data", "argument"]


class Counts(L.LightningModule):
    """A step whose result doesn't tell that it counts."""

    def __init__(self, write: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer(write).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CountsEvaluations(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(F.linear(batch[0].flatten(1), self.layer.weight), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1]))


def run(module: L.LightningModule, engine: str, method: Any = FedAvg, **options: Any) -> Fit:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pfl.engine.probe.batching_pays", lambda *_: True)
        patch.setattr("lightning_pfl.engine.probe.evaluating_pays", lambda *_: True)
        data = image_clients(SIZES, batch_size=2)
        val = data if is_overridden("validation_step", module) else None
        return fit(method(), data, module, ROUNDS, engine, val_data=val, **options)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("engine", ["reference", "sequential", "auto"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("kind", "method"),
    [(Counts, FedAvg), (Counts, lambda: LpProj(0.5)), (CountsEvaluations, FedAvg)],
    ids=["whole steps", "gradients", "evaluations"],
)
def test_each_step_of_each_client_counts(
    kind: type[Counts], method: Callable[[], Any], write: str, engine: str
) -> None:
    """Neither at once nor replayed, and what an estimate or a probe has counted is undone."""
    module = kind(write)
    run(module, engine, method)
    assert module.layer.counted() == STEPS


@pytest.mark.parametrize("kind", [Counts, CountsEvaluations])
@pytest.mark.parametrize("write", WRITES)
def test_many_clients_at_once_are_refused(kind: type[Counts], write: str) -> None:
    stored = "table" if write == "entry" else "count"
    with pytest.raises(ValueError, match=f"the step changes `{stored}`, which all clients share"):
        run(kind(write), "vectorized")


class WritesFrom(Callback):
    """Lets the layer count from a round on."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        module.layer.silent = int(trainer.current_epoch < self.round)


@pytest.mark.parametrize("write", WRITES)
def test_a_step_that_begins_to_write_is_taken_one_client_after_another(write: str) -> None:
    module = Counts(write)
    module.layer.silent = 1
    ran = run(module, "auto", callbacks=[WritesFrom(1)], options={"chunk_size": 2})
    assert module.layer.counted() == STEPS * (ROUNDS - 1) / ROUNDS
    plain = Counts("nowhere")
    alone = run(plain, "reference")
    for name, leaf in alone.server["model"].items():
        torch.testing.assert_close(ran.server["model"][name], leaf)


def test_tensors_that_code_reaches() -> None:
    """Not those that it doesn't name, nor weights and buffers."""
    module = Counts("method")
    module.layer.register_buffer("mean", torch.zeros(1))
    vars(module.layer)["other"] = torch.zeros(1)
    found = tensors_of(read_by_step(module))
    assert sorted(name for name, _ in found) == ["count", "table"]
    assert all(value is getattr(module.layer, name) for name, value in found)
