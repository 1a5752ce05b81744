"""The number of the round in recorded steps: one recording holds in many rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_pfl.engine import trace
from lightning_pfl.engine.epoch import MOST, Epoch, Noted, Number
from lightning_pfl.engine.steps import NumberReadError
from lightning_pfl.testing.fitting import Fit
from tests.engine.test_known_code_evaluations import assert_same as assert_same_values
from tests.engine.test_known_code_evaluations import evaluate
from tests.engine.test_known_code_steps import ENGINES, assert_same, replays, train
from tests.engine.users_steps import LogsEpoch, Plain, ReadsEpoch, Turns, Warms

pytestmark = pytest.mark.usefixtures("at_once")


def in_round(number: int) -> tuple[Noted, Any]:
    noted = Noted(number)
    return noted, Number(noted, lambda round: round)


FORMULAS: list[Callable[[Any, Any], Any]] = [
    lambda x, n: x * n + n * x,
    lambda x, n: (n + 0.1) - x,
    lambda x, n: x - (1 - n / 7),
    lambda x, n: (2.0 + n) / (x + n),
    lambda x, n: x / (n + 3),
    lambda x, n: 0.97**n * x + (n % 3) * x - (n // 2) * x,
    lambda x, n: x * -n + x * abs(-n) + x * +n,
    lambda x, n: x * min(1.0, n / 10) * max(0, n - 1),
]


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_number_meets_tensors_with_the_bits_of_its_value(
    formula: Callable[[Any, Any], Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, other = (torch.rand(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    other.data.copy_(x.data)
    found, expected = formula(x, in_round(4)[1]), formula(other, 4)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


def test_tensors_have_the_numbers_of_another_round() -> None:
    noted, number = in_round(2)
    tensors = [noted.tensor(one.compute, torch.float64) for one in (number, number / 4, 2 - number)]
    assert noted.fits(5)
    assert [float(one) for one in tensors] == [5.0, 1.25, -3.0]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (lambda n: n < 5, {3, 4}),
        (lambda n: not n >= 5, {3, 4}),
        (lambda n: n % 2 == 1, {3, 5, 7}),
        (lambda n: n != 4, {3, 5, 6, 7, 8}),
        (lambda n: min(6, n), {3, 4, 5}),  # `min` asks whether n < 6
        (lambda n: 2 < n <= 6, {3, 4, 5, 6}),
        (lambda n: bool(n - 5), {3, 4, 6, 7, 8}),
        (lambda n: n * 1, {3, 4, 5, 6, 7, 8}),
    ],
)
def test_a_recording_holds_where_its_conditions_do(condition: Any, holds: set[int]) -> None:
    found = set()
    for other in range(3, 9):
        noted, number = in_round(3)
        condition(number)
        if noted.fits(other):
            found.add(other)
    assert found == holds


def test_a_recording_that_does_not_hold_keeps_its_numbers() -> None:
    noted, number = in_round(1)
    tensor = noted.tensor((1 / (3 - number)).compute, torch.float64)
    assert not noted.fits(3)
    assert float(tensor) == 0.5
    assert noted.fits(2)
    assert float(tensor) == 1.0


def adds_in_place(number: Any) -> None:
    total = torch.ones(2)
    total += number


@pytest.mark.parametrize(
    "function",
    [
        float,
        int,
        str,
        hash,
        round,
        range,
        lambda n: f"{n}",
        lambda n: [1, 2, 3][n],
        lambda n: n * 1j,
        lambda n: n * "a",
        lambda n: n < torch.ones(2),
        lambda n: torch.ones(2) ** n,
        lambda n: torch.full((2,), n),
        lambda n: torch.ones(2).add(torch.ones(2), alpha=n),
        lambda n: torch.ones(2).mul_(n),
        adds_in_place,
        lambda n: torch.ones(2, dtype=torch.int64) * n,
        lambda n: torch.ones(2, dtype=torch.bfloat16) * n,
        lambda n: [torch.ones(2) * n for _ in range(MOST + 1)],
    ],
)
def test_what_else_reads_a_number_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises((NumberReadError, TypeError)):
        function(in_round(2)[1])


def test_a_number_is_of_the_class_of_its_value() -> None:
    number = in_round(2)[1]
    assert isinstance(number, int)
    assert isinstance(number / 2, float)
    assert not isinstance(number, float)


def test_a_step_gets_numbers_while_it_is_noted() -> None:
    module: Any = L.LightningModule()
    trainer: Any = SimpleNamespace(current_epoch=3, max_epochs=9)
    vars(module)["_trainer"] = trainer
    epoch = Epoch(module, lambda: True)
    with epoch.noting() as noted:
        assert not noted.used
        assert module.trainer.max_epochs == 9
        assert type(module.current_epoch) is Number
        assert noted.used
    assert module.trainer is trainer
    assert epoch.now() == 3


class Single(ReadsEpoch):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * min(1.0, (self.current_epoch + 1) / 3) + 0.1 * self.current_epoch / loss


@ENGINES
def test_steps_in_single_precision(together: bool) -> None:
    recorded, plain = (train(Single, together, limit=limit) for limit in (99, 0))
    assert_same(recorded, plain)
    assert replays(recorded) > 5


def recordings(run: Fit) -> int:
    selected: Any = run.federation.engine
    return len(selected._engines["training_step"].whole._recorded)


@cache
def recordings_of_plain(together: bool) -> int:
    """However many rounds follow the first."""
    return recordings(train(Plain, together))


@pytest.mark.sweep(4)
@ENGINES
@pytest.mark.parametrize("make", [ReadsEpoch, LogsEpoch, Warms, Turns])
def test_rounds_share_recordings(make: Callable[[], Any], together: bool) -> None:
    assert recordings(train(make, together)) == recordings_of_plain(together) > 0


@ENGINES
def test_a_step_whose_conditions_change_in_each_round_is_recorded_for_each(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "CHANGES", 1)
    recorded, plain = (train(Turns, together, limit=limit, rounds=4) for limit in (99, 0))
    assert_same(recorded, plain)
    assert replays(recorded) > 5
    assert recordings(recorded) > recordings_of_plain(together)


def begin_round(module: Any, number: int) -> None:
    # As Lightning counts, whatever its version.
    progress = module.trainer.fit_loop.epoch_progress.current
    progress.processed = progress.completed = number
    assert module.current_epoch == number


def test_evaluations_share_recordings() -> None:
    found, replayed = evaluate(ReadsEpoch, begin_round)
    expected, none = evaluate(ReadsEpoch, begin_round, limit=0)
    assert none == 0
    assert_same_values(found, expected)
    assert replayed == evaluate(Plain, begin_round)[1] > 5
