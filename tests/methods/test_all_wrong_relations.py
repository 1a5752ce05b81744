"""Settings that are no numbers at all: each error says what was expected, and what was given."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.graphs import (
    ErdosRenyi,
    KNearest,
    ScaleFree,
    SmallWorld,
    resolve_graph,
)
from lightning_pfl.inspect import ClientGraph, PairwiseDistance

NUMBERS: list[tuple[Any, str]] = [
    (methods.ConvexClustering, "fusion_weight"),
    (methods.ConvexClustering, "penalty"),
    (methods.ConvexClustering, "proximal_weight"),
    (methods.ConvexClustering, "blocks"),
    (methods.ConvexClustering, "dual_blocks"),
    (methods.SquaredPenalty, "penalty_weight"),
    (partial(methods.FedU, "ring"), "regularization"),
    (partial(methods.FedU, "ring"), "lap_factor"),
    (partial(methods.FedU, "ring"), "decentralized"),
    (partial(methods.GTVMin, "ring"), "regularization"),
    (partial(methods.GTVMin, "ring"), "step_ratio"),
    (partial(methods.SheafFMTL, "ring"), "regularization"),
    (partial(methods.SheafFMTL, "ring"), "map_lr"),
    (partial(methods.SheafFMTL, "ring"), "edge_dim_ratio"),
    (partial(methods.SheafFMTL, "ring"), "map_std"),
    (partial(methods.HomologicalConstraints, "ring"), "step"),
    (partial(methods.HomologicalConstraints, "ring"), "penalty"),
    (partial(methods.HomologicalConstraints, "ring"), "edge_dim_ratio"),
    (partial(methods.HomologicalConstraints, "ring"), "map_std"),
    (methods.CFL, "eps_mean"),
    (methods.CFL, "eps_max"),
    (methods.CFL, "start_round"),
    (methods.CFL, "min_gap"),
    (methods.IFCA, "num_clusters"),
    (methods.IFCA, "initial"),
    (ErdosRenyi, "probability"),
    (SmallWorld, "neighbours"),
    (SmallWorld, "rewiring"),
    (ScaleFree, "attached"),
    (partial(KNearest, np.zeros((3, 2))), "neighbours"),
    (ClientGraph, "max_clients"),
    (PairwiseDistance, "max_clients"),
]


@pytest.mark.parametrize("value", ["x", float("nan"), torch.tensor(1.5), {"a": 1}])
@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_what_is_no_number_is_refused(make: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected `{name}` to be .* but got {name}="):
        make(**{name: value})


@pytest.mark.parametrize("graph", [[[0, 1], [1]], [["a"]], [[0, 1j], [1, 0]]])
def test_a_graph_of_other_things_is_refused(graph: Any) -> None:
    with pytest.raises(ValueError, match=r"a matrix of real numbers, but got \[\["):
        resolve_graph(graph, 2)


def test_features_that_are_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"but got features='no\.npy', which doesn't exist"):
        resolve_graph(KNearest("no.npy", 1), 3)
