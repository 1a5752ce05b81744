"""Graphs of clients: against networkx and plain loops over edges."""

from __future__ import annotations

import logging
from typing import Any

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from jsonargparse import ArgumentParser

from lightning_pfl.core.randomness import derive
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.graphs import (
    BUILDERS,
    Complete,
    ErdosRenyi,
    Graph,
    GraphBuilder,
    GraphLike,
    KNearest,
    ScaleFree,
    SmallWorld,
    builders,
    label_histograms,
    model_features,
    resolve_graph,
)

WEIGHTED = torch.tensor(
    [[0.0, 2.0, 0.0, 0.5], [2.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0]],
    dtype=torch.float64,
)


def edges_of(graph: Graph) -> set[tuple[int, int]]:
    return {(i, j) for i, j in graph.edges.T.tolist()}


def test_slots_list_the_neighbours_and_point_back() -> None:
    graph = resolve_graph(WEIGHTED, 4)
    for client in range(4):
        neighbours = WEIGHTED[client].nonzero().flatten().tolist()
        count = len(neighbours)
        assert graph.mask[client].tolist() == [slot < count for slot in range(2)]
        assert graph.neighbours[client, :count].tolist() == neighbours
        assert graph.slot_weights[client].tolist() == [
            float(WEIGHTED[client, j]) for j in neighbours
        ] + [0.0] * (2 - count)
        for slot, other in enumerate(neighbours):
            assert int(graph.neighbours[other, graph.reverse[client, slot]]) == client
    assert edges_of(graph) == {(0, 1), (0, 3), (1, 3)}
    assert graph.edge_weights.tolist() == [2.0, 0.5, 1.0]


@pytest.mark.parametrize(
    "given",
    [
        WEIGHTED.tolist(),
        WEIGHTED.numpy(),
        WEIGHTED.to_sparse(),
        scipy.sparse.csr_matrix(WEIGHTED.numpy()),
        scipy.sparse.coo_array(WEIGHTED.numpy()),
        networkx.from_numpy_array(WEIGHTED.numpy()),
        resolve_graph(WEIGHTED, 4),
    ],
    ids=["lists", "numpy", "torch sparse", "csr", "coo", "networkx", "graph"],
)
def test_every_form_gives_the_same_graph(given: Any) -> None:
    found = resolve_graph(given, 4)
    assert torch.equal(found.adjacency().to_dense(), WEIGHTED)
    assert torch.equal(torch.from_numpy(networkx.to_numpy_array(found.to_networkx())), WEIGHTED)


def test_the_laplacian_is_that_of_networkx() -> None:
    graph = resolve_graph(ErdosRenyi(0.3), 20, seed=3)
    reference = networkx.laplacian_matrix(graph.to_networkx()).toarray().astype(float)
    torch.testing.assert_close(graph.laplacian().to_dense(), torch.from_numpy(reference))
    torch.testing.assert_close(graph.degree, torch.from_numpy(np.diag(reference).copy()))
    largest = float(np.linalg.eigvalsh(reference)[-1])
    assert graph.largest_eigenvalue == pytest.approx(largest)


def test_the_largest_eigenvalue_of_a_large_graph() -> None:
    """A cycle of even length n has the eigenvalues 2 - 2 cos(2 pi k / n), at most 4.

    The largest lie close together: to all digits those of so many clients would take minutes.
    """
    assert 4 * (1 - 1e-5) < resolve_graph("ring", 20_000).largest_eigenvalue <= 4 * (1 + 1e-12)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("clients", [5, 30])
def test_built_graphs_are_connected_and_follow_the_seed(name: str, clients: int) -> None:
    graph = resolve_graph(name, clients, seed=1)
    assert networkx.is_connected(graph.to_networkx())
    assert len(graph) == clients
    assert edges_of(resolve_graph(name, clients, seed=1)) == edges_of(graph)
    if name in ("erdos_renyi", "small_world", "scale_free") and clients == 30:
        assert edges_of(resolve_graph(name, clients, seed=2)) != edges_of(graph)


def test_edges_of_the_families() -> None:
    assert edges_of(resolve_graph("complete", 4)) == {(i, j) for j in range(4) for i in range(j)}
    assert edges_of(resolve_graph("ring", 5)) == {(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)}
    assert edges_of(resolve_graph("ring", 1)) == set()
    assert edges_of(resolve_graph("ring", 2)) == {(0, 1)}
    assert resolve_graph(SmallWorld(4, rewiring=0.0), 9).mask.sum(1).eq(4).all()
    assert len(resolve_graph(ScaleFree(2), 12).edges.T) == 2 * (12 - 2)
    # The expected number of edges is p n (n - 1) / 2 = 396; sd 17.8.
    count = len(resolve_graph(ErdosRenyi(0.2), 90, seed=5).edges.T)
    assert abs(count - 0.2 * 90 * 89 / 2) < 4 * np.sqrt(0.2 * 0.8 * 90 * 89 / 2)


def test_a_sparse_random_graph_is_drawn_until_it_is_connected() -> None:
    """At p = log(n) / n about half of the draws have a lonely client."""
    graphs = [resolve_graph(ErdosRenyi(0.15), 20, seed=seed) for seed in range(10)]
    assert all(graph.components == 1 for graph in graphs)
    first = [
        networkx.erdos_renyi_graph(20, 0.15, seed=derive(s, "erdos renyi", 0) % 2**32)
        for s in range(10)
    ]
    assert not all(networkx.is_connected(graph) for graph in first)


def test_a_random_graph_that_can_not_be_connected_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builders, "TRIES", 3)
    with pytest.raises(ValueError, match="connected graph of 50 clients, but none of 3 draws"):
        resolve_graph(ErdosRenyi(0.001), 50)


def test_nearest_clients_are_neighbours() -> None:
    points = np.array([[0.0], [1.0], [1.5], [10.0], [11.0]])
    assert edges_of(resolve_graph(KNearest(points, 1), 5)) == {(0, 1), (1, 2), (3, 4)}


def test_features_may_be_a_file(tmp_path: Any) -> None:
    path = tmp_path / "points.npy"
    np.save(path, np.arange(6.0)[:, None])
    assert edges_of(resolve_graph(KNearest(str(path), 1), 6)) == edges_of(
        resolve_graph(KNearest(np.arange(6.0)[:, None], 1), 6)
    )


def test_label_histograms_are_shares() -> None:
    labels = torch.tensor([0, 2, 2, 1, 2])
    data = FederatedTensorDataset((torch.zeros(5, 1), labels), [[0, 1, 2, 3], [4], []])
    expected = [[0.25, 0.25, 0.5], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert label_histograms(data, 3).tolist() == expected


def test_parts_of_a_graph_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        graph = resolve_graph(WEIGHTED, 4)
    assert graph.components == 2
    assert "has 2 components" in caplog.text


class Star(GraphBuilder):
    """A user's own."""

    def __call__(self, num_clients: int, seed: int) -> Any:
        return networkx.star_graph(num_clients - 1)


def test_users_write_builders_and_recipes_name_them() -> None:
    assert edges_of(resolve_graph(Star(), 4)) == {(0, 1), (0, 2), (0, 3)}
    parser = ArgumentParser()
    parser.add_argument("--graph", type=GraphLike)
    named = {"class_path": "lightning_pfl.graphs.ErdosRenyi", "init_args": {"probability": 0.5}}
    # jsonargparse 4.49 has renamed it.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    found = instantiate(parser.parse_object({"graph": named})).graph
    assert isinstance(found, ErdosRenyi)
    assert found.probability == 0.5
    for plain in ("ring", [[0.0, 1.0], [1.0, 0.0]]):
        read = instantiate(parser.parse_object({"graph": plain})).graph
        assert read == plain


class Loop(GraphBuilder):
    def __call__(self, num_clients: int, seed: int) -> Any:
        return np.eye(num_clients)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ("rings", ValueError, "one of complete, ring, .*, but got graph='rings'"),
        (WEIGHTED[:3], ValueError, r"of 4 clients .* but got the shape \(3, 4\)"),
        (torch.zeros(4), ValueError, r"a matrix, but got the shape \(4,\)"),
        (Loop(), ValueError, "an edge from client 0 to itself"),
        (-WEIGHTED, ValueError, r"-2.0 at \(0, 1\)"),
        (WEIGHTED * torch.inf, ValueError, r"at \(0, 0\). Use weights >= 0|nan"),
        (WEIGHTED.triu(), ValueError, r"different weights at \(0, 1\) and \(1, 0\)"),
        (networkx.DiGraph([(0, 1)]), TypeError, "an undirected networkx.Graph, but got DiGraph"),
        (networkx.path_graph(3), ValueError, r"but got the shape \(3, 3\)"),
        (7, TypeError, "but got graph=7"),
        (KNearest(np.zeros((3, 1)), 1), ValueError, r"each of 4 clients, but got the shape \(3, 1"),
        (KNearest(np.zeros((4, 1)), 4), ValueError, "more than neighbours=4 clients"),
        (SmallWorld(4), ValueError, "more clients than neighbours=4, but got 4"),
        (ScaleFree(4), ValueError, "more than attached=4 clients, but got 4"),
    ],
)
def test_what_is_no_graph_is_refused(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        resolve_graph(given, 4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ErdosRenyi(0.0), r"in \(0, 1\], but got probability=0.0"),
        (lambda: SmallWorld(3), "even number of at least 2, but got neighbours=3"),
        (lambda: SmallWorld(4, 1.5), r"in \[0, 1\], but got rewiring=1.5"),
        (lambda: ScaleFree(0), "to be a whole number >= 1, but got attached=0"),
        (lambda: KNearest(np.zeros((3, 1)), 0), "to be a whole number >= 1, but got neighbours=0"),
    ],
)
def test_wrong_settings_of_builders_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_the_complete_graph_of_one_client_has_no_edge() -> None:
    graph = resolve_graph(Complete(), 1)
    assert (len(graph), graph.mask.numel(), graph.largest_eigenvalue) == (1, 0, 0.0)


def test_model_features_are_the_floating_point_entries_in_one_order() -> None:
    models = [
        {"b": torch.tensor([[1.0, 2.0]]), "n": torch.tensor(7), "a": torch.tensor(3.0)},
        {"a": torch.tensor(6.0), "b": torch.tensor([[4.0, 5.0]]), "n": torch.tensor(8)},
    ]
    found = model_features(models)
    assert found.dtype == torch.float64
    assert found.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert model_features([]).shape == (0, 0)


def test_models_of_different_shapes_are_not_compared() -> None:
    models = [{"w": torch.zeros(2)}, {"w": torch.zeros(3)}]
    with pytest.raises(
        ValueError,
        match=r"Expected `models` to have the same .* \(2,\)} of client 0 and .* client 1",
    ):
        model_features(models)
