"""Clusters by angles: subspaces at known angles, and clients of planted groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_pfl.data import FederatedTensorDataset, subspace_clusters
from lightning_pfl.methods import ClusterOracle
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients


def clients(*inputs: list[list[float]]) -> FederatedTensorDataset:
    x = torch.tensor([row for rows in inputs for row in rows], dtype=torch.float64)
    positions = torch.arange(len(x)).split([len(rows) for rows in inputs])
    return FederatedTensorDataset((x, torch.zeros(len(x))), positions)


def at(degrees: float, length: float = 1.0) -> list[float]:
    angle = math.radians(degrees)
    return [length * math.cos(angle), length * math.sin(angle), 0.0]


LINES = clients([at(0), at(0, -3)], [at(20, 5)], [at(70)], [at(95, 0.1)])
"""One line each, whatever the samples' lengths and signs: 20, 50 and 25 degrees apart."""


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (19.9, [0, 1, 2, 3]),
        (20.1, [0, 0, 1, 2]),
        (24.9, [0, 0, 1, 2]),
        (25.1, [0, 0, 1, 1]),
        # The mean of 70, 85 (of 95), 50 and 75.
        (69.9, [0, 0, 1, 1]),
        (70.1, [0, 0, 0, 0]),
    ],
)
def test_clusters_are_joined_up_to_their_mean_angle(degrees: float, expected: list[int]) -> None:
    assert subspace_clusters(LINES, max_angle=degrees) == expected


def test_planes_share_a_line_and_their_second_angle_tells_them_apart() -> None:
    """Planes through the first axis: the smallest angle is 0; the sum is the one between them."""

    def plane(degrees: float) -> list[list[float]]:
        y, z, _ = at(degrees)
        return [[1.0, 0.0, 0.0], [0.0, y, z]]

    data = clients(plane(0), plane(5), plane(60))
    assert subspace_clusters(data, max_angle=0.001, vectors=2) == [0, 0, 0]
    assert subspace_clusters(data, max_angle=4.9, vectors=2, measure="sum") == [0, 1, 2]
    assert subspace_clusters(data, max_angle=5.1, vectors=2, measure="sum") == [0, 0, 1]
    # Clusters of one number, in the order of their first clients.
    assert subspace_clusters(data, 2, vectors=2, measure="sum") == [0, 0, 1]


def test_only_the_leading_vectors_count() -> None:
    data = clients([at(0, 10), [0.0, 0.0, 0.1]], [at(90, 10), [0.0, 0.0, 0.1]])
    assert subspace_clusters(data, max_angle=1, vectors=1) == [0, 1]
    assert subspace_clusters(data, max_angle=1, vectors=2) == [0, 0]


def test_clients_without_samples_are_in_the_largest_cluster() -> None:
    data = clients([at(0)], [], [at(90)], [at(91)])
    assert subspace_clusters(data, 2) == [0, 1, 1, 1]
    assert subspace_clusters(clients([at(0)], []), 1) == [0, 0]


def test_they_are_clusters_of_the_oracle() -> None:
    """Inputs of one number; the second entry has the centers."""
    data = quadratic_clients([1.0, 1.0, 1.0], [[0.0], [1.0], [2.0]])
    method = ClusterOracle(subspace_clusters(LINES.subset([0, 1, 3]), 2))
    run = fit(method, data, QuadraticModule(lr=1.0))
    assert run.models["w"].flatten().tolist() == [0.5, 0.5, 2.0]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "exactly one of `num_clusters` and `max_angle`, but got"),
        ({"num_clusters": 2, "max_angle": 1.0}, "exactly one of `num_clusters` and `max_angle`"),
        ({"num_clusters": 5}, "at most the 4 clients with samples, but got num_clusters=5"),
        ({"num_clusters": 0}, "`num_clusters` to be a whole number >= 1, but got num_clusters=0"),
        ({"max_angle": -1.0}, "`max_angle` to be a number of degrees >= 0, but got max_angle=-1.0"),
        ({"num_clusters": 2, "vectors": 0}, "`vectors` to be a whole number >= 1, but got"),
        ({"num_clusters": 2, "measure": "largest"}, "`measure` to be 'smallest' or 'sum', but"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        subspace_clusters(LINES, **settings)


def test_somebody_needs_samples() -> None:
    with pytest.raises(ValueError, match="clients with samples, whose inputs span subspaces"):
        subspace_clusters(FederatedTensorDataset(LINES.fields, [[]]), 1)
