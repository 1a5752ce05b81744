"""PairwiseDistance: which clients' models are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, floats, select
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.federation import Federation
from lightning_pfl.inspect.board import (
    PictureCallback,
    boards,
    check_every,
    check_max_clients,
    new_figure,
    show,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 40
"""Clients up to which each has its number at the matrix where they are sorted by cluster."""


class PairwiseDistance(PictureCallback):
    r"""Draws the distances :math:`\lVert \theta_j - \theta_k \rVert_2` between the clients' models.

    A matrix of clients, under ``distance`` in TensorBoard, in every ``every_n_rounds`` th round and
    after the last one. Groups of like clients are dark blocks on the diagonal, once they are
    neighbours in the order of the client ids: with a method that forms clusters, the clients are
    drawn cluster by cluster, with a line around each. Parameters and floating-point buffers count.

    Args:
        part: What is compared: ``"personal"`` (what differs between clients with this method: what
            never leaves them, and what each of them or each cluster has one of), ``"all"``, or
            names, globs and module types.
        every_n_rounds: Rounds between pictures, at least 1.
        max_clients: The first so many clients are drawn, at least 2; more can't be told apart.

    Raises:
        ValueError: If a number is out of its range.
        MisconfigurationException: At the start of a run without TensorBoardLogger, or if
            ``part="personal"`` and the method has one model for all.

    Example:
        >>> PairwiseDistance(part="head", every_n_rounds=5).part
        'head'
    """

    def __init__(
        self, part: ParameterSpec = "personal", every_n_rounds: int = 10, max_clients: int = 256
    ) -> None:
        check_every(every_n_rounds)
        check_max_clients(max_clients, 256)
        self.part, self.every_n_rounds, self.max_clients = part, every_n_rounds, max_clients
        self._drawn = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require something to compare."""
        federation = require_federation(trainer, self)
        if len(federation.architectures) > 1:
            names = ", ".join(repr(architecture.name) for architecture in federation.architectures)
            raise MisconfigurationException(
                "Expected one module for all clients, as PairwiseDistance compares parameters of "
                f"one shape, but got ClientModules with the groups {names}. Remove "
                "PairwiseDistance, or run it in a fit of one group's clients."
            )
        self._names(federation)
        self._drawn = -1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw if the round is due."""
        if (trainer.current_epoch + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round, if it wasn't."""
        self._draw(trainer)

    def _draw(self, trainer: Any) -> None:
        federation = require_federation(trainer, self)
        round = federation.rounds - 1
        if round == self._drawn or not boards(trainer):
            return
        self._drawn = round
        clients = torch.arange(min(federation.num_clients, self.max_clients))
        with torch.no_grad():
            models = personal_models(federation, clients)
        matrix = distances(select(models, self._names(federation)))
        figure = draw_matrix(matrix, round, _clusters(federation, len(clients)))
        show(trainer, "distance", figure, round)

    def _names(self, federation: Federation) -> frozenset[str]:
        if self.part != "personal":
            return federation.parameter_split.match(self.part, "part")
        personalized_entries = federation.method.personalized_entries(federation.parameter_split)
        if not personalized_entries:
            raise MisconfigurationException(
                "Expected a method whose clients have models of their own, but "
                f"{type(federation.method).__name__} shares the whole model: all distances are 0. "
                "Remove PairwiseDistance."
            )
        return personalized_entries


def distances(models: Model) -> Tensor:
    """Euclidean distances between clients, float64 ``(clients, clients)`` on the CPU.

    Args:
        models: What is compared, ``(clients, ...)``; integer entries don't count.
    """
    flat = torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in floats(models).values()], 1)
    # The faster formula through inner products loses half of the digits where clients are close.
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").cpu()


def _clusters(federation: Federation, count: int) -> Tensor | None:
    """The first clients' clusters, where the method forms some."""
    found = federation.method.clusters(federation.server)
    return None if found is None else found[:count].cpu()


def draw_matrix(matrix: Tensor, round: int, clusters: Tensor | None = None) -> Figure:
    """Draw a matrix of distances.

    Args:
        matrix: ``(clients, clients)``.
        round: For the title.
        clusters: Each client's cluster, ``(clients,)``, by which they are sorted; clusters are
            framed.
    """
    from matplotlib.patches import Rectangle

    figure, axes = new_figure(6.0, 5.0)
    label = "client"
    if clusters is None:
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
    else:
        order = clusters.argsort(stable=True)
        matrix, label = matrix[order][:, order], "client, by cluster"
        if len(order) <= NAMED:
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_ticks(range(len(order)), [str(k) for k in order.tolist()], fontsize=7)
        else:
            axes.set(xticks=[], yticks=[])
        first = 0
        for size in clusters.unique(return_counts=True)[1].tolist():
            corner = (first - 0.5, first - 0.5)
            axes.add_patch(Rectangle(corner, size, size, fill=False, edgecolor="white"))
            first += size
    image = axes.imshow(matrix.numpy(), cmap="viridis", vmin=0)
    figure.colorbar(image, ax=axes, label="distance")
    axes.set(xlabel=label, ylabel=label, title=f"distance of models after round {round}")
    return figure
