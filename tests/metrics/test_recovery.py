"""The bounds on the weight: closed forms for quadratics, and the clusters really found between."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_pfl.metrics.recovery import (
    Bounds,
    cluster_models,
    consensus_weight,
    recovery_bounds,
    recovery_interval,
)
from lightning_pfl.solvers.newton import proximal_newton
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.sum_of_norms import SumOfNorms
from tests.solvers.problems import L4, Hinges, Quadratics, ellipses

TWO = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize("weight", [0.02, 0.1, 0.2])
def test_four_points_on_a_line(weight: float) -> None:
    """Quadratic losses: 0.1 / 2 and 1 / (2 (4 - 2)), whatever the weight."""
    losses = Quadratics(L4)
    models = cluster_models(losses, TWO, weight, torch.zeros(2, 1, dtype=torch.float64))
    expected = torch.tensor([[0.05 + 2 * weight], [1.05 - 2 * weight]], dtype=torch.float64)
    torch.testing.assert_close(models, expected, rtol=0, atol=1e-7)
    bounds = recovery_bounds(losses, TWO, models, weight)
    assert bounds.fused == pytest.approx(0.05)
    assert bounds.apart == pytest.approx(0.25)
    assert bounds.hold == (weight >= 0.05)


def test_clusters_of_unequal_sizes() -> None:
    """max |a_i - a_j| / n_k and min |mean_k - mean_l| / (2 (N - min n))."""
    a = torch.tensor([0.0, 0.3, 0.6, 4.0, 4.2, 9.0], dtype=torch.float64).unsqueeze(1)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    losses = Quadratics(a)
    models = cluster_models(losses, labels, 0.05, torch.zeros(3, 1, dtype=torch.float64))
    bounds = recovery_bounds(losses, labels, models, 0.05)
    assert bounds.fused == pytest.approx(max(0.6 / 3, 0.2 / 2))
    assert bounds.apart == pytest.approx((4.1 - 0.3) / (2 * (6 - 1)))


def test_the_weight_of_consensus() -> None:
    """One cluster: max |a_i - a_j| / N, sufficient for all to agree; L4 needs 0.25."""
    assert consensus_weight(Quadratics(L4), torch.zeros_like(L4)) == pytest.approx(1.1 / 4)


def test_the_interval_is_where_both_bounds_hold() -> None:
    weights = [0.01, 0.04, 0.06, 0.1, 0.24, 0.26]
    found, interval = recovery_interval(Quadratics(L4), TWO, L4, weights)
    assert interval == (0.06, 0.24)
    assert [bounds.weight for bounds in found] == weights
    wrong = torch.tensor([0, 1, 0, 1])
    assert recovery_interval(Quadratics(L4), wrong, L4, weights)[1] is None
    _, proposed = recovery_interval(Quadratics(L4), TWO, L4)
    assert proposed is not None
    assert 0.05 <= proposed[0] < 0.07
    assert 0.2 < proposed[1] < 0.25


def test_one_cluster_has_nothing_to_be_apart_from() -> None:
    assert Bounds(0.3, 0.2, math.inf).hold
    assert not Bounds(0.1, 0.2, math.inf).hold


def test_squared_hinge_clusters_are_found_between_the_bounds() -> None:
    """The separable ellipses at 0.09: 0.053 and 0.152 for all sixty clients."""
    points, labels = ellipses("separable")
    losses, truth = Hinges(points, labels), torch.arange(3).repeat_interleave(20)
    start = torch.zeros(60, 3, dtype=torch.float64)
    alone = proximal_newton(losses, start, torch.zeros(60), start)
    (bounds,), interval = recovery_interval(losses, truth, alone, [0.09])
    assert bounds.fused == pytest.approx(0.053, abs=5e-4)
    assert bounds.apart == pytest.approx(0.152, abs=5e-4)
    assert interval == (0.09, 0.09)


def test_between_the_bounds_the_solution_has_the_clusters() -> None:
    points, labels = ellipses("separable", 3)
    losses, truth = Hinges(points, labels), torch.arange(3).repeat_interleave(3)
    start = torch.zeros(9, 3, dtype=torch.float64)
    alone = proximal_newton(losses, start, torch.zeros(9), start)
    _, interval = recovery_interval(losses, truth, alone, [0.3, 0.5, 0.7])
    assert interval is not None
    solver = SumOfNorms(losses, Pairs.complete(9))
    for weight in interval:
        assert solver.solve(weight, start).clusters.tolist() == truth.tolist()
