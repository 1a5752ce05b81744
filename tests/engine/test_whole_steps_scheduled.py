"""Recorded steps under learning rates that change from round to round: recorded once, and with the
bits of steps that aren't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pfl.core.tree import Tree
from lightning_pfl.engine import trace
from lightning_pfl.engine.whole_steps import WholeSteps
from lightning_pfl.methods import Ditto, FedAvg, FedRep
from lightning_pfl.methods.base import LocalStep, Method, recordable
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_equal
from tests.engine.nets import CLASSES, image_clients

ROUNDS = 4
SIZES = (8, 8, 8)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[WholeSteps]:
    """Get an entry for each recording of a whole step."""
    found: list[WholeSteps] = []
    record = WholeSteps._recorded_step

    def counting(self: WholeSteps, *args: Any) -> Any:
        found.append(self)
        return record(self, *args)

    monkeypatch.setattr(WholeSteps, "_recorded_step", counting)
    return found


class Scheduled(L.LightningModule):
    """Three layers, each with a rate of its own in each round: one of ``rates`` by the round.

    Args:
        rates: By layer, the rates of the rounds.
        optimizer: A class of optimizers.
        options: Its options.
    """

    def __init__(
        self, rates: Sequence[Sequence[float]], optimizer: Any = torch.optim.SGD, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.head = nn.Linear(25, 6), nn.Linear(6, 5), nn.Linear(5, CLASSES)
        self.rates, self.optimizer, self.options = rates, optimizer, options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = torch.tanh(self.middle(torch.tanh(self.body(x.flatten(1)))))
        return nn.functional.cross_entropy(self.head(hidden), y)

    def configure_optimizers(self) -> Any:
        layers = self.body, self.middle, self.head
        groups = [{"params": list(layer.parameters()), "lr": 1.0} for layer in layers]
        optimizer = self.optimizer(groups, **self.options)
        factors: Any = [mine.__getitem__ for mine in self.rates]
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factors),
        }


SAME = [[0.1] * (ROUNDS + 1)] * 3
ALIKE = [[0.1 * 0.7**number for number in range(ROUNDS + 1)]] * 3
# Two of three layers have one rate, by turns, so that they are stepped as one.
BY_TURNS = [
    [0.1, 0.1, 0.3, 0.2, 0.1],
    [0.1, 0.2, 0.3, 0.2, 0.2],
    [0.2, 0.2, 0.1, 0.2, 0.3],
]


def run(module: Scheduled, method: Method, engine: str, records: bool = True) -> tuple[Fit, Tree]:
    """Fit, with or without recordings; return the fit and all that it ends with."""
    data = image_clients(SIZES, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not records:
            patch.setattr(trace, "LIMIT", 0)
        one = fit(method, data, module, ROUNDS, engine)
    return one, {"server": one.server, "clients": one.recorder.banks[-1]}


@pytest.mark.parametrize(
    ("engine", "optimizer", "options"),
    [
        ("sequential", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        ("sequential", torch.optim.Adam, {"amsgrad": True}),
        ("sequential", torch.optim.AdamW, {}),
        ("sequential", torch.optim.Adagrad, {}),
        ("sequential", torch.optim.RMSprop, {}),
        ("sequential", torch.optim.Adam, {"foreach": True}),
        ("vectorized", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("vectorized", torch.optim.AdamW, {}),
    ],
)
def test_replayed_steps_are_the_steps(
    engine: str, optimizer: Any, options: Any, recorded: list[WholeSteps]
) -> None:
    scale = 1.0 if optimizer is torch.optim.SGD else 0.1
    rates = [[scale * rate for rate in mine] for mine in BY_TURNS]
    method = Ditto(0.5, local_epochs=2)
    _, found = run(Scheduled(rates, optimizer, **options), method, engine)
    assert recorded
    count = len(recorded)
    _, expected = run(Scheduled(rates, optimizer, **options), method, engine, records=False)
    assert len(recorded) == count
    assert_trees_equal(found, expected)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_rates_that_change_in_each_round_need_no_new_recordings(
    engine: str, recorded: list[WholeSteps]
) -> None:
    run(Scheduled(SAME), FedAvg(local_epochs=2), engine)
    count = len(recorded)
    assert count
    run(Scheduled(ALIKE), FedAvg(local_epochs=2), engine)
    assert len(recorded) == 2 * count


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_rates_of_phases(engine: str, recorded: list[WholeSteps]) -> None:
    """A schedule scales them, too."""
    method = FedRep(head_epochs=2, head_lr=0.3)
    _, found = run(Scheduled(ALIKE), method, engine)
    assert recorded
    _, expected = run(Scheduled(ALIKE), method, engine, records=False)
    assert_trees_equal(found, expected)
    _, other = run(Scheduled(SAME), method, engine)
    with pytest.raises(AssertionError):
        assert_trees_equal(found, other)


class Reading(FedAvg):
    """Moves a bias by the rate."""

    @recordable()
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        model = client.train(state["model"], minibatches)
        return {**state, "model": {**model, "head.bias": model["head.bias"] + client.lr}}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_step_that_reads_its_rate_gets_that_of_the_round(engine: str) -> None:
    _, found = run(Scheduled(ALIKE), Reading(local_epochs=2), engine)
    _, expected = run(Scheduled(ALIKE), Reading(local_epochs=2), engine, records=False)
    assert_trees_equal(found, expected)
