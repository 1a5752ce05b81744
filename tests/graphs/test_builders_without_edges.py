"""Graphs that join nobody, graphs from files, and how builders look in a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from lightning_pfl.graphs import (
    Complete,
    ErdosRenyi,
    KNearest,
    MatrixFile,
    SmallWorld,
    resolve_graph,
)


def test_a_graph_without_edges_warns() -> None:
    with pytest.warns(
        UserWarning, match="`graph` to have edges between its 3 clients, but got none"
    ):
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


def test_a_matrix_comes_from_a_file(tmp_path: Path) -> None:
    matrix = np.array([[0.0, 2.0, 0.0], [2.0, 0.0, 0.5], [0.0, 0.5, 0.0]])
    np.save(tmp_path / "dense.npy", matrix)
    scipy.sparse.save_npz(tmp_path / "sparse.npz", scipy.sparse.csr_array(matrix))
    for name in ("dense.npy", "sparse.npz"):
        graph = resolve_graph(MatrixFile(str(tmp_path / name)), 3)
        np.testing.assert_array_equal(graph.adjacency().to_dense(), matrix)
    with pytest.raises(ValueError, match=r"`path` to be a .npy or .npz file, but got path='a.csv'"):
        MatrixFile("a.csv")


def test_a_matrix_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Expected `path` to be a file, .*nope\.npy.*Use"):
        resolve_graph(MatrixFile(str(tmp_path / "nope.npy")), 3)


@pytest.mark.parametrize("name", ["text.npy", "empty.npy", "text.npz", "dense.npz"])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"" if name == "empty.npy" else b"0,1\n1,0\n")
    if name == "dense.npz":
        np.savez(path, np.eye(2))
    with pytest.raises(ValueError, match=rf"Expected `path` to be a file of .*{name}.*can't be re"):
        resolve_graph(MatrixFile(str(path)), 2)


def test_features_come_from_npy_files_alone() -> None:
    for given in ("rows.csv", Path("rows.csv")):
        with pytest.raises(
            ValueError, match=r"Expected `features` to be a \.npy file, .*rows\.csv"
        ):
            KNearest(given)


def test_features_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    path.write_bytes(b"1.0, 2.0\n")
    with pytest.raises(ValueError, match=r"Expected `features` to be a file of .*rows\.npy.*can't"):
        resolve_graph(KNearest(path, 1), 3)
