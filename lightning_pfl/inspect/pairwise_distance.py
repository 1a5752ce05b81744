"""PairwiseDistance: distances between the clients' models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import lightning as L
import torch
from torch import Tensor

from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.tree import Model
from lightning_pfl.inspect.board import first_of, new_figure, whole_numbers
from lightning_pfl.inspect.models_picture import ModelsPicture, flat, found_clusters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 40
"""Largest number of clients that are labelled where they are sorted by cluster."""


class PairwiseDistance(ModelsPicture):
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

    picture: ClassVar[str] = "distance"

    def draw(self, trainer: L.Trainer, models: Model, clients: Tensor, round: int) -> Figure:
        """Draw the matrix."""
        federation = require_federation(trainer, self)
        clusters = found_clusters(federation, len(clients))
        return draw_matrix(distances(models), round, clusters, federation.num_clients)


def distances(models: Model) -> Tensor:
    """Compute Euclidean distances between clients, float64 ``(clients, clients)`` on the CPU.

    Args:
        models: Models to compare, ``(clients, ...)``; integer entries are ignored.
    """
    rows = flat(models)
    # The faster formula by inner products loses half of the digits between close clients.
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


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
