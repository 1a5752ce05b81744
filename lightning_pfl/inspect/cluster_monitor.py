"""ClusterMonitor: the clusters of clients, round by round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.functional import pad

from lightning_pfl.contract.callback import RoundValues, require_federation
from lightning_pfl.contract.records import Round
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.inspect.board import (
    check_every,
    new_figure,
    require_place,
    show,
    takes_pictures,
    whole_numbers,
)
from lightning_pfl.inspect.known_clusters import KnownClusters, resolve_known_clusters
from lightning_pfl.metrics import adjusted_rand_index

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = 20
"""Clusters that the best colours are enough for; more get colours of their own from a scale."""
GOLDEN = (5**0.5 - 1) / 2
"""Step on that scale, in parts of it: consecutive clusters lie far apart."""


class ClusterMonitor(RoundValues):
    """Shows the clusters of a method that forms some, such as CFL, IFCA or ConvexClustering.

    Logs ``clusters/number`` in every round and, with known clusters, ``clusters/ari``: the adjusted
    Rand index, 1 for the known clusters and about 0 by chance. Clients without a cluster don't
    count. ConvexClustering's clusters are those of its differences :math:`z`, which start at 0, so
    that it starts with one cluster. TensorBoard also gets the picture ``clusters``: clients against
    rounds, coloured by cluster, in every ``every_n_rounds`` th round and after the last one. A
    cluster keeps its colour as long as it keeps most of its clients.

    Args:
        known_clusters: Clusters to compare with: one for each client, or the number of blocks of
            clients in the order of their ids, whose sizes differ by one at most, as with
            ``FeatureSkew``. The picture then sorts the clients by cluster.
        every_n_rounds: Rounds between pictures, at least 1.

    Raises:
        ValueError: If ``every_n_rounds`` is below 1, or ``known_clusters`` doesn't fit the clients.
        MisconfigurationException: At the start of a run with a method without clusters.

    Example:
        >>> ClusterMonitor(known_clusters=4).known_clusters
        4
    """

    def __init__(self, known_clusters: KnownClusters = None, every_n_rounds: int = 10) -> None:
        check_every(every_n_rounds)
        check_types(ClusterMonitor.__init__, {"known_clusters": known_clusters})
        self.known_clusters, self.every_n_rounds = known_clusters, every_n_rounds
        self.rounds: dict[int, Tensor] = {}
        """Each client's cluster, int64 ``(clients,)``, after the rounds in which one changed."""
        self._last = self._drawn = -1

    # --- hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Clear the rounds of another fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.rounds, self._values, self._last, self._drawn = {}, {}, -1, -1
            if takes_pictures(trainer):
                require_place(trainer, self)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require a method with clusters, and known clusters that fit."""
        federation = require_federation(trainer, self)
        if federation.method.clusters(federation.server) is None:
            raise MisconfigurationException(
                "Expected a method that forms clusters for ClusterMonitor, but got "
                f"{type(federation.method).__name__}. Use CFL, IFCA, ClusterOracle or "
                "ConvexClustering, or remove ClusterMonitor."
            )
        resolve_known_clusters(self.known_clusters, federation.num_clients)
        # Clients that joined were in no cluster before.
        self.rounds = {
            number: pad(found, (0, federation.num_clients - len(found)), value=-1)
            for number, found in self.rounds.items()
        }

    def on_round_end(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Record the clusters."""
        federation = require_federation(trainer, self)
        found = federation.method.clusters(federation.server)
        assert found is not None, "asked at the start of the fit"
        found = found.cpu()
        before = self.rounds.get(max(self.rounds, default=-1))
        if before is None or not torch.equal(before, found):
            self.rounds[round.number] = found
        self._last = round.number
        known = found >= 0
        values = {"clusters/number": float(len(found[known].unique()))}
        known_clusters = resolve_known_clusters(self.known_clusters, federation.num_clients)
        if known_clusters is not None and known.any():
            values["clusters/ari"] = adjusted_rand_index(found[known], known_clusters[known])
        self._values = values
        if (round.number + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round unless it was drawn."""
        self._draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the rounds so far, for checkpoints."""
        return {**super().state_dict(), "rounds": dict(self.rounds), "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rounds of `state_dict`."""
        super().load_state_dict(state_dict)
        self.rounds, self._last = dict(state_dict["rounds"]), state_dict["last"]

    def _draw(self, trainer: L.Trainer) -> None:
        if self._last == self._drawn or not takes_pictures(trainer) or not self.rounds:
            return
        self._drawn = self._last
        known_clusters = resolve_known_clusters(
            self.known_clusters, require_federation(trainer, self).num_clients
        )
        show(
            trainer, "clusters", draw_clusters(self.rounds, self._last, known_clusters), self._last
        )


def recoloured(history: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Renumber clusters so that one that keeps most of its clients keeps its number.

    Consecutive rounds are matched so that as many clients as possible keep their number; a new
    cluster gets the smallest unused one.

    Args:
        history: Each client's cluster by round, int64 ``(clients,)``; -1 if unknown.

    Example:
        >>> recoloured({0: torch.tensor([0, 0, 1, 1]), 1: torch.tensor([0, 1, 2, 2])})
        {0: tensor([0, 0, 1, 1]), 1: tensor([0, 2, 1, 1])}
    """
    from scipy.optimize import linear_sum_assignment

    found: dict[int, Tensor] = {}
    before: Tensor | None = None
    for number in sorted(history):
        labels = history[number]
        names, at = labels.unique(return_inverse=True)
        new = torch.full((len(names),), -1)
        if before is not None:
            old, where = before.unique(return_inverse=True)
            shared = torch.zeros(len(names), len(old), dtype=torch.int64)
            shared.index_put_((at, where), torch.ones_like(at), accumulate=True)
            shared[names < 0], shared[:, old < 0] = 0, 0
            for row, column in zip(*linear_sum_assignment(-shared.numpy()), strict=True):
                if shared[row, column] > 0:
                    new[row] = old[column]
        # Unmatched clusters get unused numbers from 0, in their order.
        waiting = (names >= 0) & (new < 0)
        free = [color for color in range(len(names)) if color not in new.tolist()]
        new[waiting] = torch.tensor(free[: int(waiting.sum())], dtype=torch.int64)
        before = new[at]
        found[number] = before
    return found


def draw_clusters(
    history: Mapping[int, Tensor], last: int, known_clusters: Tensor | None = None
) -> Figure:
    """Draw each client's cluster against the rounds; grey if unknown.

    Args:
        history: Each client's cluster after the rounds in which one changed, ``(clients,)``.
        last: The last round.
        known_clusters: Known clusters ``(clients,)``, by which the clients are sorted.
    """
    colored, first = recoloured(history), min(history)
    columns, current = [], colored[first]
    for number in range(first, last + 1):
        current = colored.get(number, current)
        columns.append(current)
    matrix = torch.stack(columns, 1)
    order = (
        torch.arange(len(matrix)) if known_clusters is None else known_clusters.argsort(stable=True)
    )
    figure, axes = new_figure(8.0, 5.0)
    axes.imshow(
        colours_of(matrix[order].numpy()),
        aspect="auto",
        interpolation="nearest",
        # Half a cell on each side centres cells on round and client.
        extent=(first - 0.5, last + 0.5, len(matrix) - 0.5, -0.5),
    )
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    if known_clusters is not None:
        _mark_groups(axes, known_clusters[order].numpy())
    number = len(matrix[:, -1][matrix[:, -1] >= 0].unique())
    unknown = ", grey: unknown" if (matrix < 0).any() else ""
    axes.set(xlabel="round", ylabel="client")
    axes.set_title(f"clusters: {number} after round {last}{unknown}")
    return figure


def colours_of(matrix: np.ndarray) -> np.ndarray:
    """Map entries to colours, ``(..., 3)``; light grey for -1."""
    from matplotlib import colormaps

    number = int(matrix.max(initial=0)) + 1
    if number <= COLORS:
        # The strong half of the colours first, so that consecutive numbers are easy to distinguish.
        table = colormaps["tab20"](np.arange(COLORS))[:, :3]
        table = np.concatenate([table[::2], table[1::2]])
    else:
        # A colour for each cluster; consecutive numbers lie far apart on the scale.
        table = colormaps["turbo"](np.arange(number) * GOLDEN % 1)[:, :3]
    painted: np.ndarray = np.where(matrix[..., None] < 0, np.full(3, 0.9), table[matrix.clip(0)])
    return painted


def _mark_groups(axes: Axes, known_clusters: np.ndarray) -> None:
    """Draw lines between known clusters, and label the clusters instead of the clients."""
    ends = np.flatnonzero(np.diff(known_clusters)) + 0.5
    axes.hlines(ends, *axes.get_xlim(), color="white", linewidth=2)
    borders = np.concatenate([[-0.5], ends, [len(known_clusters) - 0.5]])
    axes.set_yticks(
        (borders[1:] + borders[:-1]) / 2, [f"group {g}" for g in np.unique(known_clusters)]
    )
