"""ClientGraph: a drawing of the graph between clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.graphs import Graph
from lightning_pfl.inspect.board import (
    PictureCallback,
    check_max_clients,
    new_figure,
    show,
    takes_pictures,
)
from lightning_pfl.inspect.known_clusters import KnownClusters, resolve_known_clusters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 60
"""Largest number of clients that are labelled, with their ids if names are long."""
FEW = 20
"""Largest number of clients with room for long names."""
SHORT = 6
"""Largest length of a name among more clients."""
LEGEND = 10
"""Largest number of clusters in the legend, the number of colours."""
SPRINGS = 150
"""Largest number of clients whose layout follows distances in the graph."""


class ClientGraph(PictureCallback):
    """Draws a method's graph, ``graph`` in TensorBoard, at the start of a fit.

    Edges with larger weights are thicker and darker. Clients are coloured by known clusters, or
    else by connected component.

    Args:
        known_clusters: A cluster for each client, or the number of blocks of clients in the order
            of their ids, whose sizes differ by one at most.
        max_clients: Largest number of clients to draw, the first ones, at least 2.

    Raises:
        ValueError: If ``max_clients`` is below 2, or ``known_clusters`` doesn't fit the clients.
        MisconfigurationException: At the start of a run without a logger, or with a method
            without a graph.

    Example:
        >>> ClientGraph(known_clusters=4).max_clients
        300
    """

    def __init__(self, known_clusters: KnownClusters = None, max_clients: int = 300) -> None:
        check_max_clients(max_clients, 300)
        check_types(ClientGraph.__init__, {"known_clusters": known_clusters})
        self.known_clusters, self.max_clients = known_clusters, max_clients

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the graph."""
        federation = require_federation(trainer, self)
        graph = getattr(federation.method, "graph", None)
        if not isinstance(graph, Graph):
            raise MisconfigurationException(
                "Expected a method over a graph for ClientGraph, but got "
                f"{type(federation.method).__name__}. Use FedU, GTVMin, SheafFMTL, "
                "HomologicalConstraints or ConvexClustering(graph=...), or remove ClientGraph."
            )
        known_clusters = resolve_known_clusters(self.known_clusters, federation.num_clients)
        if not takes_pictures(trainer):
            return
        count = min(federation.num_clients, self.max_clients)
        names = federation.client_names[:count]
        figure = draw_graph(
            graph, names, None if known_clusters is None else known_clusters[:count]
        )
        show(trainer, "graph", figure, federation.rounds)


def draw_graph(
    graph: Graph, names: tuple[str, ...], known_clusters: Tensor | None = None
) -> Figure:
    """Draw the first clients of a graph and the edges between them.

    Args:
        graph: The graph of all clients.
        names: Names of the clients to draw, in the order of their ids.
        known_clusters: Known clusters from 0, ``(drawn,)``, which colour the clients, with a legend
            of at most :data:`LEGEND` of them; None: connected components.
    """
    import networkx
    from matplotlib import colormaps

    count = len(names)
    drawn = graph.to_networkx().subgraph(range(count))
    known = known_clusters is not None
    if known_clusters is None:
        known_clusters = _components(drawn, count)
    places = _places(drawn)
    edges = list(drawn.edges)
    weights = np.array([drawn.edges[edge]["weight"] for edge in edges])
    equal = not len(weights) or weights.min() == weights.max()
    strength = np.full(len(weights), 0.4) if equal else weights / weights.max()
    # Opaque lines would merge to one black area.
    depth = min(0.7, 0.2 + 20 / max(len(edges), 1))
    figure, axes = new_figure(7.0, 6.0)
    networkx.draw_networkx_edges(
        drawn,
        places,
        edges,
        ax=axes,
        width=list(0.4 + 1.8 * strength),
        edge_color=[(0.0, 0.0, 0.0, depth * (0.4 + 0.6 * share)) for share in strength],
    )
    palette = colormaps["tab10"]
    networkx.draw_networkx_nodes(
        drawn,
        places,
        range(count),
        ax=axes,
        node_size=260 if count <= NAMED else max(12, 9000 // count),
        node_color=[palette(group % 10) for group in known_clusters.tolist()],
    )
    if count <= NAMED:
        fit = count <= FEW or max(map(len, names)) <= SHORT
        labels = {k: name if fit else str(k) for k, name in enumerate(names)}
        networkx.draw_networkx_labels(drawn, places, labels, ax=axes, font_size=8)
    if known:
        _add_legend(axes, known_clusters)
    axes.set_axis_off()
    axes.set_title(_title(graph, count))
    return figure


def _add_legend(axes: Axes, known_clusters: Tensor) -> None:
    """Add a legend of colours and clusters; beyond :data:`LEGEND` colours repeat."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    palette, numbers = colormaps["tab10"], known_clusters.unique().tolist()
    marks = [
        Line2D([], [], marker="o", linestyle="", color=palette(group % 10), label=f"group {group}")
        for group in numbers[:LEGEND]
    ]
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _components(drawn: Any, count: int) -> Tensor:
    import networkx

    found = torch.zeros(count, dtype=torch.int64)
    for number, members in enumerate(networkx.connected_components(drawn)):
        found[list(members)] = number
    return found


def _places(drawn: Any) -> dict[int, np.ndarray]:
    """Lay out the components next to each other, the largest first."""
    import networkx

    parts = [drawn.subgraph(part) for part in networkx.connected_components(drawn)]
    width = max(np.sqrt(1.5 * len(drawn)), *(np.sqrt(len(part)) for part in parts), 1.0)
    found: dict[int, np.ndarray] = {}
    left = bottom = height = 0.0
    for part in sorted(parts, key=len, reverse=True):
        side = float(np.sqrt(len(part)))
        if left > 0 and left + side > width:
            left, bottom, height = 0.0, bottom - height, 0.0
        height = max(height, 1.2 * side)
        corner = np.array([left + side / 2, bottom - side / 2])
        for client, place in _layout(part).items():
            found[client] = corner + 0.5 * side * np.asarray(place)
        left += 1.2 * side
    return found


def _layout(part: Any) -> Any:
    """Lay out a connected graph in a square from -1 to 1: a circle if dense, else by distances."""
    import networkx

    count = len(part)
    if count == 1:
        return dict.fromkeys(part, np.zeros(2))
    if 4 * part.number_of_edges() > count * (count - 1):
        return networkx.circular_layout(part)
    if count <= SPRINGS:
        return networkx.kamada_kawai_layout(part, weight=None)
    return networkx.spring_layout(part, seed=0, weight=None)


def _title(graph: Graph, count: int) -> str:
    neighbours = graph.mask.sum(1)
    few, many = (int(neighbours.min()), int(neighbours.max())) if len(graph) else (0, 0)
    parts = "1 component" if graph.components == 1 else f"{graph.components} components"
    each = f"{few}" if few == many else f"{few} to {many}"
    first = "" if count == len(graph) else f"the first {count} of "
    return (
        f"{first}{len(graph)} clients with {each} neighbours: {graph.edges.shape[1]} edges, {parts}"
    )
