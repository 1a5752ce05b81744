"""What people write trains as a loop by the same steps does, in first and in later rounds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import cells, habits
from benchmarks.habits import HABITS, Habit, Loop, Plain, Source


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "accumulate" else pytest.mark.slow)
        for name in HABITS
        if name != "bf16"  # double precision has no bfloat16
    ],
)
def test_both_sides_end_with_the_same_models(name: str) -> None:
    assert habits.check(name, 1.0) < cells.SAME


def test_unequal_clients_have_last_minibatches_of_many_sizes() -> None:
    sizes = habits.sizes_of(1.0)
    assert len({size % habits.BATCH for size in sizes}) > 10
    assert max(sizes) > 10 * min(sizes)
    assert set(habits.sizes_of(0.0)) == {112}


@pytest.mark.parametrize("name", ["sgd", "collate"])
def test_a_client_has_each_of_its_samples_once_a_round(name: str) -> None:
    source = Source(HABITS[name], [3, 45, 7], torch.float64, shuffle=True)
    found = [
        torch.cat([b["x"] if isinstance(b, dict) else b[0] for b in source.minibatches(1, orders)])
        for orders in [source.orders([2, 1], number) for number in (0, 0, 1)]
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    mine = source.x[3:48]
    assert torch.equal(mine.sort(0).values, found[0].sort(0).values)


def test_the_loop_takes_a_step_for_each_two_minibatches_and_for_the_last() -> None:
    """45 samples are 3 minibatches of which each counts a half: steps of 1 and 2, and of 3."""
    habit = Habit("", flags={"accumulate_grad_batches": 2})
    train = Source(habit, [45] * habits.CLIENTS, torch.float64, shuffle=True)
    torch.manual_seed(0)
    module = Plain().double()
    weights = {name: leaf.detach().clone() for name, leaf in module.named_parameters()}
    loop = Loop(habit, module, train, train)
    orders = train.orders([4], 0)
    trained = loop._trained(4, orders)
    batches = list(train.minibatches(4, orders))
    for group in (batches[:2], batches[2:]):
        now = {name: leaf.clone().requires_grad_() for name, leaf in weights.items()}
        loss: Any = sum(torch.nn.functional.cross_entropy(_output(now, x), y) / 2 for x, y in group)
        grads = torch.autograd.grad(loss, list(now.values()))
        weights = {
            name: leaf - 0.05 * grad
            for (name, leaf), grad in zip(weights.items(), grads, strict=True)
        }
    for ours, expected in zip(trained, weights.values(), strict=True):
        torch.testing.assert_close(ours, expected)


def _output(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for layer in (0, 2):
        x = torch.relu(x @ weights[f"net.{layer}.weight"].T + weights[f"net.{layer}.bias"])
    return x @ weights["net.4.weight"].T + weights["net.4.bias"]


def test_a_row_is_of_first_and_of_later_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rounds of 6 and 2 seconds, where the loop takes 2, and three of 4, 1 and 2."""

    def run(*_: object) -> tuple[cells.InTurns, object, float]:
        clock = cells.InTurns(0.0, ())
        clock.ours = [(took, 0.0) for took in (6.0, 2.0, 4.0, 1.0, 2.0)]
        clock.theirs = [(2.0, 0.0)] * 5
        engine = SimpleNamespace(choices={"training_step": "sequential (for some reason)"})
        return clock, SimpleNamespace(federation=SimpleNamespace(engine=engine)), 0.0

    monkeypatch.setattr(habits, "run", run)
    monkeypatch.setattr(habits, "FIRST", 2)
    found = habits.measure("sgd", 0.0, checked=False)
    expected = {"first": 0.5, "later": 1.0, "cpu_seconds": 2.0}
    assert found == {**expected, "choice": "sequential (for some reason)"}


def test_all_habits_and_sizes_are_measured() -> None:
    assert set(habits.combinations()) == {(name, sigma) for name in HABITS for sigma in (0.0, 1.0)}
