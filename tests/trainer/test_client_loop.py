"""Modules with code inside a step: one client with FedAvg is a plain ``Trainer.fit``."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import FederatedStrategy
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import SCAFFOLD, FedAvg
from lightning_pfl.testing.fitting import quiet

SAMPLES, BATCH = 10, 4


def fields() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def run(module: L.LightningModule, rounds: int, method: Any = None, **flags: Any) -> L.Trainer:
    """Train plainly, or with a method on one client."""
    options: dict[str, Any] = {
        "max_epochs": rounds,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **flags,
    }
    if method is None:
        data: Any = DataLoader(TensorDataset(*fields()), batch_size=BATCH)
    else:
        engine = options.pop("engine", "auto")
        options["strategy"] = FederatedStrategy(method, seed=0, engine=engine)
        data = FederatedTensorDataset(fields(), [range(SAMPLES)], batch_size=BATCH)
    with quiet():
        trainer = L.Trainer(**options)
        trainer.fit(module, data)
    return trainer


def require_plain(make: Any, rounds: int = 3, local_epochs: int = 1, **flags: Any) -> L.Trainer:
    """Compare all parameters and buffers, and the logged values, with those of plain training."""
    plain, ours = make(), make()
    expected = run(plain, rounds * local_epochs, **flags)
    found = run(ours, rounds, FedAvg(local_epochs=local_epochs), **flags)
    for name, leaf in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], leaf, rtol=1e-6, atol=1e-8)
    for name, value in expected.callback_metrics.items() if local_epochs == 1 else ():
        assert float(found.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6)
    return found


class GAN(L.LightningModule):
    """Two networks with an optimizer each, by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        optimizers: Any = self.optimizers()
        first, second = optimizers
        noise = x.roll(1, 0)
        with first.toggle_model():
            loss = -self.critic(self.generator(noise)).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
        self.log("generator_loss", loss, on_step=False, on_epoch=True)
        self.toggle_optimizer(second)
        loss = (
            self.critic(self.generator(noise).detach()).tanh().mean() - self.critic(x).tanh().mean()
        )
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, 0.5, "norm")
        second.step()
        self.untoggle_optimizer(second)
        self.log("critic_loss", loss, on_step=False, on_epoch=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.2)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1, 0.5)]


def test_gan() -> None:
    trainer = require_plain(GAN)
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers] == [0.1, 0.2 / 8]


def test_gan_over_epochs_of_one_round() -> None:
    require_plain(GAN, rounds=1, local_epochs=3)


def test_a_method_that_computes_gradients_refuses_manual_optimization() -> None:
    with pytest.raises(Exception, match="SCAFFOLD computes gradients itself, but GAN sets"):
        run(GAN(), 1, SCAFFOLD())


def test_the_vectorized_engine_refuses_by_name() -> None:
    with pytest.raises(ValueError, match="GAN sets automatic_optimization=False"):
        run(GAN(), 1, FedAvg(), engine="vectorized")
