"""The mean of the last rounds and the best round by validation."""

import math
from typing import Any

import pytest

from lightning_pfl.metrics import BestValidationRound, LastRounds


class TestLastRounds:
    def test_mean_of_the_last_ten_evaluated_rounds(self) -> None:
        """Evaluated every third round: the last ten evaluated are not the last ten rounds."""
        last = LastRounds()
        for round in range(0, 60, 3):
            last.update(round, {"test_acc": float(round)})
        assert last.mean() == {"test_acc": sum(range(30, 60, 3)) / 10}

    def test_a_window_of_one_is_the_last_round(self) -> None:
        last = LastRounds(window=1)
        for round in range(3):
            last.update(round, {"acc": float(round)})
        assert last.mean() == {"acc": 2.0}

    def test_fewer_rounds_than_the_window(self) -> None:
        last = LastRounds(window=10)
        last.update(0, {"a": 1.0})
        last.update(1, {"a": 2.0})
        assert last.mean() == {"a": 1.5}

    def test_no_round(self) -> None:
        assert LastRounds().mean() == {}

    def test_names_of_one_round_may_come_one_by_one(self) -> None:
        last = LastRounds(window=2)
        for round in range(3):
            last.update(round, {"val_acc": float(round)})
            last.update(round, {"test_acc": 10.0 * round})
        assert last.mean() == {"val_acc": 1.5, "test_acc": 15.0}

    def test_going_back_drops_the_rounds_after(self) -> None:
        last = LastRounds()
        for round in (0, 1, 2, 1):
            last.update(round, {"a": float(10 * len(last.rounds) + round)})
        assert list(last.rounds) == [0, 1]
        assert last.mean() == {"a": (0.0 + 31.0) / 2}

    def test_state_round_trip_continues_equally(self) -> None:
        last, resumed = LastRounds(window=3), LastRounds(window=3)
        for round in range(4):
            last.update(round, {"a": float(round**2)})
        resumed.load_state_dict(last.state_dict())
        for history in (last, resumed):
            history.update(4, {"a": 16.0})
        assert resumed.mean() == last.mean() == {"a": (4 + 9 + 16) / 3}

    def test_nan_is_shown(self) -> None:
        last = LastRounds()
        last.update(0, {"a": math.nan})
        last.update(1, {"a": 1.0})
        assert math.isnan(last.mean()["a"])


class TestBestValidationRound:
    ROUNDS: tuple[dict[str, Any], ...] = (
        {"val": math.nan, "test_acc": 1.0},
        {"val": 0.4, "test_acc": 0.99},
        {"val": 0.8, "test_acc": 0.7},
        {"val": math.nan, "test_acc": 1.0},
        {"val": 0.8, "test_acc": 0.9},
        {"val": 0.2, "test_acc": 0.95},
    )

    @pytest.mark.parametrize(("mode", "round"), [("max", 2), ("min", 5)])
    def test_chooses_by_validation_and_the_first_of_equals(self, mode: Any, round: int) -> None:
        best = BestValidationRound("val", mode)
        for number, values in enumerate(self.ROUNDS):
            best.update(number, values)
        assert best.round == round
        assert best.values == self.ROUNDS[round]

    def test_before_the_first_round(self) -> None:
        best = BestValidationRound("val_acc")
        assert best.round is None
        assert best.values == {}

    def test_state_round_trip(self) -> None:
        best, resumed = BestValidationRound("val"), BestValidationRound("val")
        best.update(3, self.ROUNDS[2])
        resumed.load_state_dict(best.state_dict())
        resumed.update(4, self.ROUNDS[1])
        assert (resumed.round, resumed.values) == (3, self.ROUNDS[2])


class TestGuards:
    def test_window(self) -> None:
        with pytest.raises(ValueError, match=r"Expected `window` to be at least 1, .* window=0"):
            LastRounds(window=0)

    @pytest.mark.parametrize("history", [LastRounds(), BestValidationRound("val")])
    def test_negative_round(self, history: LastRounds | BestValidationRound) -> None:
        with pytest.raises(ValueError, match=r"Expected `round` to be non-negative, .* round=-1"):
            history.update(-1, {"val": 0.0})

    @pytest.mark.parametrize("monitor", ["test_acc", "test/acc/mean"])
    def test_test_value_as_criterion(self, monitor: str) -> None:
        with pytest.raises(ValueError, match=r"Expected `monitor` to be a validation value, but"):
            BestValidationRound(monitor)

    def test_mode(self) -> None:
        with pytest.raises(ValueError, match=r"Expected `mode` to be 'max' or 'min', .* mode='up'"):
            BestValidationRound("val_acc", mode="up")  # type: ignore[arg-type]

    def test_missing_value(self) -> None:
        with pytest.raises(ValueError, match=r"Expected `values` to have 'val', but got \['x'\]"):
            BestValidationRound("val").update(0, {"x": 1.0})


def test_values_of_a_prefix_are_forgotten() -> None:
    last = LastRounds()
    assert last.latest() == frozenset()
    last.update(0, {"a": 1.0, "b/a": 2.0})
    last.update(1, {"a": 3.0, "b/c": 4.0})
    assert last.latest() == {"a", "b/c"}
    last.forget("b/")
    assert last.mean() == {"a": 2.0}
