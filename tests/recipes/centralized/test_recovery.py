"""The bounds on the weight: closed forms for quadratics, and the clusters really found between."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_pfl.solvers.pairs import Pairs
from recipes.centralized.newtons_method import proximal_newton
from recipes.centralized.recovery import (
    Bounds,
    cluster_models,
    consensus_weight,
    recovery_bounds,
    recovery_interval,
)
from recipes.centralized.sum_of_norms import SumOfNorms
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
    assert bounds.separated == pytest.approx(0.25)
    assert bounds.hold == (weight >= 0.05)


def test_clusters_of_unequal_sizes() -> None:
    """max |a_i - a_j| / n_k and min |mean_k - mean_l| / (2 (N - min n))."""
    a = torch.tensor([0.0, 0.3, 0.6, 4.0, 4.2, 9.0], dtype=torch.float64).unsqueeze(1)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    losses = Quadratics(a)
    models = cluster_models(losses, labels, 0.05, torch.zeros(3, 1, dtype=torch.float64))
    bounds = recovery_bounds(losses, labels, models, 0.05)
    assert bounds.fused == pytest.approx(max(0.6 / 3, 0.2 / 2))
    assert bounds.separated == pytest.approx((4.1 - 0.3) / (2 * (6 - 1)))


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


@pytest.mark.parametrize("names", [[5, 5, 6, 6], [0, 0, 2, 2], [9, 9, 4, 4], torch.tensor([7] * 4)])
def test_only_equality_of_labels_counts(names: Any) -> None:
    """Names of clusters change nothing; rows of clusters follow the names in ascending order."""
    losses, weights = Quadratics(L4), [0.06, 0.1]
    plain = torch.as_tensor(names).unique(return_inverse=True)[1]
    assert recovery_interval(losses, names, L4, weights) == recovery_interval(
        losses, plain, L4, weights
    )
    start = torch.arange(int(plain.max()) + 1, dtype=torch.float64).unsqueeze(1)
    models = cluster_models(losses, names, 0.1, start)
    assert torch.equal(models, cluster_models(losses, plain, 0.1, start))
    bounds = recovery_bounds(losses, names, models, 0.1)
    assert bounds == recovery_bounds(losses, plain, models, 0.1)
    gaps = [abs(float(L4[i] - L4[j])) for i in range(4) for j in range(4) if plain[i] == plain[j]]
    assert bounds.fused == pytest.approx(max(gaps) / float(torch.bincount(plain).min()))


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ([0, 0, 1], "`labels` to have one entry for each of 4 clients, but got 3 entries"),
        ([0, 0, 1, -1], "`labels` to hold whole numbers >= 0, but got -1"),
        (torch.tensor([0.0, 0.0, 1.0, 1.5]), "`labels` to hold whole numbers, but got 0.0"),
    ],
)
def test_wrong_labels_are_refused(labels: Any, match: str) -> None:
    losses, two = counted(L4), L4[:2]
    with pytest.raises(ValueError, match=match):
        recovery_interval(losses, labels, L4)
    with pytest.raises(ValueError, match=match):
        cluster_models(losses, labels, 0.1, two)
    with pytest.raises(ValueError, match=match):
        recovery_bounds(losses, labels, two, 0.1)


def counted(centers: torch.Tensor) -> Any:
    """Losses that know how many clients they have, as ClientLosses do."""
    losses: Any = Quadratics(centers)
    losses.num_clients, losses.dim = len(centers), centers.shape[1]
    return losses


def test_wrong_models_are_refused() -> None:
    losses = counted(L4)
    per_client = r"`start` to be one model per client, of the shape \(4, 1\) in torch.float64, but "
    per_cluster = per_client.replace("client", "cluster").replace("4, 1", "2, 1")
    for wrong in (L4[:2], L4.flatten(), L4.expand(4, 2), L4.float()):
        with pytest.raises(ValueError, match=per_client):
            recovery_interval(losses, TWO, wrong)
        with pytest.raises(ValueError, match=per_client):
            consensus_weight(losses, wrong)
    for wrong in (L4, L4[:2].float()):
        with pytest.raises(ValueError, match=per_cluster):
            cluster_models(losses, TWO, 0.1, wrong)
        with pytest.raises(ValueError, match=per_cluster.replace("start", "models")):
            recovery_bounds(losses, TWO, wrong, 0.1)
    with pytest.raises(ValueError, match="`labels` of at least one client, but got none"):
        cluster_models(Quadratics(L4), [], 0.1, L4)


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
    assert bounds.separated == pytest.approx(0.152, abs=5e-4)
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
