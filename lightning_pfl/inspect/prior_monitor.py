"""PriorMonitor: FedMAP's clients under their prior, and the learned prior."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.contract.callback import RoundValues, require_federation
from lightning_pfl.contract.records import Round
from lightning_pfl.core.tree import Model, Tree, rows, select
from lightning_pfl.federation.federation import Federation
from lightning_pfl.inspect.board import (
    boards,
    check_every,
    new_figure,
    require_place,
    show,
    takes_pictures,
    whole_numbers,
)
from lightning_pfl.methods.fedmap import FedMAP
from lightning_pfl.priors.base import sum_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = 16
"""Largest number of clients with a curve each."""
MEASURES = {"weight": "weight", "distance": "distance from the prior's mean"}


class PriorMonitor(RoundValues):
    r"""Shows FedMAP's weights, the clients' distances from the prior, and its learned variances.

    Of a round's accepted clients: the weight :math:`\bar\omega_k` in the server's step, and the
    distance :math:`\lVert \theta_k - \mu \rVert_2` to the received mean over the parameters under
    the prior. They reveal one client with all the weight, or a prior far from all clients.

    Logs in every round ``prior/distance`` (mean over the cohort), ``prior/distance/max``,
    ``prior/weight/max`` and ``prior/effective_clients``, :math:`1 / \sum_k \bar\omega_k^2`, the
    number of equally weighted clients with the same variance of the mean. For a prior with more
    than a mean also ``prior/variance/<parameter>/min``, ``/median`` and ``/max`` over each
    parameter's entries, best seen on a logarithmic axis. TensorBoard also gets
    a logarithmic axis. TensorBoard also gets

    - histograms over the cohort, ``prior/distances`` and ``prior/weights``, and curves for each
      client (``prior/weight/<client>``, ``prior/distance/<client>``) where there are at most 16;
    - a matrix of clients and rounds for both, ``prior/weights/rounds`` and
      ``prior/distances/rounds``, in every ``every_n_rounds`` th round and after the last;
    - in the same rounds, for a prior with more than a mean, a histogram of each layer
      (``prior/variance/<parameter>``) and the quantiles of all layers (``prior/variance``), on a
      logarithmic axis if they span more than a factor of 10.

    Args:
        every_n_rounds: Rounds between pictures, at least 1.

    Raises:
        ValueError: If ``every_n_rounds`` is below 1.
        MisconfigurationException: At the start of a run with another method than FedMAP.

    Example:
        >>> PriorMonitor(every_n_rounds=5).every_n_rounds
        5
    """

    def __init__(self, every_n_rounds: int = 10) -> None:
        check_every(every_n_rounds)
        self.every_n_rounds = every_n_rounds
        self.rounds: dict[int, dict[str, Tensor]] = {}
        self._drawn = -1

    # --- hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Clear the rounds of another fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.rounds, self._values, self._drawn = {}, {}, -1
            if takes_pictures(trainer):
                require_place(trainer, self)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require a method with a prior."""
        method = require_federation(trainer, self).method
        if not isinstance(method, FedMAP):
            raise MisconfigurationException(
                f"Expected a method with a prior for PriorMonitor, but got {type(method).__name__}."
                " Use FedMAP, or remove PriorMonitor."
            )

    def on_aggregation_start(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """Measure the accepted clients."""
        self._values = {}
        accepted = round.accepted
        info = round.info.keep(accepted)
        if not len(info):
            return
        method: Any = require_federation(trainer, self).method
        uploads = round.uploads or {}
        weights = method.weights(uploads, info).cpu()
        found = {"clients": info.index.cpu(), "weight": weights}
        values = {
            "prior/weight/max": float(weights.max()),
            "prior/effective_clients": float(1 / weights.square().sum()),
        }
        device = next(iter(uploads["model"].values())).device
        received = rows(round.received or {}, accepted.nonzero().flatten().to(device))
        distance = from_mean(select(uploads["model"], method.under), method.gamma(received))
        if distance is not None:
            found["distance"] = distance
            values["prior/distance"] = float(distance.mean())
            values["prior/distance/max"] = float(distance.max())
        self._values, self.rounds[round.number] = values, found
        self._show_round(trainer, round.number)

    def on_aggregation_end(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """Measure the learned prior, and draw in due rounds."""
        federation = require_federation(trainer, self)
        self._values = {**self._values, **spans(self._learned(federation))}
        if (round.number + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round unless it was drawn."""
        self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the rounds so far, for checkpoints."""
        return {**super().state_dict(), "rounds": dict(self.rounds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        super().load_state_dict(state_dict)
        self.rounds = dict(state_dict["rounds"])

    # --- the board --------------------------------------------------------------------------------

    def _show_round(self, trainer: L.Trainer, number: int) -> None:
        found, names = self.rounds[number], require_federation(trainer, self).client_names
        for board in boards(trainer):
            for measure in (name for name in MEASURES if name in found):
                board.add_histogram(f"prior/{measure}s", found[measure], global_step=number)
                if len(names) > CURVES:
                    continue
                pairs = zip(found["clients"].tolist(), found[measure].tolist(), strict=True)
                for client, value in pairs:
                    board.add_scalar(f"prior/{measure}/{names[client]}", value, number)

    def _draw(self, trainer: L.Trainer) -> None:
        last = max(self.rounds, default=-1)
        if last == self._drawn or not takes_pictures(trainer):
            return
        self._drawn = last
        federation: Federation = require_federation(trainer, self)
        for measure in (name for name in MEASURES if name in self.rounds[last]):
            matrix = over_rounds(self.rounds, measure, federation.num_clients)
            show(trainer, f"prior/{measure}s/rounds", draw_measure(matrix, MEASURES[measure]), last)
        for name, entries in self._learned(federation).items():
            for board in boards(trainer):
                for parameter, leaf in entries.items():
                    board.add_histogram(f"prior/{name}/{parameter}", leaf, global_step=last)
            show(trainer, f"prior/{name}", draw_layers(entries, name, last), last)

    def _learned(self, federation: Federation) -> dict[str, Model]:
        method = federation.method
        assert isinstance(method, FedMAP)
        return method.prior.learned(method.gamma(federation.server))


def spans(learned: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    """Compute each parameter's minimum, median and maximum, by logged name.

    Args:
        learned: Models by kind, such as ``"variance"``; entries of any shapes.
    """
    measures: dict[str, Callable[[Tensor], Tensor]] = {
        "min": torch.min,
        "median": torch.median,
        "max": torch.max,
    }
    return {
        f"prior/{name}/{parameter}/{which}": float(measure(leaf))
        for name, entries in learned.items()
        for parameter, leaf in entries.items()
        for which, measure in measures.items()
    }


def from_mean(theta: Model, gamma: Tree) -> Tensor | None:
    """Compute Euclidean distances from the prior's mean, float64 ``(clients,)`` on the CPU.

    Args:
        theta: Parameters under the prior, ``(clients, ...)``.
        gamma: The prior's parameters, ``(clients, ...)``.

    Returns:
        The distances, or None for a prior without a mean.
    """
    if "mean" not in gamma:
        return None
    return sum_entries(lambda t, m: (t - m).square(), theta, gamma["mean"]).sqrt().cpu()


def over_rounds(
    history: Mapping[int, Mapping[str, Tensor]], measure: str, clients: int
) -> dict[int, Tensor]:
    """Make a column ``(clients,)`` for each round; NaN for clients outside the cohort."""
    columns = {}
    for number in sorted(history):
        column = torch.full((clients,), torch.nan, dtype=torch.float64)
        column[history[number]["clients"]] = history[number][measure].double()
        columns[number] = column
    return columns


def draw_measure(columns: Mapping[int, Tensor], label: str) -> Figure:
    """Draw a matrix of clients and rounds; grey where nothing was measured.

    Args:
        columns: A value per client, ``(clients,)``, for each round.
        label: Name of the values.
    """
    first, last = min(columns), max(columns)
    missing = torch.full_like(columns[first], torch.nan)
    drawn = [columns.get(number, missing) for number in range(first, last + 1)]
    matrix = torch.stack(drawn, 1).numpy()
    figure, axes = new_figure()
    axes.set_facecolor("0.85")
    # Half a cell on each side centres cells on round and client.
    extent = (first - 0.5, last + 0.5, len(matrix) - 0.5, -0.5)
    image = axes.imshow(
        matrix, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest", extent=extent
    )
    figure.colorbar(image, ax=axes, label=label)
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    axes.set(xlabel="round", ylabel="client", title=f"{label} (grey: not in the cohort)")
    return figure


def draw_layers(entries: Mapping[str, Tensor], name: str, round: int) -> Figure:
    """Draw the quantiles of each parameter's entries.

    Args:
        entries: Models' entries by parameter name, any shapes, without client axis.
        name: Name of the values.
        round: The round, from 0.
    """
    figure, axes = new_figure(8.0, max(2.8, 1.6 + 0.3 * len(entries)))
    places = np.arange(len(entries))
    curves = np.array([_quantiles(leaf) for leaf in entries.values()])
    for low, high, thickness, label in ((0, 4, 2, "all"), (1, 3, 7, "10 to 90 %")):
        axes.hlines(
            places, curves[:, low], curves[:, high], color="#4878a8", linewidth=thickness,
            alpha=0.5, label=label,
        )  # fmt: skip
    axes.plot(curves[:, 2], places, "o", color="#1f3a5f", markersize=5, label="median")
    label = name
    if (curves > 0).all() and curves.max() > 10 * curves.min():
        axes.set_xscale("log")
        label = f"{name} (logarithmic)"
    axes.set_yticks(places, list(entries))
    axes.set_ylim(len(entries) - 0.5, -0.5)
    axes.set(xlabel=label, title=f"{name} of the prior after round {round}")
    # Outside the axes, where long bars may end anywhere.
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _quantiles(leaf: Tensor) -> Sequence[float]:
    quantiles: list[float] = np.quantile(leaf.cpu().double(), (0, 0.1, 0.5, 0.9, 1)).tolist()
    return quantiles
