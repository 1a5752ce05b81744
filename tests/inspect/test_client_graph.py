"""The picture of a graph: its clients, edges, groups and parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_pfl.graphs import SmallWorld, resolve_graph
from lightning_pfl.inspect import ClientGraph
from lightning_pfl.inspect.client_graph import draw_graph
from lightning_pfl.methods import ConvexClustering, FedAvg, FedU
from lightning_pfl.methods.base import Method
from tests.callbacks.setting import quadratics, split, trainer
from tests.inspect.board import Board, count_colours

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


def names(count: int) -> tuple[str, ...]:
    return tuple(f"site {k}" for k in range(count))


def segments(axes: Any) -> np.ndarray:
    """Ends of the drawn edges, ``(edges, 2, 2)``."""
    return np.asarray(axes.collections[0].get_segments())


def places(axes: Any) -> np.ndarray:
    """Where the clients are, ``(clients, 2)``."""
    return np.asarray(axes.collections[1].get_offsets())


@pytest.mark.parametrize("given", ["complete", "ring", "erdos_renyi"])
def test_every_edge_joins_its_two_clients(given: str) -> None:
    graph = resolve_graph(given, 12)
    axes = draw_graph(graph, names(12)).axes[0]
    found, where = segments(axes), places(axes)
    assert len(where) == 12
    ends = {
        frozenset(int(np.abs(where - end).sum(1).argmin()) for end in segment) for segment in found
    }
    assert ends == {frozenset(edge) for edge in graph.edges.T.tolist()}
    for segment in found:
        for end in segment:
            np.testing.assert_allclose(np.abs(where - end).sum(1).min(), 0, atol=1e-9)
    assert [text.get_text() for text in axes.texts] == [f"site {k}" for k in range(12)]


def test_long_names_give_way_to_ids_where_there_are_many() -> None:
    for count, shown in ((20, "a long name 3"), (21, "3")):
        long = tuple(f"a long name {k}" for k in range(count))
        axes = draw_graph(resolve_graph("ring", count), long).axes[0]
        assert axes.texts[3].get_text() == shown


def test_heavier_edges_are_thicker() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 4.0], [0.0, 4.0, 0.0]])
    axes: Any = draw_graph(resolve_graph(weights, 3), names(3)).axes[0]
    thin, thick = axes.collections[0].get_linewidths()
    assert thin < thick
    equal: Any = draw_graph(resolve_graph("ring", 4), names(4)).axes[0]
    assert len(set(equal.collections[0].get_linewidths())) == 1


def test_groups_have_colours_or_else_components() -> None:
    two = torch.zeros(5, 5)
    two[0, 1] = two[1, 0] = two[2, 3] = two[3, 2] = 1.0
    graph = resolve_graph(two, 5)
    for known_clusters, expected in (
        (None, [0, 0, 1, 1, 2]),
        (torch.tensor([0, 1, 0, 1, 0]), [0, 1] * 2),
    ):
        axes: Any = draw_graph(graph, names(5), known_clusters).axes[0]
        colors = [tuple(color) for color in axes.collections[1].get_facecolors()]
        for i, one in enumerate(expected):
            for j, other in enumerate(expected):
                assert (colors[i] == colors[j]) == (one == other)
        assert axes.get_title() == "5 clients with 0 to 1 neighbours: 2 edges, 3 components"


def test_known_groups_have_a_legend_and_components_none() -> None:
    graph = resolve_graph("ring", 12)
    assert draw_graph(graph, names(12)).axes[0].get_legend() is None
    for count, shown in ((2, 2), (12, 10)):
        axes: Any = draw_graph(graph, names(12), torch.arange(12) % count).axes[0]
        texts = [text.get_text() for text in axes.get_legend().get_texts()]
        assert texts == [f"group {k}" for k in range(shown)]
        colors = axes.collections[1].get_facecolors()
        for mark, client in zip(axes.get_legend().get_lines(), range(shown), strict=True):
            assert tuple(mark.get_color()) == tuple(colors[client])


def test_components_lie_beside_each_other() -> None:
    """No two of them share a place: their bounding boxes don't overlap."""
    sizes, graph = (6, 5, 4, 1, 1), torch.zeros(17, 17)
    first, owner = 0, []
    for part, size in enumerate(sizes):
        graph[first : first + size, first : first + size] = 1 - torch.eye(size)
        first += size
        owner += [part] * size
    where = places(draw_graph(resolve_graph(graph, 17), names(17)).axes[0])
    boxes = [where[np.array(owner) == part] for part in range(len(sizes))]
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            without_communication = (one.min(0) > other.max(0)) | (other.min(0) > one.max(0))
            assert without_communication.any()


def test_the_first_of_many_clients_are_drawn_without_names() -> None:
    graph = resolve_graph(SmallWorld(4), 300)
    axes: Any = draw_graph(graph, names(200)).axes[0]
    inside = (graph.edges < 200).all(0).sum()
    assert (len(places(axes)), len(segments(axes)), len(axes.texts)) == (200, int(inside), 0)
    assert axes.get_title().startswith("the first 200 of 300 clients with")


@pytest.mark.parametrize("method", [FedU("ring", 0.1), ConvexClustering(graph="ring")])
def test_the_graph_of_a_run_reaches_the_board(method: Method, tmp_path: Path) -> None:
    run = trainer(
        method, ClientGraph(known_clusters=2), max_epochs=2, logger=TensorBoardLogger(tmp_path)
    )
    run.fit(split(), quadratics())
    board = Board(run)
    assert board.steps("graph") == [0]
    assert count_colours(board.picture("graph")) > 10


def test_what_can_not_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="`max_clients` to be a whole number >= 2, but got max_clients=1"
    ):
        ClientGraph(max_clients=1)
    for method in (FedAvg(), ConvexClustering()):
        match = rf"a method over a graph .* but got {type(method).__name__}.*, or remove"
        run = trainer(method, ClientGraph(), logger=TensorBoardLogger(tmp_path))
        with pytest.raises(MisconfigurationException, match=match):
            run.fit(split(), quadratics())
    with pytest.raises(MisconfigurationException, match="a logger for the pictures of"):
        trainer(FedU("ring"), ClientGraph(), logger=False).fit(split(), quadratics())
    run = trainer(FedU("ring"), ClientGraph([0, 1]), logger=TensorBoardLogger(tmp_path))
    with pytest.raises(ValueError, match="one entry for each of 4 clients, but got 2 entries"):
        run.fit(split(), quadratics())
