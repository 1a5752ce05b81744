"""The mean of the last rounds and the best round by validation."""

import math
from typing import Any

import pytest

from lightning_pfl.metrics.history import History


class TestMeans:
    def test_mean_of_the_last_ten_evaluated_rounds(self) -> None:
        """Evaluated every third round: the last ten evaluated are not the last ten rounds."""
        history = History()
        for round in range(0, 60, 3):
            history.update(round, {"val_acc": float(round)})
        assert history.mean() == {"val_acc": sum(range(30, 60, 3)) / 10}

    def test_fewer_rounds_than_ten(self) -> None:
        history = History()
        history.update(0, {"a": 1.0})
        history.update(1, {"a": 2.0})
        assert history.mean() == {"a": 1.5}

    def test_no_round(self) -> None:
        assert History().mean() == History().summary() == {}

    def test_values_may_join_a_round_later(self) -> None:
        history = History()
        for round in range(3):
            history.update(round, {"val_acc": float(round)})
            history.add(round, {"ft/val_acc": 10.0 * round})
        assert history.mean() == {"val_acc": 1.0, "ft/val_acc": 10.0}
        assert history.monitor == "val_acc"

    def test_going_back_drops_the_rounds_after(self) -> None:
        history = History()
        for round in (0, 1, 2, 1):
            history.update(round, {"a": float(10 * len(history.rounds) + round)})
        assert list(history.rounds) == [0, 1]
        assert history.mean() == {"a": (0.0 + 31.0) / 2}

    def test_nan_is_shown(self) -> None:
        history = History()
        history.update(0, {"a": math.nan})
        history.update(1, {"a": 1.0})
        assert math.isnan(history.mean()["a"])

    def test_values_of_a_prefix_are_forgotten(self) -> None:
        history = History()
        assert history.latest() == frozenset()
        history.update(0, {"a": 1.0, "b/a": 2.0})
        history.update(1, {"a": 3.0, "b/c": 4.0})
        assert history.latest() == {"a", "b/c"}
        history.forget("b/")
        assert history.mean() == {"a": 2.0}


ROUNDS: tuple[dict[str, Any], ...] = (
    {"val": math.nan, "other": 1.0},
    {"val": 0.4, "other": 0.99},
    {"val": 0.8, "other": 0.7},
    {"val": math.nan, "other": 1.0},
    {"other": 1.0},
    {"val": 0.8, "other": 0.9},
    {"val": 0.2, "other": 0.95},
)


@pytest.mark.parametrize(("larger", "best"), [(True, 2), (False, 6)])
def test_the_best_round_is_the_first_of_equals_and_never_nan(larger: bool, best: int) -> None:
    history = History()
    for round, values in enumerate(ROUNDS):
        history.update(round, values, {"val": larger, "other": False})
    assert history.monitor == "val"
    assert (history.best_round, history.best) == (best, ROUNDS[best])
    assert history.summary()["best/round"] == best
    assert not [name for name in history.summary(on_test=True) if name.startswith("best/")]


def test_a_restored_history_goes_on_equally() -> None:
    history, resumed = History(), History()
    resumed.update(9, {"something": 1.0})  # of another run
    for round, values in enumerate(ROUNDS[1:3], 1):
        history.update(round, values, unlogged=["other"])
    resumed.load_state_dict(history.state_dict())
    for each in (history, resumed):
        each.update(5, {"val": 0.7, "other": 1.0})
    assert resumed.summary() == history.summary()
    assert resumed.for_loggers(resumed.summary()) == history.for_loggers(history.summary())
    assert (resumed.best_round, resumed.best) == (2, ROUNDS[2])
    empty = History()
    resumed.load_state_dict(empty.state_dict())
    assert resumed.state_dict() == empty.state_dict()
