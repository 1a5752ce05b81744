"""One client, full participation and FedAvg against a plain ``Trainer.fit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import FederatedStrategy
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import fitting
from lightning_pfl.testing.fitting import quiet

SAMPLES, BATCH = 10, 4
QUIET: dict[str, Any] = {**fitting.QUIET, "num_sanity_val_steps": 0}


def fields() -> tuple[Tensor, Tensor]:
    """Three numbers of which a fourth is a linear function."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def loader() -> DataLoader[Any]:
    """Two minibatches of four samples and one of two, in a fixed order."""
    return DataLoader(TensorDataset(*fields()), batch_size=BATCH)


class Regression(L.LightningModule):
    """Least squares; subclasses say what maps ``(samples, 3)`` to ``(samples,)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers: Any = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )
        self.build()
        self.double()

    def build(self) -> None:
        """Add further layers."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).squeeze(-1)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    module: L.LightningModule,
    rounds: int,
    method: Any = None,
    engine: Any = "auto",
    data: Callable[[], DataLoader[Any]] = loader,
    callbacks: Sequence[Any] = (),
    **flags: Any,
) -> L.Trainer:
    """Train plainly, or with a method on one client."""
    given: Any = data()
    held: Any = data()
    if method is not None:
        flags["strategy"] = FederatedStrategy(method, seed=0, engine=engine)
        given, held = {"ada": given}, {"ada": held}
    with quiet():
        # A plugin keeps its Trainer.
        flags = {**QUIET, **deepcopy(flags)}
        trainer = L.Trainer(max_epochs=rounds, callbacks=list(callbacks), **flags)
        validated = is_overridden("validation_step", module)
        trainer.fit(module, given, held if validated else None)
    return trainer


class Snapshots(L.Callback):
    """Keeps states after every epoch; before them and at the end, learning rates and values."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []
        self.values: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.states.append({name: leaf.clone() for name, leaf in module.state_dict().items()})

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        groups = [group for one in trainer.optimizers for group in one.param_groups]
        self.rates.append([group["lr"] for group in groups])
        self.values.append({name: float(one) for name, one in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.on_train_epoch_start(trainer, module)


def require_plain(
    make: Callable[[], L.LightningModule],
    rounds: int = 2,
    local_epochs: int = 1,
    engine: Any = "auto",
    **options: Any,
) -> Any:
    """Compare, epoch by epoch, weights, buffers, learning rates, and logged values.

    Values of several local epochs are means over all of them, and aren't compared.
    """
    plain, ours, before = Snapshots(), Snapshots(), make().state_dict()
    fit(make(), rounds * local_epochs, callbacks=[plain], **options)
    method = FedAvg(local_epochs=local_epochs)
    trainer = fit(make(), rounds, method, engine, callbacks=[ours], **options)
    assert len(ours.states) == rounds
    for number, state in enumerate(ours.states):
        at = (number + 1) * local_epochs - 1
        assert state.keys() == plain.states[at].keys()
        for name, leaf in plain.states[at].items():
            torch.testing.assert_close(state[name], leaf, rtol=1e-6, atol=1e-8, msg=name)
    for number, rates in enumerate(ours.rates):
        assert rates == pytest.approx(plain.rates[number * local_epochs], rel=1e-9)
    assert any(not torch.equal(before[name], leaf) for name, leaf in ours.states[-1].items())
    if local_epochs == 1:
        assert len(ours.values) == len(plain.values) == rounds + 1
        for found, values in zip(ours.values, plain.values, strict=True):
            assert {name: found[name] for name in values} == pytest.approx(values, rel=1e-6)
    return trainer
