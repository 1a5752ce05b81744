"""SquaredPenalty: on quadratic clients its optimum is (a c + lambda m) / (a + lambda)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_pfl.methods import LocalOnly, SquaredPenalty
from lightning_pfl.models import SquaredHingeClassifier
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from recipes.centralized.sum_of_norms import solve_squared
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR, A, C, close, closed_form, ragged
from tests.methods.references.squared_penalty import squared_penalty
from tests.methods.test_convex_clustering import hinge_clients
from tests.solvers.problems import L4, Hinges, Quadratics, ellipses

CASE = Case(
    method=lambda: SquaredPenalty(0.1),
    bytes={
        "defaults": Bytes(SquaredPenalty, 4 * D, 4 * D),
    },
    twin=LocalOnly,
    above_zero="penalty_weight",
)

DIM = 2


def exact(weight: float) -> SquaredPenalty:
    return SquaredPenalty(weight, local_solver="exact")


class TestSquaredPenalty:
    @closed_form
    def test_rounds_match_the_reference(self, engine: str) -> None:
        def prox(i: int, b: np.ndarray, c: float) -> np.ndarray:
            a = float(A[i])
            return (a * C[i].numpy() + c * b) / (a + c)

        data = ragged().subset([0, 1, 2])
        run = fit(exact(0.2), data, QuadraticModule(DIM, LR, 0.5), 4, engine)
        expected = squared_penalty(np.full((3, DIM), 0.5), prox, 0.2, 4)
        close(run.models["w"], torch.from_numpy(expected))

    def test_a_round_of_gradient_steps(self, engine: str) -> None:
        """x <- x - lr (a (x - c) + 2 Gamma N (x - m)), all minibatches being alike."""
        method = SquaredPenalty(0.1, local_epochs=None, local_steps=2)
        run = fit(method, ragged(), QuadraticModule(DIM, LR, 0.5), 3, engine)
        x = torch.full((4, DIM), 0.5, dtype=torch.float64)
        a, c = A.unsqueeze(1), C
        for _ in range(3):
            m = x.mean(0)
            for _ in range(2):
                x = x - LR * (a * (x - c) + 2 * 0.1 * 4 * (x - m))
            x[3] = m  # which has no samples
        close(run.models["w"], x)

    def test_without_weight_it_is_local_training(self, engine: str) -> None:
        a = fit(SquaredPenalty(0.0), small_clients(), small_module(), 2, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.models, b.models)
        notes = SquaredPenalty(0.0).notes(a.strategy.federation.parameter_split)
        assert notes == ["penalty_weight=0 makes SquaredPenalty LocalOnly."]

    def test_who_is_away_counts_with_its_last_model(self, engine: str) -> None:
        run = fit(exact(0.2), ragged(), QuadraticModule(DIM, LR, 0.5), 4, engine, participation=2)
        x = torch.full((4, DIM), 0.5, dtype=torch.float64)
        pull, curvature = 2 * 0.2 * 4, A.clone()
        curvature[3] = 0  # which has no samples
        for some in cohorts(4, 2, eligible=torch.arange(4)):
            a = curvature[some].unsqueeze(1)
            x[some] = (a * C[some] + pull * x.mean(0)) / (a + pull)
        close(run.models["w"], x)


@pytest.mark.parametrize("weight", [0.05, 0.25, 2.0])
def test_the_optimum_is_that_of_l2gd_and_never_one_model(weight: float) -> None:
    """L4: (a_i + lambda mean(a)) / (1 + lambda), lambda = 2 N Gamma; all stay different."""
    data = quadratic_clients([1.0] * 4, L4.flatten().tolist())
    lam = 2 * 4 * weight
    run = fit(exact(weight), data, QuadraticModule(), 50)
    expected = (L4 + lam * L4.mean()) / (1 + lam)
    # The mean's distance from 0.55, where it begins, shrinks by lambda / (1 + lambda) a round.
    left = 0.55 * (lam / (1 + lam)) ** 50
    torch.testing.assert_close(run.models["w"], expected, rtol=0, atol=left + 1e-10)
    found = solve_squared(Quadratics(L4), Pairs.complete(4), weight, torch.zeros_like(L4))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert float(torch.pdist(found).min()) == pytest.approx(0.1 / (1 + lam))


@pytest.mark.slow
def test_the_squared_hinge_optimum_is_that_of_the_direct_solver() -> None:
    points, labels = ellipses("separable", 2)
    module = SquaredHingeClassifier(2).double()
    run = fit(exact(0.005), hinge_clients(points, labels), module, 50)
    start = torch.zeros(6, 3, dtype=torch.float64)
    expected = solve_squared(Hinges(points, labels), Pairs.complete(6), 0.005, start)
    found = torch.cat([run.models["head.weight"].squeeze(1), run.models["head.bias"]], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_the_weight_is_checked(bad: float) -> None:
    with pytest.raises(
        ValueError, match=f"Expected `penalty_weight` to be a finite number >= 0, .*={bad}"
    ):
        SquaredPenalty(bad)


def test_the_local_solver_is_checked() -> None:
    with pytest.raises(ValueError, match="Expected `local_solver` to be 'optimizer' or 'exact'"):
        SquaredPenalty(local_solver="newton")  # type: ignore[arg-type]
