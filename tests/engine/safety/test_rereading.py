"""Steps that write to their minibatch, with methods that take one gradient of it, and several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.methods import Ditto, FedAvg, PerFedAvg, PFedMe
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.conformance import small_clients, small_module
from lightning_pfl.testing.fitting import Fit, fit

ENGINES = ("reference", "sequential", "vectorized")


class Halves(PersonalizedModule):
    """Computes the halves of its inputs."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return super().training_step([batch[0] * 0.5, batch[1]], batch_idx)


class HalvesInPlace(PersonalizedModule):
    """Writes the halves of its inputs to them."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


class HalvesInTheLoop(HalvesInPlace):
    """Has a hook inside of its step, so that it trains in Lightning's loop."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class HalvesCopies(HalvesInPlace):
    """Gets copies of its minibatches."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part.clone() for part in batch]


def run(method: Method, kind: type[PersonalizedModule], engine: str) -> Fit:
    made = small_module()
    module = kind(made.backbone, made.head, lr=0.05, momentum=0.9).double()
    return fit(method, small_clients(), module, rounds=2, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [FedAvg, lambda: PerFedAvg(0.1)])
def test_one_gradient_of_a_minibatch_may_write_to_it(method: Any, engine: str) -> None:
    """That of a second minibatch reads the second one as it is."""
    written, plain = (run(method(), kind, engine) for kind in (HalvesInPlace, Halves))
    for name, leaf in plain.models.items():
        assert torch.equal(written.models[name], leaf), name


@pytest.mark.parametrize("method", [lambda: Ditto(0.5), lambda: PFedMe(15.0)])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((HalvesInPlace, engine) for engine in ENGINES), (HalvesInTheLoop, "auto")],
)
def test_a_further_gradient_of_what_was_written_is_refused(
    kind: type[PersonalizedModule], method: Any, engine: str
) -> None:
    message = r"leaves its minibatch as it is, .* wrote to it in place.*`x = x \* 2`"
    with pytest.raises(MisconfigurationException, match=message):
        run(method(), kind, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_copies_may_be_written_to(engine: str) -> None:
    copied, plain = (run(Ditto(0.5), kind, engine) for kind in (HalvesCopies, Halves))
    for name, leaf in plain.models.items():
        assert torch.equal(copied.models[name], leaf), name
