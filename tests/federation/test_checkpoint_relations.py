"""Resuming with other relations between the clients: refused, and the difference is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.core.errors import CheckpointMismatchError
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.fitting import Fit

RING = torch.tensor([[0.0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]])
SQUARE = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
HEAVIER = torch.where(RING > 0, 1.5, 0.0)
GIVEN: dict[str, Callable[[Any], Method]] = {
    "ConvexClustering": lambda graph: methods.ConvexClustering(graph=graph),
    "FedU": lambda graph: methods.FedU(graph),
    "dFedU": lambda graph: methods.FedU(graph, decentralized=True),
    "GTVMin": lambda graph: methods.GTVMin(graph),
    "HomologicalConstraints": lambda graph: methods.HomologicalConstraints(graph),
    "SheafFMTL": lambda graph: methods.SheafFMTL(graph, edge_dim_ratio=0.5),
}


def run(method: Method, rounds: int = 1, ckpt_path: Path | None = None) -> Fit:
    data = quadratic_clients([1.0] * 4, [[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [3.0, 1.0]])
    return fit(method, data, QuadraticModule(dim=2), rounds, ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (SQUARE, "0, 1, 1 in the checkpoint and 0, 2, 1 now"),
        (HEAVIER, "0, 1, 1 in the checkpoint and 0, 1, 1.5 now"),
        ("complete", "0, 3, 1 in the checkpoint and 0, 2, 1 now"),
    ],
    ids=["edges", "weights", "more"],
)
@pytest.mark.parametrize("name", GIVEN)
def test_another_graph_is_refused(name: str, now: Any, difference: str, tmp_path: Path) -> None:
    path = run(GIVEN[name](RING)).save(tmp_path / "one.ckpt")
    match = rf"a run with the same `graph`, but got {difference}"
    with pytest.raises(CheckpointMismatchError, match=match):
        run(GIVEN[name](now), 2, path)


@pytest.mark.parametrize("name", GIVEN)
def test_the_same_graph_in_another_form_goes_on(name: str, tmp_path: Path) -> None:
    path = run(GIVEN[name](RING)).save(tmp_path / "one.ckpt")
    resumed, whole = run(GIVEN[name]("ring"), 2, path), run(GIVEN[name](RING), 2)
    assert_trees_equal(dict(resumed.models), dict(whole.models))


def test_all_pairs_are_not_a_graph(tmp_path: Path) -> None:
    path = run(methods.ConvexClustering()).save(tmp_path / "one.ckpt")
    with pytest.raises(CheckpointMismatchError, match="got nothing in the checkpoint and 0, 1, 1"):
        run(methods.ConvexClustering(graph="ring"), 2, path)


@pytest.mark.parametrize("now", [[0, 1, 0, 1], lambda client: client % 2])
def test_other_known_clusters_are_refused(now: Any, tmp_path: Path) -> None:
    path = run(methods.ClusterOracle([3, 3, 7, 7])).save(tmp_path / "one.ckpt")
    match = "same `clusters`, but got 0 in the checkpoint and 1 now"
    with pytest.raises(CheckpointMismatchError, match=match):
        run(methods.ClusterOracle(now), 2, path)
    # The names of clusters mean nothing.
    assert run(methods.ClusterOracle([0, 0, 1, 1]), 2, path).strategy.federation.rounds == 2


def test_a_server_of_other_shapes_is_refused(tmp_path: Path) -> None:
    path = run(methods.FedU(RING)).save(tmp_path / "one.ckpt")
    saved = torch.load(path, weights_only=False)
    saved["federated"]["server"]["models"]["w"] = torch.zeros(4, 3)
    torch.save(saved, path)
    match = r"server whose `models/w` has the shape \(4, 2\), but .* has \(4, 3\)"
    with pytest.raises(CheckpointMismatchError, match=match):
        run(methods.FedU(RING), 2, path)
