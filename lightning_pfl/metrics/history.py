"""The history of a fit's evaluations, and the summary at its end."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from lightning_pfl.metrics.summary import LEFT_OUT, STANDARD_ERROR, STATISTICS

AT_END = ("last10/", "best/")
"""Prefixes of the values in a run's summary."""
_ERRORS = """
error errors err eer mse rmse nmse nrmse msle rmsle mae mape smape wmape mase medae wer cer ter mer
fpr fnr brier ece fid
"""
_LOSSES = "loss losses nll bce ce kl kld divergence ppl perplexity bpb bpc crps huber pinball"
LOWER_IS_BETTER = frozenset(f"{_ERRORS} {_LOSSES}".split())
"""Names, or parts of names, of values for which smaller is better."""


WINDOW = 10
"""Evaluated rounds in the means; FedRep's tables average as many (arXiv:2102.07078, section 5)."""


class History:
    """A history of validation values that finds their last means and the best round.

    The last round alone is noisy with small cohorts; the papers' tables report the mean over the
    last ten. The best round maximises the first value for which larger is better, else minimises
    the first value. Test values never choose it, as the best of a noisy sequence is biased. Rounds
    without that value, or with NaN for it, are no candidates.

    Attributes:
        rounds: The values of the last ten evaluated rounds.
        monitor: Name of the value that chooses the best round; None before the first evaluation.
        best_round: The best round, the first of equal ones; None without a candidate.
        best: All values of that round.

    Example:
        >>> history = History()
        >>> history.update(0, {"val_loss": 2.0, "val_acc": 0.5})
        >>> history.update(1, {"val_loss": 3.0, "val_acc": 0.25})
        >>> summary = history.summary()
        >>> summary["last10/val_acc"], summary["best/val_loss"], summary["best/round"]
        (0.375, 2.0, 0.0)
    """

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, float]] = {}
        self.monitor: str | None = None
        self.best_round: int | None = None
        self.best: dict[str, float] = {}
        self._larger = True
        self._unlogged: set[str] = set()

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
        self._unlogged = {*(self._unlogged - values.keys()), *unlogged}
        self.add(round, values)
        if self.monitor is None:
            better = {n: directions.get(n, higher_is_better(n)) for n in values}
            self.monitor = next((n for n in values if better[n]), next(iter(values)))
            self._larger = better[self.monitor]
        value = values.get(self.monitor, math.nan)
        if math.isnan(value):
            return
        if self.best_round is not None:
            best = self.best[self.monitor]
            if not (value > best if self._larger else value < best):
                return
        self.best_round, self.best = round, dict(values)

    def add(self, round: int, values: Mapping[str, float]) -> None:
        """Add values to those of an evaluated round, which don't choose the best one.

        A resumed run drops the rounds after its start.
        """
        kept = {number: old for number, old in self.rounds.items() if number <= round}
        kept[round] = {**kept.get(round, {}), **values}
        self.rounds = dict(sorted(kept.items())[-WINDOW:])

    def latest(self) -> frozenset[str]:
        """Return the names of the last evaluated round's values."""
        return frozenset(self.rounds[max(self.rounds)]) if self.rounds else frozenset()

    def forget(self, prefix: str) -> None:
        """Drop the values with a prefix from the means."""
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

    def summary(self, on_test: bool = False) -> dict[str, float]:
        """Return ``last10/<name>``, ``best/<name>`` and ``best/round``; empty without evaluations.

        Args:
            on_test: Whether the values are of test data, for which there is no best round.
        """
        if self.monitor is None:
            return {}
        summary = {f"last10/{name}": value for name, value in self.mean().items()}
        if self.best_round is not None and not on_test:
            summary |= {f"best/{name}": value for name, value in self.best.items()}
            summary["best/round"] = float(self.best_round)
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
        names = headlines(summary.keys())
        return [name for name in names if name.partition("/")[2] not in self._unlogged]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        mode = "max" if self._larger else "min"
        best = {"monitor": self.monitor, "mode": mode, "round": self.best_round}
        return {
            "last": {"rounds": {number: dict(values) for number, values in self.rounds.items()}},
            "best": None if self.monitor is None else {**best, "values": dict(self.best)},
            "unlogged": sorted(self._unlogged),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        self.monitor, self.best_round, self.best = None, None, {}
        self.rounds = {number: dict(values) for number, values in state["last"]["rounds"].items()}
        self._unlogged = set(state.get("unlogged", ()))
        if (best := state["best"]) is not None:
            self.monitor, self._larger = best["monitor"], best["mode"] == "max"
            self.best_round, self.best = best["round"], dict(best["values"])


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
        return value in names and statistic in (*STATISTICS, STANDARD_ERROR, LEFT_OUT)

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
