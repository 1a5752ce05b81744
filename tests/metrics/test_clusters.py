"""Clusters read off solutions, and how far they are from a known partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.graphs import resolve_graph
from lightning_pfl.metrics import (
    adjusted_rand_index,
    clusters_of_models,
    clusters_of_pairs,
    within_cluster_distance,
)
from lightning_pfl.solvers.pairs import Pairs


def differences(labels: list[int]) -> Tensor:
    at = torch.tensor(labels, dtype=torch.float64)
    return (at.unsqueeze(1) - at).unsqueeze(2)


def test_pairs_with_zero_differences_are_joined() -> None:
    labels = [3, 1, 3, 1, 2]
    found = clusters_of_pairs(differences(labels), Pairs.complete(5))
    assert found.tolist() == [0, 1, 0, 1, 2]


def test_both_orders_have_to_be_zero() -> None:
    split = differences([0, 0, 1])
    split[0, 1] = 1e-12
    assert clusters_of_pairs(split, Pairs.complete(3)).tolist() == [0, 1, 2]
    split[0, 1], split[1, 0] = 0.0, 1e-12
    assert clusters_of_pairs(split, Pairs.complete(3)).tolist() == [0, 1, 2]
    split[1, 0] = 0.0
    assert clusters_of_pairs(split, Pairs.complete(3)).tolist() == [0, 0, 1]


def test_on_a_graph_only_edges_join() -> None:
    """All differences are zero on two paths 0 - 1 - 2 and 3 - 4; empty slots join nobody."""
    adjacency = np.zeros((5, 5))
    for i, j in ((0, 1), (1, 2), (3, 4)):
        adjacency[i, j] = adjacency[j, i] = 1
    pairs = Pairs.of_graph(resolve_graph(adjacency, 5))
    split = torch.zeros(5, pairs.slots, 2)
    assert clusters_of_pairs(split, pairs).tolist() == [0, 0, 0, 1, 1]


def test_models_within_the_tolerance_are_joined_along_chains() -> None:
    models = torch.tensor([[0.0], [5.0], [0.9], [1.8], [5.5]])
    assert clusters_of_models(models, 1.0).tolist() == [0, 1, 0, 0, 1]
    assert clusters_of_models(models, 0.6).tolist() == [0, 1, 2, 3, 1]


def test_the_default_tolerance_grows_with_the_models() -> None:
    models = torch.tensor([[100.0, 0.0], [100.05, 0.0], [0.0, 100.0]])
    assert clusters_of_models(models).tolist() == [0, 0, 1]
    assert clusters_of_models(models / 100).tolist() == [0, 0, 1]
    assert clusters_of_models(models / 100 + torch.tensor([[0.0], [0.01], [0.0]])).tolist() == [
        0,
        1,
        2,
    ]


def test_adjusted_rand_index() -> None:
    """Contingency table ((2, 1), (0, 2)): from its binomials, (2 - 1.6) / (4 - 1.6)."""
    truth, found = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([4, 4, 9, 9, 9])
    together = 1 + 0 + 0 + 1
    rows, columns, all_pairs = 3 + 1, 1 + 3, 10
    expected = rows * columns / all_pairs
    index = (together - expected) / ((rows + columns) / 2 - expected)
    assert adjusted_rand_index(found, truth) == pytest.approx(index)


def test_within_cluster_distance() -> None:
    models = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [9.0, 9.0], [9.0, 11.0]])
    labels = torch.tensor([0, 0, 0, 1, 1])
    pairs = [5.0, 1.0, (9 + 9) ** 0.5, 2.0]
    assert within_cluster_distance(models, labels) == pytest.approx(np.mean(pairs))
    assert np.isnan(within_cluster_distance(models, torch.arange(5)))


def test_labels_may_be_lists_of_any_whole_numbers() -> None:
    assert adjusted_rand_index([3, 3, 8, 8], torch.tensor([1, 1, 0, 0])) == 1.0
    models = torch.tensor([[0.0], [3.0], [7.0]])
    assert within_cluster_distance(models, [12, 12, 5]) == 3.0


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ([0, 1], "`labels` to have one entry for each of 3 clients, but got 2 entries"),
        ([0, -1, 1], "`labels` to hold whole numbers >= 0, but got -1.* leave out clients"),
        (torch.rand(3), "`labels` to hold whole numbers, but got 0"),
    ],
)
def test_wrong_labels_are_refused(labels: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        adjusted_rand_index(labels, [0, 0, 1])
    with pytest.raises(ValueError, match=match):
        within_cluster_distance(torch.zeros(3, 2), labels)
