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

ROUNDS = 3
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
        factors: Any = [lambda step, mine=mine: mine[step] for mine in self.rates]
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factors),
        }


SAME = [[0.1] * (ROUNDS + 1)] * 3
ALIKE = [[0.1 * 0.7**number for number in range(ROUNDS + 1)]] * 3
# Two of three layers have one rate, by turns, so that they are stepped as one.
BY_TURNS = [
    [0.1, 0.1, 0.3, 0.1],
    [0.1, 0.2, 0.3, 0.2],
    [0.2, 0.2, 0.1, 0.3],
]


def run(module: Scheduled, method: Method, engine: str, records: bool = True) -> tuple[Fit, Tree]:
    """Fit, with or without recordings; return the fit and all that it ends with."""
    data = image_clients(SIZES, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not records:
            patch.setattr(trace, "LIMIT", 0)
        one = fit(method, data, module, ROUNDS, engine)
    return one, {"server": one.server, "clients": one.recorder.banks[-1]}


@pytest.mark.sweep(4)
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


# --- schedules that count steps ---


class ByStep(Scheduled):
    """The same with a rate of its own in each step, and another option that may change, too.

    Args:
        change: Changes other options of a group at a step.
    """

    def __init__(self, *args: Any, change: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.change = change

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        scheduler, change = found["lr_scheduler"], self.change
        if change is not None:
            step = scheduler.step

            def changing(*args: Any) -> None:
                step(*args)
                for group in found["optimizer"].param_groups:
                    change(group, scheduler.last_epoch)

            scheduler.step = changing
        return {**found, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


STEPS = 4 * ROUNDS + 1
UNLIKE = [[0.3 / (2 + (3 * step + layer) % 7) for step in range(STEPS)] for layer in range(3)]
ONE = [[0.3 * 0.9**step for step in range(STEPS)]] * 3


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rates", [UNLIKE, ONE])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
    ],
)
def test_rates_of_each_step(
    rates: Any, optimizer: Any, options: Any, recorded: list[WholeSteps]
) -> None:
    """The bits of steps, by recordings of the first, which makes states, and of all others."""
    method = Ditto(0.5, local_epochs=2)
    _, found = run(ByStep(rates, optimizer, **options), method, "sequential")
    assert len(recorded) == 2
    _, expected = run(ByStep(rates, optimizer, **options), method, "sequential", records=False)
    assert_trees_equal(found, expected)
    constant = [[mine[0]] * STEPS for mine in rates]
    _, other = run(ByStep(constant, optimizer, **options), method, "sequential")
    with pytest.raises(AssertionError):
        assert_trees_equal(found, other)


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.SGD])
def test_schedules_that_no_recording_follows(optimizer: Any, recorded: list[WholeSteps]) -> None:
    """Of rates that no kernel reads out of a tensor, and of other options."""

    def change(group: Any, step: int) -> None:
        group["momentum"] = 0.5 + 0.02 * step

    more = {"momentum": 0.5, "change": change} if optimizer is torch.optim.SGD else {}
    _, found = run(ByStep(UNLIKE, optimizer, **more), FedAvg(local_epochs=2), "sequential")
    assert not recorded
    _, expected = run(
        ByStep(UNLIKE, optimizer, **more), FedAvg(local_epochs=2), "sequential", records=False
    )
    assert_trees_equal(found, expected)


def test_a_step_that_reads_its_rate_gets_that_of_the_step() -> None:
    _, found = run(ByStep(ONE), Reading(local_epochs=2), "sequential")
    _, expected = run(ByStep(ONE), Reading(local_epochs=2), "sequential", records=False)
    assert_trees_equal(found, expected)


def test_clients_of_unequal_sizes_begin_at_the_rate_of_the_round(
    recorded: list[WholeSteps],
) -> None:
    """One may have a single step, in which no schedule changes anything."""
    data = image_clients((3, 9, 4), dtype=torch.float32)
    found = []
    for limit in (trace.LIMIT, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "LIMIT", limit)
            one = fit(FedAvg(), data, ByStep(ONE), ROUNDS, "sequential")
        found.append({"server": one.server, "clients": one.recorder.banks[-1]})
    assert recorded
    assert_trees_equal(found[0], found[1])
