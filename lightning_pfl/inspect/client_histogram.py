"""ClientHistogram: the distribution of a metric over clients, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederatedCallback, require_federation
from lightning_pfl.contract.records import ClientResults
from lightning_pfl.inspect.board import (
    boards,
    check_every,
    new_figure,
    require_place,
    show,
    takes_pictures,
    whole_numbers,
)
from lightning_pfl.inspect.evaluated import check_metrics, client_values, evaluated
from lightning_pfl.metrics.summary import summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 40
"""Largest number of clients that are all named."""
WORST = 5
"""Number of worst clients that are named where not all are."""
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class ClientHistogram(FederatedCallback):
    """Shows the distribution of metrics over clients: histograms, sorted bars and quantiles.

    For each evaluated name in ``metrics``, under ``clients/<name>`` in TensorBoard: the histogram
    over clients of every evaluation; in every ``every_n_rounds`` th round and the last one a bar
    for each client, sorted (``/sorted``); at the end of a fit the quantiles over the rounds
    (``/rounds``). They reveal worst clients that fall while the mean rises.

    Args:
        metrics: Validated values, such as ``"val_acc"``, ``"global/val_acc"`` or ``"ft/val_acc"``.
            In a test ``test`` replaces ``val``, and names without a value are left out.
        every_n_rounds: Rounds between pictures of sorted bars, at least 1.

    Raises:
        ValueError: If ``every_n_rounds`` is below 1, ``metrics`` is empty, or a validation doesn't
            log one of them.
        MisconfigurationException: At the start of a run without a logger.

    Example:
        >>> ClientHistogram(metrics=["val_acc", "ft/val_acc"]).metrics
        ('val_acc', 'ft/val_acc')
    """

    def __init__(self, metrics: Sequence[str] = ("val_acc",), every_n_rounds: int = 10) -> None:
        check_every(every_n_rounds)
        self.metrics, self.every_n_rounds = check_metrics(metrics), every_n_rounds
        self.rounds: dict[str, dict[int, list[float]]] = {}
        self._drawn = -1

    # --- hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require a TensorBoard logger, and clear the rounds of another fit."""
        super().setup(trainer, pl_module, stage)
        require_place(trainer, self)
        if stage == "fit":
            self.rounds, self._drawn = {}, -1

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        """Draw the clients of a validation or of a test."""
        fitting = trainer.state.fn == "fit"
        # What is added after the last round is drawn at the end.
        if takes_pictures(trainer) and (trainer.validating or not fitting):
            self._draw(trainer, results, not fitting or self._is_due(trainer.current_epoch))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last evaluation unless it was drawn, and the quantiles over the rounds."""
        results = require_federation(trainer, self).client_results.get("val")
        if results is None or not takes_pictures(trainer):
            return
        for name in evaluated(self.metrics, results):
            history = self.rounds.get(name, {})
            last = max(history, default=0)
            if self._drawn < last:
                values, counts, better = client_values(results, name)
                figure = draw_sorted(values, counts, name, last, better, results.names)
                show(trainer, f"clients/{name}/sorted", figure, last)
            if len(history) > 1:
                show(trainer, f"clients/{name}/rounds", draw_quantiles(history, name), last)

    def state_dict(self) -> dict[str, Any]:
        """Return the quantiles so far, for checkpoints."""
        return {"rounds": {name: dict(history) for name, history in self.rounds.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        self.rounds = {name: dict(history) for name, history in state_dict["rounds"].items()}

    # --- drawing ----------------------------------------------------------------------------------

    def _is_due(self, round: int) -> bool:
        return (round + 1) % self.every_n_rounds == 0

    def _draw(self, trainer: L.Trainer, results: ClientResults, bars: bool) -> None:
        round = max(results.round, 0)
        for name in evaluated(self.metrics, results):
            values, counts, better = client_values(results, name)
            seen = values[counts > 0]
            finite = seen[seen.isfinite()]
            for board in boards(trainer) if len(finite) else ():
                board.add_histogram(f"clients/{name}", finite, global_step=round)
            if trainer.state.fn == "fit":
                quantiles = torch.quantile(seen, torch.tensor(QUANTILES, dtype=seen.dtype))
                self.rounds.setdefault(name, {})[round] = quantiles.tolist()
            if bars:
                self._drawn = round
                figure = draw_sorted(values, counts, name, round, better, results.names)
                show(trainer, f"clients/{name}/sorted", figure, round)


def draw_sorted(
    values: Tensor,
    counts: Tensor,
    name: str,
    round: int,
    better: bool,
    clients: Sequence[str] = (),
) -> Figure:
    """Draw one bar per client, best to worst, and name all clients, or the worst ones.

    Args:
        values: ``(clients,)``.
        counts: Samples of each client, ``(clients,)``; clients without samples are left out.
        name: The value's name.
        round: The round, from 0.
        better: Whether a larger value is better.
        clients: The clients' names.
    """
    summary = summarize(values, counts, better)
    with_samples = (counts > 0).cpu().nonzero().flatten()
    order = with_samples[values[with_samples].argsort(descending=better, stable=True)]
    ordered = values[order].numpy()
    named = [clients[k] for k in order.tolist()] if clients else []
    figure, axes = new_figure()
    # Lines between bars, unless they are too narrow.
    edge = 0.5 if len(ordered) <= 100 else 0.0
    middles = np.arange(len(ordered)) + 0.5
    axes.bar(middles, ordered, width=1.0, color="#9bb8d3", edgecolor="white", linewidth=edge)
    for statistic, style, label in (("", "-", "mean"), ("worst_decile", "--", "worst decile")):
        level = summary[statistic]
        axes.axhline(level, color="#a01c1c", linestyle=style, label=f"{label} {level:.3f}")
    axes.set_xlim(0, len(ordered))
    axes.set_ylim(bottom=min(0.0, float(np.nan_to_num(ordered).min())))
    axes.set(ylabel=name, title=f"{name} after round {round}")
    if len(named) <= NAMED:
        axes.set_xticks(middles[: len(named)], named, rotation=90, fontsize=7)
        axes.set_xlabel("client, best to worst")
    else:
        worst = ", ".join(reversed(named[-WORST:]))
        axes.set_xticks([])
        axes.set_xlabel(f"{len(ordered)} clients, best to worst; the worst are {worst}")
    axes.legend(loc="lower left" if better else "upper left", frameon=True)
    return figure


def draw_quantiles(history: Mapping[int, Sequence[float]], name: str) -> Figure:
    """Draw the quantiles over clients against the rounds.

    Args:
        history: The :data:`QUANTILES` of each round.
        name: The value's name.
    """
    rounds = sorted(history)
    curves = list(zip(*(history[round] for round in rounds), strict=True))
    figure, axes = new_figure()
    bands = ((0, 6, 0.15, "all clients"), (1, 5, 0.3, "10 to 90 %"), (2, 4, 0.5, "25 to 75 %"))
    for low, high, alpha, label in bands:
        axes.fill_between(
            rounds,
            curves[low],
            curves[high],
            color="#4878a8",
            alpha=alpha,
            linewidth=0,
            label=label,
        )
    axes.plot(rounds, curves[3], color="#1f3a5f", label="median")
    axes.set(xlabel="round", ylabel=name, title=f"{name} over clients")
    axes.margins(x=0)
    whole_numbers(axes.xaxis)
    axes.legend(loc="best")
    return figure
