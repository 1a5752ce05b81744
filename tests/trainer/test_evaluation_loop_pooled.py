"""What a module logs once for all clients comes with a warning."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_pfl.methods import Ditto, LocalOnly
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients


class Pooling(PersonalizedModule):
    """Gathers a loss in the steps, and logs it at the end of the evaluation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(25, 3), lr=0.1)
        self.gathered = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Gather."""
        self.gathered.update(self.loss_of(batch))

    def loss_of(self, batch: Any) -> Tensor:
        """Mean cross-entropy."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        """Log."""
        self.log("val_pooled", self.gathered.compute())
        self.gathered.reset()


class OfSteps(Pooling):
    """Logs in the step."""

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Log."""
        self.log("val_loss", self.loss_of(batch))

    def on_validation_epoch_end(self) -> None:
        """Nothing to log."""


@pytest.mark.parametrize("method", [LocalOnly, Ditto])
def test_a_value_of_the_epochs_end_is_said_to_be_of_all_clients(method: Any) -> None:
    data = small_clients(torch.float32)
    with pytest.warns(
        UserWarning, match="on_validation_epoch_end` of Pooling logs 'val_pooled' once"
    ):
        fit(method(), data, Pooling(), val_data=data, engine="auto")


def test_values_of_the_steps_are_not_warned_of() -> None:
    data = small_clients(torch.float32)
    done = fit(LocalOnly(), data, OfSteps(), val_data=data, engine="auto")
    assert done.metrics["val_loss"] > 0
