"""ClientHeatMap: every client's value after every evaluated round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import ClientResults
from lightning_pfl.inspect.board import (
    check_every,
    new_figure,
    require_place,
    show,
    takes_pictures,
    whole_numbers,
)
from lightning_pfl.inspect.evaluated import check_metrics, client_values, evaluated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 40
"""Largest number of clients that are all named."""


class ClientHeatMap(FederatedCallback):
    """Draws every client's value after every evaluated round, a row for each client.

    Under ``clients/<name>/map`` in TensorBoard, in every ``every_n_rounds`` th round and after the
    last one. The rows are sorted by each client's newest value, the worst client at the bottom: it
    shows who learns late, who forgets, and whether the worst clients are always the same. A client
    that wasn't evaluated in a round, or whose value is NaN, is grey.

    Args:
        metrics: Validated values, such as ``"val_acc"`` or ``"global/val_acc"``.
        every_n_rounds: Rounds between pictures, at least 1.

    Attributes:
        rounds: Values of all clients by metric and round, float64 ``(clients,)``; NaN without one.
        names: The clients' names.

    Raises:
        ValueError: If ``every_n_rounds`` is below 1, ``metrics`` is empty, or a validation doesn't
            log one of them.
        MisconfigurationException: At the start of a run without a logger.

    Example:
        >>> ClientHeatMap(metrics=["val_acc"]).metrics
        ('val_acc',)
    """

    def __init__(self, metrics: Sequence[str] = ("val_acc",), every_n_rounds: int = 10) -> None:
        check_every(every_n_rounds)
        self.metrics, self.every_n_rounds = check_metrics(metrics), every_n_rounds
        self.rounds: dict[str, dict[int, Tensor]] = {}
        self.names: tuple[str, ...] = ()
        self._better: dict[str, bool] = {}
        self._drawn = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require a place for pictures, and clear the rounds of another fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_place(trainer, self)
            self.rounds, self.names, self._better, self._drawn = {}, (), {}, -1

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        """Take note of a validation of a fit, and draw if the round is due."""
        if trainer.state.fn != "fit" or not takes_pictures(trainer):
            return
        at = self._take_names(results.names)
        for name in evaluated(self.metrics, results):
            values, counts, self._better[name] = client_values(results, name)
            unseen = counts.cpu() == 0
            everyone = torch.full((len(self.names),), torch.nan, dtype=torch.float64)
            everyone[at] = values.masked_fill(unseen, torch.nan)
            self.rounds.setdefault(name, {})[results.round] = everyone
        # What is added after the last round is drawn at the end.
        if trainer.validating and (results.round + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round unless it was drawn."""
        if takes_pictures(trainer):
            self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far, for checkpoints."""
        rounds = {name: dict(history) for name, history in self.rounds.items()}
        return {"rounds": rounds, "names": list(self.names), "better": dict(self._better)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        self.rounds = {name: dict(history) for name, history in state_dict["rounds"].items()}
        self.names, self._better = tuple(state_dict["names"]), dict(state_dict["better"])

    def _take_names(self, names: Sequence[str]) -> Tensor:
        """Give rows to clients that had none yet, and return the rows of all, int64."""
        place = {name: row for row, name in enumerate(dict.fromkeys((*self.names, *names)))}
        added = len(place) - len(self.names)
        for history in self.rounds.values() if added else ():
            for round, values in history.items():
                history[round] = torch.cat([values, values.new_full((added,), torch.nan)])
        self.names = tuple(place)
        return torch.tensor([place[name] for name in names], dtype=torch.int64)

    def _draw(self, trainer: L.Trainer) -> None:
        last = max((max(history) for history in self.rounds.values()), default=-1)
        if last <= self._drawn:
            return
        self._drawn = last
        for name, history in self.rounds.items():
            figure = draw_heat_map(history, name, self.names, self._better[name])
            show(trainer, f"clients/{name}/map", figure, last)


def draw_heat_map(
    history: Mapping[int, Tensor], name: str, clients: Sequence[str], better: bool
) -> Figure:
    """Draw a row for each client and a column for each evaluated round.

    Args:
        history: Values of all clients by round, ``(clients,)``; NaN is grey.
        name: The value's name.
        clients: The clients' names.
        better: Whether a larger value is better.
    """
    rounds = sorted(history)
    matrix = torch.stack([history[round] for round in rounds], 1)
    # By the newest value, as a round may have evaluated some clients alone.
    latest = torch.full((len(clients),), torch.nan, dtype=torch.float64)
    for values in matrix.unbind(1):
        latest = values.where(~values.isnan(), latest)
    # Best at the top; who has no value is at the bottom.
    worst = -torch.inf if better else torch.inf
    order = latest.nan_to_num(worst).argsort(descending=better, stable=True)
    few = len(clients) <= NAMED
    figure, axes = new_figure(8.0, max(3.0, 0.19 * len(clients) + 1.2) if few else 5.0)
    image = axes.pcolormesh(
        edges(rounds), np.arange(len(clients) + 1) - 0.5, np.ma.masked_invalid(matrix[order])
    )
    axes.set_facecolor("0.85")
    axes.invert_yaxis()
    whole_numbers(axes.xaxis)
    if few:
        axes.set_yticks(range(len(clients)), [clients[k] for k in order.tolist()], fontsize=7)
        axes.set_ylabel("client, best to worst in the last round")
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(clients)} clients, best to worst in the last round")
    axes.set(xlabel="round", title=f"{name} of every client")
    figure.colorbar(image, ax=axes, label=name)
    return figure


def edges(rounds: Sequence[int]) -> list[float]:
    """Return the limits of the columns of ascending rounds: halfway to the next ones.

    Example:
        >>> edges([0, 1, 4])
        [-0.5, 0.5, 2.5, 5.5]
        >>> edges([3])
        [2.5, 3.5]
    """
    between = [(a + b) / 2 for a, b in pairwise(rounds)]
    first = rounds[0] - (between[0] - rounds[0] if between else 0.5)
    last = rounds[-1] + (rounds[-1] - between[-1] if between else 0.5)
    return [first, *between, last]
