"""PairwiseDistance: distances between the clients' models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, floats, select
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.federation import Federation
from lightning_pfl.inspect.board import (
    PictureCallback,
    check_every,
    check_max_clients,
    first_of,
    new_figure,
    show,
    takes_pictures,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 40
"""Largest number of clients that are labelled where they are sorted by cluster."""


class PairwiseDistance(PictureCallback):
    r"""Draws the distances :math:`\lVert \theta_j - \theta_k \rVert_2` between the clients' models.

    A matrix of clients, under ``distance`` in TensorBoard, in every ``every_n_rounds`` th round and
    after the last one. Similar clients with consecutive ids make dark blocks on the diagonal; for
    a method that forms clusters the clients are sorted by cluster, with a frame around each.
    Parameters and floating-point buffers count.

    Args:
        part: Entries to compare: ``"personal"`` (entries that differ between clients with this
            method, by client or by cluster), ``"all"``, or names, globs and module types.
        every_n_rounds: Rounds between pictures, at least 1.
        max_clients: Largest number of clients to draw, the first ones, at least 2.

    Raises:
        ValueError: If a number is out of its range.
        MisconfigurationException: At the start of a run without a logger, or if
            ``part="personal"`` and all clients have the same model.

    Example:
        >>> PairwiseDistance(part="head", every_n_rounds=5).part
        'head'
    """

    reads_clients: ClassVar[bool] = True

    def __init__(
        self, part: ParameterSpec = "personal", every_n_rounds: int = 10, max_clients: int = 256
    ) -> None:
        check_types(PairwiseDistance.__init__, locals())
        check_every(every_n_rounds)
        check_max_clients(max_clients, 256)
        self.part, self.every_n_rounds, self.max_clients = part, every_n_rounds, max_clients
        self._drawn = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require entries to compare."""
        federation = require_federation(trainer, self)
        if len(federation.architectures) > 1:
            names = ", ".join(repr(architecture.name) for architecture in federation.architectures)
            raise MisconfigurationException(
                "Expected one architecture for PairwiseDistance, but got ClientModules with "
                f"{names}. Remove PairwiseDistance, or use it in a fit of one architecture's "
                "clients."
            )
        self._names(federation)
        self._drawn = -1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw if the round is due."""
        if (trainer.current_epoch + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round unless it was drawn."""
        self._draw(trainer)

    def _draw(self, trainer: L.Trainer) -> None:
        federation = require_federation(trainer, self)
        round = federation.rounds - 1
        if round == self._drawn or not takes_pictures(trainer):
            return
        self._drawn = round
        clients = torch.arange(min(federation.num_clients, self.max_clients))
        with torch.no_grad():
            models = personal_models(federation, clients)
        matrix = distances(select(models, self._names(federation)))
        figure = draw_matrix(
            matrix, round, _clusters(federation, len(clients)), federation.num_clients
        )
        show(trainer, "distance", figure, round)

    def _names(self, federation: Federation) -> frozenset[str]:
        if self.part != "personal":
            return federation.parameter_split.match(self.part, "part")
        personalized_entries = federation.method.personalized_entries(federation.parameter_split)
        if not personalized_entries:
            raise MisconfigurationException(
                "Expected a method with personal models for PairwiseDistance, but "
                f"{type(federation.method).__name__} shares all entries. Remove "
                "PairwiseDistance."
            )
        return personalized_entries


def distances(models: Model) -> Tensor:
    """Compute Euclidean distances between clients, float64 ``(clients, clients)`` on the CPU.

    Args:
        models: Models to compare, ``(clients, ...)``; integer entries are ignored.
    """
    flat = torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in floats(models).values()], 1)
    # The faster formula by inner products loses half of the digits between close clients.
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").cpu()


def _clusters(federation: Federation, count: int) -> Tensor | None:
    """Return the first clients' clusters, if the method forms some."""
    found = federation.method.clusters(federation.server)
    return None if found is None else found[:count].cpu()


def draw_matrix(
    matrix: Tensor, round: int, clusters: Tensor | None = None, of_clients: int | None = None
) -> Figure:
    """Draw a matrix of distances.

    Args:
        matrix: ``(clients, clients)``.
        round: The round, for the title.
        clusters: Each client's cluster, ``(clients,)``, by which clients are sorted and framed.
        of_clients: The number of all clients, of which the matrix has the first; None: these.
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
    title = f"distance of models after round {round}{first_of(len(matrix), of_clients)}"
    axes.set(xlabel=label, ylabel=label, title=title)
    return figure
