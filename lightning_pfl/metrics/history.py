"""What stands at the end of a run: the last rounds' mean, and the best round by validation."""

import math
from collections.abc import Mapping
from typing import Any, Literal


class LastRounds:
    """The mean of each value over the last evaluated rounds.

    The papers' tables report it in place of the last round, which is noisy with few clients a
    round. Rounds that weren't evaluated don't count.

    Args:
        window: Number of evaluated rounds, at least 1.

    Raises:
        ValueError: If the window is smaller than 1.

    Deviation from the paper: none; FedRep averages the last 10 rounds.

    Example:
        >>> last = LastRounds(window=2)
        >>> for round, acc in [(0, 0.1), (5, 0.5), (10, 0.75)]:
        ...     last.update(round, {"test_acc": acc})
        >>> last.mean()
        {'test_acc': 0.625}

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5.
    """

    def __init__(self, window: int = 10) -> None:
        if window < 1:
            raise ValueError(
                f"Expected `window` to be at least 1, but got window={window!r}. "
                "Use 1 for the last round alone."
            )
        self.window = window
        self.rounds: dict[int, dict[str, float]] = {}

    def update(self, round: int, values: Mapping[str, float]) -> None:
        """Take the values of one evaluated round.

        A second call for a round adds to it: its new values replace old ones of the same name. A
        run resumed from an earlier round drops the rounds after it.

        Args:
            round: The round's number, at least 0.
            values: Named values, for instance ``{"test_acc": 0.8}``.

        Raises:
            ValueError: If the round is negative.
        """
        _check_round(round)
        kept = {number: old for number, old in self.rounds.items() if number <= round}
        kept[round] = {**kept.get(round, {}), **{k: float(v) for k, v in values.items()}}
        self.rounds = dict(sorted(kept.items())[-self.window :])

    def latest(self) -> frozenset[str]:
        """Return the names that the last evaluated round has a value for."""
        return frozenset(self.rounds[max(self.rounds)]) if self.rounds else frozenset()

    def forget(self, prefix: str) -> None:
        """Drop the values whose names begin so, from all rounds."""
        self.rounds = {
            number: {k: v for k, v in values.items() if not k.startswith(prefix)}
            for number, values in self.rounds.items()
        }

    def mean(self) -> dict[str, float]:
        """Return the mean of each name over those of the last rounds that have a value for it."""
        names = dict.fromkeys(name for values in self.rounds.values() for name in values)
        return {
            name: math.fsum(found) / len(found)
            for name in names
            if (found := [values[name] for values in self.rounds.values() if name in values])
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"rounds": {number: dict(values) for number, values in self.rounds.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.rounds = {number: dict(values) for number, values in state["rounds"].items()}


class BestValidationRound:
    """The values of the round that is best in validation.

    Choosing the round by its test value instead would report the maximum of a noisy sequence, which
    is too high in expectation. So a test value is refused as the criterion.

    Args:
        monitor: Name of the criterion, for instance ``"val_acc"``.
        mode: Whether the largest (``"max"``) or the smallest (``"min"``) is the best.

    Attributes:
        round: The best round, None before the first. Of equal rounds it is the first.
        values: All values of that round.

    Raises:
        ValueError: If ``monitor`` is a test value or ``mode`` is unknown.

    Example:
        >>> best = BestValidationRound("val_acc")
        >>> best.update(0, {"val_acc": 0.75, "test_acc": 0.5})
        >>> best.update(1, {"val_acc": 0.5, "test_acc": 0.75})
        >>> best.round, best.values["test_acc"]
        (0, 0.5)
    """

    def __init__(self, monitor: str, mode: Literal["max", "min"] = "max") -> None:
        if monitor.startswith("test"):
            raise ValueError(
                f"Expected `monitor` to be a validation value, but got monitor={monitor!r}. "
                "Choosing a round by its test value makes the reported value too good: monitor "
                "the same value of the validation data."
            )
        if mode not in ("max", "min"):
            raise ValueError(
                f"Expected `mode` to be 'max' or 'min', but got mode={mode!r}. "
                "Use 'max' for an accuracy, 'min' for a loss."
            )
        self.monitor = monitor
        self.mode = mode
        self.round: int | None = None
        self.values: dict[str, float] = {}

    def update(self, round: int, values: Mapping[str, float]) -> None:
        """Take the values of one evaluated round; NaN in validation is never the best.

        Args:
            round: The round's number, at least 0.
            values: Named values, the monitored one among them.

        Raises:
            ValueError: If the round is negative or the monitored value is missing.
        """
        _check_round(round)
        if self.monitor not in values:
            raise ValueError(
                f"Expected `values` to hold {self.monitor!r}, but got {sorted(values)}. "
                "Evaluate on the validation data in the same round, or monitor another value."
            )
        value = float(values[self.monitor])
        if math.isnan(value) or (self.round is not None and not self._is_better(value)):
            return
        self.round, self.values = round, {name: float(v) for name, v in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"round": self.round, "values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.round, self.values = state["round"], dict(state["values"])

    def _is_better(self, value: float) -> bool:
        best = self.values[self.monitor]
        return value > best if self.mode == "max" else value < best


def _check_round(round: int) -> None:
    if round < 0:
        raise ValueError(
            f"Expected `round` to be non-negative, but got round={round!r}. "
            "Give the number of the round, counted from 0."
        )
