"""ClientMap: the clients' models as points in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import lightning as L
import numpy as np
from torch import Tensor

from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model
from lightning_pfl.data.datasets import label_counts
from lightning_pfl.inspect.board import first_of, new_figure
from lightning_pfl.inspect.cluster_monitor import colours_of
from lightning_pfl.inspect.known_clusters import KnownClusters, resolve_known_clusters
from lightning_pfl.inspect.models_picture import ModelsPicture, flat, found_clusters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Projection = Literal["pca", "tsne"]
NAMED = 40
"""Largest number of clients that are named."""
KEYS = 20
"""Largest number of classes or clusters in the legend."""


class ClientMap(ModelsPicture):
    """Draws each client's model as a point in the plane: alike models lie near each other.

    Under ``clients/models`` in TensorBoard, in every ``every_n_rounds`` th round and after the last
    one. A client is a small pie of the classes of its training samples; with clusters, known ones
    or those that the method has found, a dot in the colour of its cluster. The plane is that of the
    two largest principal components of the models (their shares of the variance stand at the axes),
    or a t-SNE embedding, whose distances between far groups mean nothing. Parameters and
    floating-point buffers count; axes of different rounds aren't the same.

    Args:
        part: Entries to compare: ``"personal"`` (entries that differ between clients with this
            method, by client or by cluster), ``"all"``, or names, globs and module types.
        projection: ``"pca"`` or ``"tsne"``.
        known_clusters: Clusters to colour by: one for each client, or the number of blocks of
            clients in the order of their ids.
        every_n_rounds: Rounds between pictures, at least 1.
        max_clients: Largest number of clients to draw, the first ones, at least 2.

    Raises:
        ValueError: If a number is out of its range, ``projection`` is unknown, or
            ``known_clusters`` doesn't fit the clients.
        MisconfigurationException: At the start of a run without a logger, with several
            architectures, or if ``part="personal"`` and all clients have the same model.

    Example:
        >>> ClientMap(part="head", projection="tsne").projection
        'tsne'
    """

    picture: ClassVar[str] = "clients/models"

    def __init__(
        self,
        part: ParameterSpec = "personal",
        projection: Projection = "pca",
        known_clusters: KnownClusters = None,
        every_n_rounds: int = 10,
        max_clients: int = 256,
    ) -> None:
        super().__init__(part, every_n_rounds, max_clients)
        check_choice("projection", projection, get_args(Projection), "Choose one of the two.")
        check_types(ClientMap.__init__, {"known_clusters": known_clusters})
        self.projection: Projection = projection
        self.known_clusters = known_clusters

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require entries to compare, and known clusters that fit."""
        super().on_fit_start(trainer, pl_module)
        resolve_known_clusters(self.known_clusters, require_federation(trainer, self).num_clients)

    def draw(self, trainer: L.Trainer, models: Model, clients: Tensor, round: int) -> Figure:
        """Draw the map."""
        federation, loop = require_federation(trainer, self), trainer.fit_loop
        count = len(clients)
        clusters = resolve_known_clusters(self.known_clusters, federation.num_clients)
        clusters = found_clusters(federation, count) if clusters is None else clusters[:count]
        data: Any = loop
        mix = label_counts(data.require_data()) if clusters is None else None
        points, axes = project(flat(models), self.projection)
        return draw_map(
            points,
            axes,
            f"models after round {round}{first_of(count, federation.num_clients)}",
            clusters=clusters,
            mix=None if mix is None else mix[:count],
            names=federation.client_names[:count],
        )


def project(rows: Tensor, projection: Projection) -> tuple[np.ndarray, tuple[str, str]]:
    """Project models to the plane.

    Args:
        rows: Models, float64 ``(clients, entries)``, at least two.
        projection: ``"pca"`` or ``"tsne"``.

    Returns:
        Points ``(clients, 2)``, and the names of both axes.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    centred = rows - rows.mean(0)
    # Large numbers of equal size would overflow when they are squared; a map has no unit.
    largest = float(centred.abs().max())
    values = (centred / largest if largest > 0 else centred).numpy()
    if projection == "tsne" and largest > 0:
        # The default needs more than 30 clients.
        made = TSNE(perplexity=min(30.0, (len(rows) - 1) / 3), init="random", random_state=0)
        return made.fit_transform(values), ("t-SNE, first axis", "t-SNE, second axis")
    points = np.zeros((len(rows), 2))
    shares = np.zeros(2)
    if largest > 0:
        components = min(2, *values.shape)
        made = PCA(components, random_state=0)
        points[:, :components] = made.fit_transform(values) * largest
        shares[:components] = made.explained_variance_ratio_
    first, second = (f"{100 * share:.0f} % of the variance" for share in shares)
    return points, (f"first component, {first}", f"second component, {second}")


def draw_map(
    points: np.ndarray,
    axes_names: tuple[str, str],
    title: str,
    clusters: Tensor | None = None,
    mix: Tensor | None = None,
    names: Sequence[str] = (),
) -> Figure:
    """Draw clients as pies of their classes, or as dots in the colours of their clusters.

    Args:
        points: ``(clients, 2)``.
        axes_names: Names of both axes.
        title: The title.
        clusters: Each client's cluster, int64 ``(clients,)``; -1 if unknown.
        mix: Each client's samples by class, ``(clients, classes)``; without clusters.
        names: The clients' names.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Wedge

    figure, axes = new_figure(7.0, 5.5)
    span = float(np.ptp(points, axis=0).max()) or 1.0
    radius = span * (0.018 if len(points) <= 100 else 0.013)
    keys, shares = slices(len(points), clusters, mix)
    colours = colours_of(keys)
    wedges, painted = [], []
    for (x, y), row in zip(points.tolist(), shares, strict=True):
        ends = 360 * np.cumsum(row)
        for key in np.nonzero(row)[0]:
            wedges.append(Wedge((x, y), radius, ends[key] - 360 * row[key], ends[key]))
            painted.append(colours[key])
    axes.add_collection(PatchCollection(wedges, facecolors=painted, linewidths=0))
    axes.set_aspect("equal", adjustable="datalim")
    axes.update_datalim(points)
    axes.margins(0.08)
    axes.autoscale_view()
    if 0 < len(names) <= NAMED:
        middle = (points[:, 0].min() + points[:, 0].max()) / 2
        for rows in touching(points, 2.5 * radius):
            label = ", ".join(names[row] for row in rows)
            # Towards the middle, where no legend is.
            right = points[rows, 0].mean() > middle
            at = min(rows, key=lambda row: points[row, 0] * (1 if right else -1))
            side, away = ("right", -5) if right else ("left", 5)
            axes.annotate(
                label, points[at], (away, 4), textcoords="offset points", fontsize=7, ha=side
            )
    if (clusters is not None or mix is not None) and len(keys) <= KEYS:
        kind = "class" if clusters is None else "cluster"
        patches = [
            Patch(color=colour, label=f"{kind} {key}" if key >= 0 else "unknown")
            for key, colour, held in zip(keys.tolist(), colours, shares.sum(0), strict=True)
            if held > 0
        ]
        axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set(xlabel=axes_names[0], ylabel=axes_names[1], title=title)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure


def touching(points: np.ndarray, distance: float) -> list[list[int]]:
    """Put points together that are near the first one of their group.

    Args:
        points: ``(points, 2)``.
        distance: The largest distance.

    Returns:
        Groups of rows, each row in one.

    Example:
        >>> touching(np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 1.0]]), 2.0)
        [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    for row, point in enumerate(points):
        near = (group for group in groups if np.hypot(*(points[group[0]] - point)) <= distance)
        group = next(near, None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def slices(
    clients: int, clusters: Tensor | None, mix: Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the slices of the clients' pies.

    Args:
        clients: Number of clients.
        clusters: See :func:`draw_map`.
        mix: See :func:`draw_map`.

    Returns:
        The clusters or classes, int64 ``(keys,)``, with -1 for clients of none; and each client's
        share of each, float64 ``(clients, keys)``, whose rows sum to 1.

    Example:
        >>> import torch
        >>> keys, shares = slices(2, None, torch.tensor([[3, 1], [0, 0]]))
        >>> keys.tolist(), shares.tolist()
        ([-1, 0, 1], [[0.0, 0.75, 0.25], [1.0, 0.0, 0.0]])
    """
    if clusters is not None:
        keys, at = clusters.unique(return_inverse=True)
        return keys.numpy(), np.eye(len(keys))[at.numpy()]
    counts = np.ones((clients, 1)) if mix is None else mix.double().numpy()
    total = counts.sum(1, keepdims=True)
    shares = np.concatenate([total == 0, counts / np.maximum(total, 1)], 1)
    return np.arange(-1, counts.shape[1]), shares
