"""Graphs that join nobody, and how builders look in a log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.graphs import Complete, ErdosRenyi, KNearest, SmallWorld, resolve_graph


def test_a_graph_without_edges_warns() -> None:
    with pytest.warns(UserWarning, match="`graph` to have edges, but it has none between its 3"):
        assert resolve_graph(torch.zeros(3, 3), 3).edges.shape == (2, 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("graph", "clients"), [("complete", 1), ("complete", 2), ("ring", 1)])
def test_one_client_and_one_edge_do_not(graph: str, clients: int) -> None:
    assert resolve_graph(graph, clients).edges.shape[1] == clients - 1


@pytest.mark.parametrize(
    ("builder", "text"),
    [
        (Complete(), "Complete()"),
        (ErdosRenyi(0.2), "ErdosRenyi(probability=0.2)"),
        (SmallWorld(2, 0.5), "SmallWorld(neighbours=2, rewiring=0.5)"),
        (KNearest("rows.npy", 3), "KNearest(features='rows.npy', neighbours=3)"),
        (KNearest(np.zeros((4, 2))), "KNearest(features=<ndarray (4, 2)>, neighbours=5)"),
    ],
)
def test_builders_say_their_settings(builder: Any, text: str) -> None:
    assert repr(builder) == text
