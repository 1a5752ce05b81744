"""The engines give the same numbers: ragged clients, BatchNorm, every elementwise optimizer, every
Trainer flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lightning_pfl.core.tree import Tree
from lightning_pfl.engine.optimizer_options import ELEMENTWISE
from lightning_pfl.methods import (
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedBN,
    FedMAP,
    FedProx,
    FedRep,
    PFedMe,
)
from lightning_pfl.methods.base import LocalStep, Method
from tests.engine.nets import SIZES, cnn, compare, image_clients, moved

CHUNKS = (1, 2, 3, len(SIZES) + 1)
"""One client, pairs of which one is left, unequal chunks, and room for more than there are."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=1e-2),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1
    ),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def test_every_elementwise_optimizer_is_compared() -> None:
    assert {name.split()[0] for name in OPTIMIZERS} == {kind.__name__ for kind in ELEMENTWISE}


# BatchNorm couples the samples of a batch, so clients with batches of different sizes take their
# steps in groups; without it, if the step is known to draw no random numbers, they share one padded
# batch: two paths through the optimizer's state.
@pytest.mark.sweep(10)
@pytest.mark.parametrize("norm", [True, False], ids=["groups", "padded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, norm: bool) -> None:
    outcome = compare(lambda: cnn(norm, optimizer=OPTIMIZERS[name]), image_clients())
    assert moved(outcome, "head.weight") == [size > 0 for size in SIZES]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("norm", [True, False], ids=["groups", "padded"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg(local_epochs=2),
        lambda: FedBN(local_steps=3, local_epochs=None),
        lambda: FedProx(0.5),
        lambda: FedRep(head_epochs=2),
    ],
    ids=["FedAvg", "FedBN", "FedProx", "FedRep"],
)
def test_chunk_sizes(make: Callable[[], Method], norm: bool) -> None:
    compare(lambda: cnn(norm), image_clients(), make, CHUNKS)


MANY = (16, 13, 9, 12, 5, 20, 0, 7)
"""Sizes of clients of which 7, 7, 5, 3 and 1 have a first, second, ... minibatch. Where 7 step, all
8 do, of which one has no sample; where 5 do, 6 do, of which one is done."""


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: FedAvg(local_epochs=2), {}),
        (lambda: FedAvg(local_epochs=2), {"optimizer": OPTIMIZERS["Adam"]}),
        (lambda: FedRep(head_epochs=2), {}),
        (lambda: Ditto(0.5, personal_epochs=2), {}),
        (lambda: SCAFFOLD("I"), {}),
        (FedMAP, {}),
        (lambda: PFedMe(inner_steps=2), {}),
    ],
    ids=["FedAvg", "Adam", "FedRep", "Ditto", "SCAFFOLD", "FedMAP", "PFedMe"],
)
def test_clients_that_are_done_go_along(
    make: Callable[[], Method], options: dict[str, Any]
) -> None:
    """And nothing of it is left, in no state and in no logged value."""
    data = image_clients(MANY)
    outcome = compare(lambda: cnn(False, **options), data, make, (None, 6))
    assert moved(outcome, "head.weight") == [size > 0 for size in MANY]


def test_normalised_clients_of_whole_minibatches_go_along() -> None:
    """Which need no padding, so that statistics of a minibatch are those of the client alone."""
    compare(cnn, image_clients(MANY, drop_last=True))


class Reducing(L.LightningModule):
    """Logs in several ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = torch.nn.Linear(25, 3).double()

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.head(x.flatten(1)), y)
        self.log("steps", 1.0, reduce_fx="sum")
        self.log("least", loss, reduce_fx="min")
        self.log("most", loss, reduce_fx="max")
        self.log("mean", loss, batch_size=3)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_values_of_clients_that_go_along_are_not_reduced() -> None:
    data = image_clients(MANY, drop_last=True)
    outcome = compare(Reducing, data)
    steps = [2.0 * (size // 4) if size >= 4 else torch.nan for size in MANY]
    assert outcome.result.logs["steps"].tolist() == pytest.approx(steps, nan_ok=True)


class TwoSteps(Method):
    """Steps the optimizer twice on every minibatch."""

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        return super().client_step(
            super().client_step(state, minibatches, client), minibatches, client
        )


def test_several_updates_in_a_step() -> None:
    """Adam counts its steps: each group of clients must see its own count."""
    compare(lambda: cnn(optimizer=OPTIMIZERS["Adam"]), image_clients(), TwoSteps, (1, 3))


def test_order_of_the_cohort_does_not_matter() -> None:
    compare(cnn, image_clients(), clients=[3, 1, 0, 2], chunk_sizes=(2, 3))


@pytest.mark.parametrize("norm", [True, False])
def test_single_precision(norm: bool) -> None:
    data = image_clients(dtype=torch.float32)
    compare(lambda: cnn(norm, dtype=torch.float32), data, rtol=1e-5)


FLAGS: dict[str, dict[str, Any]] = {
    "clip norm": {"clip_value": 0.1},
    "clip value": {"clip_value": 0.01, "clip_algorithm": "value"},
    "accumulate 2": {"accumulate": 2},
    "accumulate 3, clipped": {"accumulate": 3, "clip_value": 0.1},
    "limit count": {"limit_train_batches": 2},
    "limit fraction": {"limit_train_batches": 0.5},
    "overfit": {"overfit_batches": 1},
    "overfit fraction": {"overfit_batches": 0.7},
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("norm", [True, False], ids=["groups", "padded"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_trainer_flags(flags: dict[str, Any], norm: bool) -> None:
    compare(lambda: cnn(norm), image_clients(), settings=flags)


@pytest.mark.parametrize("flags", [{}, {"accumulate": 2}], ids=["every batch", "accumulate 2"])
def test_steps_that_cycle_through_the_data(flags: dict[str, Any]) -> None:
    compare(cnn, image_clients(), lambda: FedAvg(local_epochs=None, local_steps=7), settings=flags)


def test_drop_last_leaves_clients_smaller_than_a_batch_untrained() -> None:
    outcome = compare(cnn, image_clients(drop_last=True))
    assert outcome.info.steps.tolist() == [2 * (size // 4) for size in SIZES]
    assert moved(outcome, "head.weight") == [size >= 4 for size in SIZES]


@pytest.mark.parametrize("size", [0, 1, 13])
def test_one_client_alone(size: int) -> None:
    compare(cnn, image_clients((size, 4)), clients=[0], chunk_sizes=(None, 1, 2))


def test_no_client_with_data() -> None:
    outcome = compare(cnn, image_clients((0, 0)))
    assert outcome.info.steps.tolist() == [0, 0]
    assert moved(outcome, "head.weight") == [False, False]
    assert outcome.result.loss.isnan().all()


def test_no_step_at_all() -> None:
    outcome = compare(cnn, image_clients(), lambda: FedAvg(local_epochs=0))
    assert not any(moved(outcome, "head.weight"))


def test_logged_values_are_means_over_samples() -> None:
    """One epoch at lr 0: each client's logged loss is its loss over all of its samples."""
    data, module = image_clients(), cnn(norm=False, lr=0.0)
    outcome = compare(lambda: cnn(norm=False, lr=0.0), data, FedAvg)
    for client, size in enumerate(SIZES):
        logged = outcome.result.logs["train_loss"][client]
        if not size:
            assert logged.isnan()
            continue
        x, y = data.gather(data.indices[client])
        expected = torch.nn.functional.cross_entropy(module(x), y)
        torch.testing.assert_close(logged, expected.detach(), rtol=1e-12, atol=0)
