"""The history of a fit's evaluations, and the summary at its end."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal

from lightning_pfl.metrics.summary import STATISTICS

AT_END = ("last10/", "best/")
"""Prefixes of the values in a run's summary."""
_ERRORS = "error errors err eer mse rmse msle rmsle mae mape smape wer cer ter mer brier ece fid"
_LOSSES = "loss losses nll bce ce kl divergence ppl perplexity bpb bpc"
LOWER_IS_BETTER = frozenset(f"{_ERRORS} {_LOSSES}".split())
"""Names, or parts of names, of values for which smaller is better."""


class History:
    """A history of validation values that finds their last means and the best round.

    The best round maximises the first value for which larger is better, else minimises the first
    value. Test values never choose it. Rounds without that value are no candidates.

    Example:
        >>> history = History()
        >>> history.update(0, {"val_loss": 2.0, "val_acc": 0.5})
        >>> history.update(1, {"val_loss": 3.0, "val_acc": 0.25})
        >>> summary = history.summary()
        >>> summary["last10/val_acc"], summary["best/val_loss"], summary["best/round"]
        (0.375, 2.0, 0.0)
    """

    def __init__(self) -> None:
        self.last = LastRounds(window=10)
        self.best: BestValidationRound | None = None
        self.unlogged: set[str] = set()

    def update(
        self,
        round: int,
        values: Mapping[str, float],
        directions: Mapping[str, bool] = MappingProxyType({}),
        unlogged: Collection[str] = (),
    ) -> None:
        """Add the values of one round, possibly none.

        Args:
            round: The round, from 0.
            values: Values by name.
            directions: Whether larger is better, for names where it is known.
            unlogged: Names of values that loggers don't get.
        """
        if not values:
            return
        self.unlogged = {*(self.unlogged - values.keys()), *unlogged}
        self.last.update(round, values)
        if self.best is None:
            better = {n: directions.get(n, higher_is_better(n)) for n in values}
            name = next((n for n in values if better[n]), next(iter(values)))
            self.best = BestValidationRound(name, "max" if better[name] else "min")
        if self.best.monitor in values:
            self.best.update(round, values)

    def summary(self, on_test: bool = False) -> dict[str, float]:
        """Return ``last10/<name>``, ``best/<name>`` and ``best/round``; empty without evaluations.

        Args:
            on_test: Whether the values are of test data, for which there is no best round.
        """
        if self.best is None:
            return {}
        summary = {f"last10/{name}": value for name, value in self.last.mean().items()}
        if self.best.round is not None and not on_test:
            summary |= {f"best/{name}": value for name, value in self.best.values.items()}
            summary["best/round"] = float(self.best.round)
        return summary

    def for_loggers(self, summary: Mapping[str, float]) -> list[str]:
        """Select the names of a summary that loggers get: headlines that users log.

        Example:
            >>> history = History()
            >>> values = {"val_acc": 0.5, "val_acc/std": 0.1, "mine": 1.0}
            >>> history.update(0, values, unlogged=["mine"])
            >>> history.for_loggers(history.summary())
            ['last10/val_acc', 'best/val_acc', 'best/round']
        """
        return [
            name
            for name in headlines(summary.keys())
            if name.partition("/")[2] not in self.unlogged
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        best = (
            None
            if self.best is None
            else {
                "monitor": self.best.monitor,
                "mode": self.best.mode,
                **self.best.state_dict(),
            }
        )
        return {
            "last": self.last.state_dict(),
            "best": best,
            "unlogged": sorted(self.unlogged),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        self.last.load_state_dict(state["last"])
        self.unlogged = set(state.get("unlogged", ()))
        self.best = None
        if state["best"] is not None:
            best = state["best"]
            self.best = BestValidationRound(best["monitor"], best["mode"])
            self.best.load_state_dict(best)


def without_summary(values: Mapping[str, float]) -> dict[str, float]:
    """Drop the summary's values, which a resumed run replaces.

    Example:
        >>> without_summary({"val_acc": 0.5, "last10/val_acc": 0.4, "best/round": 3.0})
        {'val_acc': 0.5}
    """
    return {name: value for name, value in values.items() if not name.startswith(AT_END)}


def headlines(names: Collection[str]) -> list[str]:
    """Drop the names of further statistics of values in the list.

    A logger would plot each of these numbers in a figure of its own.

    Example:
        >>> headlines(["best/val_acc", "best/val_acc/std", "best/round", "noise/std"])
        ['best/val_acc', 'best/round', 'noise/std']
    """

    def is_further(name: str) -> bool:
        value, _, statistic = name.rpartition("/")
        return value in names and statistic in STATISTICS

    return [name for name in names if not is_further(name)]


def higher_is_better(name: str) -> bool:
    """Whether a larger value is better, by its name: false for losses and errors.

    A name has parts: ``"val_mse"``, ``"valMSE"`` and ``"val/mse"`` have the part ``"mse"``, but
    ``"permse"`` doesn't. ``"loss"`` counts in any position.

    Example:
        >>> [higher_is_better(name) for name in ("val_acc", "val_rmse", "hinge_losses", "merit")]
        [True, False, False, True]
    """
    # A word in capitals is one part; a capital before small letters begins one.
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    lower = "loss" in name.lower() or any(part.lower() in LOWER_IS_BETTER for part in parts)
    return not lower


class LastRounds:
    """The mean of each value over the last evaluated rounds.

    The papers' tables report it instead of the last round, which is noisy with small cohorts.

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
        """Add the values of one evaluated round.

        A second call for a round replaces values of the same name. A resumed run drops the rounds
        after its start.

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
        """Return the names of the last evaluated round's values."""
        return frozenset(self.rounds[max(self.rounds)]) if self.rounds else frozenset()

    def forget(self, prefix: str) -> None:
        """Drop the values with a prefix from all rounds."""
        self.rounds = {
            number: {k: v for k, v in values.items() if not k.startswith(prefix)}
            for number, values in self.rounds.items()
        }

    def mean(self) -> dict[str, float]:
        """Return each value's mean over those of the last rounds that have it."""
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
        """Restore the values of `state_dict`."""
        self.rounds = {number: dict(values) for number, values in state["rounds"].items()}


class BestValidationRound:
    """The values of the round that is best in validation.

    Choosing it by a test value would report the maximum of a noisy sequence, which is biased. So
    test values are refused as criterion.

    Args:
        monitor: Name of the criterion, for instance ``"val_acc"``.
        mode: Whether the largest (``"max"``) or the smallest (``"min"``) is best.

    Attributes:
        round: The best round, the first of equal ones; None before the first.
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
                "Monitor the same value of the validation data."
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
        """Add the values of one evaluated round; NaN in validation is never best.

        Args:
            round: The round's number, at least 0.
            values: Named values, the monitored one among them.

        Raises:
            ValueError: If the round is negative or the monitored value is missing.
        """
        _check_round(round)
        if self.monitor not in values:
            raise ValueError(
                f"Expected `values` to have {self.monitor!r}, but got {sorted(values)}. "
                "Validate in the same round, or monitor another value."
            )
        value = float(values[self.monitor])
        if math.isnan(value) or (self.round is not None and not self._is_better(value)):
            return
        self.round, self.values = round, {name: float(v) for name, v in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"round": self.round, "values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of `state_dict`."""
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
