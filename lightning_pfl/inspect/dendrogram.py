"""Pictures of convex clustering's regularisation path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.inspect.board import new_figure
from lightning_pfl.solvers.clusters import Labels, number_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
"""Colours of known clusters."""


def joining_weights(clusters: Tensor, weights: Sequence[float]) -> Tensor:
    """Find the weight from which on two clients are in one cluster, float64 ``(n, n)``.

    Pairs that are separate at the largest weight get infinity. A pair may join and separate again;
    the last joining counts.

    Args:
        clusters: Clusters at each weight, int64 ``(weights, clients)``.
        weights: Ascending weights.

    Raises:
        ValueError: If the weights don't ascend.

    Example:
        >>> joining_weights(torch.tensor([[0, 1, 2], [0, 0, 1]]), [0.1, 0.2])
        tensor([[0.0000, 0.2000,    inf],
                [0.2000, 0.0000,    inf],
                [   inf,    inf, 0.0000]], dtype=torch.float64)
    """
    _check_ascending(weights)
    together = clusters.unsqueeze(2) == clusters.unsqueeze(1)
    later = together.flip(0).cummin(0).values.flip(0) if len(weights) else together
    levels = torch.tensor([*weights, float("inf")], dtype=torch.float64)
    found = levels[len(weights) - later.sum(0)]
    return found.masked_fill(torch.eye(clusters.shape[1], dtype=torch.bool), 0.0)


def _check_ascending(weights: Sequence[float]) -> None:
    if not len(weights) or any(b <= a for a, b in pairwise(weights)):
        raise ValueError(
            f"Expected `weights` to ascend, but got {list(weights)}. Sort them together with the "
            "clusters and models."
        )


def draw_dendrogram(
    clusters: Tensor, weights: Sequence[float], known_clusters: Labels | None = None
) -> Figure:
    """Draw the joining weights of all clients as a tree.

    Pairs that never join meet above the largest weight.

    Args:
        clusters: Clusters at each weight, int64 ``(weights, clients)``.
        weights: Ascending and positive.
        known_clusters: Known clusters, ``(clients,)``, which colour the clients' numbers.

    Raises:
        ValueError: If ``clusters`` doesn't have a row per weight and two clients, if the weights
            don't ascend from above 0, or if ``known_clusters`` doesn't fit the clients.
    """
    from scipy.cluster.hierarchy import dendrogram, linkage
    from scipy.spatial.distance import squareform

    if clusters.ndim != 2 or len(clusters) != len(weights) or clusters.shape[1] < 2:
        raise ValueError(
            f"Expected `clusters` of at least 2 clients at each of {len(weights)} weights, but got "
            f"the shape {tuple(clusters.shape)}. Give one row per weight and one column per client."
        )
    if weights[0] <= 0:
        raise ValueError(
            f"Expected `weights` to be positive, but got {weights[0]}. Leave out 0, which a "
            "logarithmic axis can't show."
        )
    heights = joining_weights(clusters, weights).numpy()
    top = 1.3 * weights[-1]
    tree = linkage(squareform(np.where(np.isinf(heights), top, heights)), "single")
    count = clusters.shape[1]
    known = (
        None if known_clusters is None else number_labels("known_clusters", known_clusters, count)
    )
    figure, axes = new_figure(max(6.0, 0.16 * count), 4.5)
    dendrogram(tree, ax=axes, color_threshold=0, above_threshold_color="0.35", leaf_font_size=7)
    if known is not None:
        for label in axes.get_xticklabels():
            label.set_color(COLORS[int(known[int(label.get_text())]) % len(COLORS)])
    first = min((h for h in tree[:, 2] if h > 0), default=weights[0])
    axes.set_yscale("log")
    axes.set(xlabel="client", ylabel="weight", ylim=(0.7 * first, 1.1 * top))
    if np.isinf(heights).any():
        axes.axhline(weights[-1], color="tab:red", linewidth=0.8, linestyle=":")
        axes.annotate(
            "apart at the largest weight",
            (0.01, weights[-1]),
            xycoords=("axes fraction", "data"),
            color="tab:red",
            fontsize=8,
        )
    axes.set_title("from which weight on clients share a model")
    return figure


def draw_path(
    models: Tensor, weights: Sequence[float], known_clusters: Labels | None = None
) -> Figure:
    """Draw the models' path as the weight grows.

    The plane is that of the first two principal components at the smallest weight.

    Args:
        models: ``(weights, clients, dim)``.
        weights: Ascending weights.
        known_clusters: Known clusters, ``(clients,)``, which colour the lines.

    Raises:
        ValueError: If ``models`` doesn't have a row per weight, if the weights don't ascend, or if
            ``known_clusters`` doesn't fit the clients.
    """
    _check_ascending(weights)
    if models.ndim != 3 or len(models) != len(weights):
        raise ValueError(
            f"Expected `models` to have the shape ({len(weights)}, clients, dim), but got "
            f"{tuple(models.shape)}. Stack the models of all weights."
        )
    known = (
        None
        if known_clusters is None
        else number_labels("known_clusters", known_clusters, models.shape[1])
    )
    first = models[0] - models[0].mean(0)
    axes_of = torch.linalg.svd(first, full_matrices=False).Vh[:2]
    plane = (models - models[0].mean(0)) @ axes_of.T
    if plane.shape[2] == 1:
        plane = torch.cat([plane, torch.zeros_like(plane)], 2)
    figure, axes = new_figure(6.0, 5.0)
    for client in range(plane.shape[1]):
        color = COLORS[int(known[client]) % len(COLORS)] if known is not None else "tab:blue"
        line = plane[:, client].numpy()
        axes.plot(line[:, 0], line[:, 1], color=color, linewidth=0.8, alpha=0.6)
        axes.plot(*line[0], "o", color=color, markersize=4)
        axes.plot(*line[-1], "k*", markersize=8)
    axes.set(
        xlabel="first principal component",
        ylabel="second principal component",
        title=f"models from weight {weights[0]:g} (dots) to {weights[-1]:g} (stars)",
    )
    return figure
