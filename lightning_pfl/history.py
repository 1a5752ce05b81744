"""The evaluations of a fit, and the numbers that stand at its end."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from lightning_pfl.metrics.history import BestValidationRound, LastRounds
from lightning_pfl.metrics.summary import STATISTICS

AT_END = ("last10/", "best/")
"""Prefixes of the values that stand at the end of a run."""
_ERRORS = "error errors err eer mse rmse msle rmsle mae mape smape wer cer ter mer brier ece fid"
_LOSSES = "loss losses nll bce ce kl divergence ppl perplexity bpb bpc"
LOWER_IS_BETTER = frozenset(f"{_ERRORS} {_LOSSES}".split())
"""Names, or parts of names, of values of which the smallest is the best."""


class History:
    """Collects validation values; gives the mean of the last ten rounds, and the best round.

    The best round is chosen by the first value of which more is better (largest), else by the first
    one (smallest). Only validation values come in here, so a test value never chooses anything.
    A round without the value that chooses is no candidate.

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
        """Take the values of one evaluated round, which may have none.

        Args:
            round: The round, from 0.
            values: Values by name.
            directions: Whether larger is better, where it is known by more than the name.
            unlogged: Names of values that the user keeps from the loggers.
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
        """``last10/<name>``, ``best/<name>`` and ``best/round``; empty without evaluations.

        Args:
            on_test: Whether the values were evaluated on test data: then no round is the best.
        """
        if self.best is None:
            return {}
        summary = {f"last10/{name}": value for name, value in self.last.mean().items()}
        if self.best.round is not None and not on_test:
            summary |= {f"best/{name}": value for name, value in self.best.values.items()}
            summary["best/round"] = float(self.best.round)
        return summary

    def for_loggers(self, summary: Mapping[str, float]) -> list[str]:
        """Names of a summary that loggers get: headlines, without what the user keeps from them.

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
        """Plain values for a checkpoint."""
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
        """Take over what `state_dict` returned."""
        self.last.load_state_dict(state["last"])
        self.unlogged = set(state.get("unlogged", ()))
        self.best = None
        if state["best"] is not None:
            best = state["best"]
            self.best = BestValidationRound(best["monitor"], best["mode"])
            self.best.load_state_dict(best)


def without_summary(values: Mapping[str, float]) -> dict[str, float]:
    """Values of a run's rounds, without those of its end: a resumed run has another end.

    Example:
        >>> without_summary({"val_acc": 0.5, "last10/val_acc": 0.4, "best/round": 3.0})
        {'val_acc': 0.5}
    """
    return {name: value for name, value in values.items() if not name.startswith(AT_END)}


def headlines(names: Collection[str]) -> list[str]:
    """Names without the further statistics of values that are among them.

    A logger draws each number of a run's end as a picture of its own, with one dot.

    Example:
        >>> headlines(["best/val_acc", "best/val_acc/std", "best/round", "noise/std"])
        ['best/val_acc', 'best/round', 'noise/std']
    """

    def is_further(name: str) -> bool:
        value, _, statistic = name.rpartition("/")
        return value in names and statistic in STATISTICS

    return [name for name in names if not is_further(name)]


def higher_is_better(name: str) -> bool:
    """Whether a larger value is better, to judge by the name: not for a loss or an error.

    A name is read in parts: ``"val_mse"``, ``"valMSE"`` and ``"val/mse"`` have the part ``"mse"``,
    ``"permse"`` doesn't. ``"loss"`` counts wherever it stands.

    Example:
        >>> [higher_is_better(name) for name in ("val_acc", "val_rmse", "hinge_losses", "merit")]
        [True, False, False, True]
    """
    # A word in capitals is one part; a capital after a small letter begins one.
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    lower = "loss" in name.lower() or any(part.lower() in LOWER_IS_BETTER for part in parts)
    return not lower
