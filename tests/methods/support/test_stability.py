"""Steps that are too long are told before round 0; beside each bound the run does what it says."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_pfl.methods import (
    ConvexClustering,
    FedMAP,
    GTVMin,
    HomologicalConstraints,
    SquaredPenalty,
)
from lightning_pfl.methods.base import Method
from lightning_pfl.methods.support.stability import displacement
from lightning_pfl.priors import DiagonalGaussianPrior, GaussianPrior, LaplacePrior
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from lightning_pfl.testing.conformance import small_clients, small_module

STEPS: dict[str, Any] = {"local_epochs": None, "local_steps": 2}
CENTERS = [0.0, 1.0, 2.0, 4.0]


def told(
    method: Method,
    lr: float,
    rounds: int = 1,
    curvature: float = 1e-6,
    samples: Sequence[int] = (1, 1, 1, 1),
) -> tuple[Any, str]:
    """A run of four clients with nearly flat losses, and what it warned of."""
    data = quadratic_clients([curvature] * 4, CENTERS, samples)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = fit(method, data, QuadraticModule(lr=lr), rounds)
    texts = [str(each.message) for each in found]
    return run, "".join(text for text in texts if text.startswith("Expected"))


def spread(run: Any) -> float:
    return float(run.models["w"].std())


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "stable"), [(0.30, True), (0.32, False)])
def test_the_saddle_point_dynamics(lr: float, stable: bool) -> None:
    """Complete graph of four, identity, penalty 1 and step lr: lr 4 (2 + 4 lr) = 4 at 0.309."""
    run, text = told(HomologicalConstraints("complete"), lr, 300)
    assert (spread(run) < 1) == stable
    if stable:
        assert not text
    else:
        total = lr * 4 * (2 + lr * 4)
        assert f"but got {total:.3g} before round 0 (a = 0.32, m = 4)" in text


def test_the_saddle_point_dynamics_with_momentum_and_several_steps() -> None:
    """A network with momentum 0.9 whose step of the multipliers is given."""
    rate, step, largest = 0.05 * displacement(4, 0.9), 0.01, 4.0
    for total, said in ((3.9, False), (4.1, True)):
        penalty = (total / (rate * largest) - step * largest) / 2
        method = HomologicalConstraints("complete", step, penalty, local_steps=4, local_epochs=None)
        data = small_clients().subset([0, 2, 3, 4])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fit(method, data, small_module(), 1)
        texts = " ".join(str(each.message) for each in found)
        assert (f"Laplacian, but got {total:.3g} before round 0" in texts) == said


@pytest.mark.parametrize(
    ("make", "strength", "formula"),
    [
        (lambda: SquaredPenalty(0.5, **STEPS), 4.0, "2 * penalty_weight * clients"),
        (
            lambda: ConvexClustering(0.1, penalty=0.5, proximal_weight=1.0, **STEPS),
            4.0,
            "(2 * penalty * neighbours + proximal_weight)",
        ),
        (
            lambda: ConvexClustering(0.1, step="printed", penalty=1.0, **STEPS),
            3.0,
            "(1 * penalty * neighbours + proximal_weight)",
        ),
        (lambda: GTVMin("complete", 0.1, step_ratio=0.5, **STEPS), 6.0, "degree / step_ratio"),
        (lambda: FedMAP(GaussianPrior(0.25), **STEPS), 4.0, "the prior's curvature"),
        (
            lambda: FedMAP(DiagonalGaussianPrior(spread=-0.5, offset=0.75), **STEPS),
            4.0,
            "the prior's curvature",
        ),
    ],
    ids=["SquaredPenalty", "ConvexClustering", "printed", "GTVMin", "FedMAP", "FedMAP learned"],
)
class TestPull:
    def test_is_told_from_two_on(self, make: Any, strength: float, formula: str) -> None:
        assert not told(make(), 1.99 / strength)[1]
        text = told(make(), 2.01 / strength)[1]
        assert f"lr * {formula} to be below 2, but got 2.01 before round 0" in text

    def test_momentum_allows_more(self, make: Any, strength: float, formula: str) -> None:
        """Gradient descent with momentum 0.9 on a quadratic: lr c < 2 (1 + 0.9)."""
        data = small_clients().subset([0, 2, 3, 4])
        for lr, said in ((3.79 / strength, False), (3.81 / strength, True)):
            module = small_module()
            module.hparams["lr"] = lr
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                fit(make(), data, module, 1)
            texts = " ".join(str(each.message) for each in found)
            assert (f"lr * {formula} to be below 3.8, but got 3.81" in texts) == said


def test_adaptive_and_exact_solvers_have_no_bound() -> None:
    module = small_module()
    module.optimizer = "adam"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Expected")
        fit(SquaredPenalty(1e3), small_clients(), module, 1)
        told(SquaredPenalty(1e3, local_solver="exact"), 10.0)


@pytest.mark.slow
def test_the_pull_of_the_mean_diverges_above_the_bound() -> None:
    """Two steps a round multiply a distance to the mean by (1 - lr c)^2, with c = 4."""
    for lr, stable in ((0.45, True), (0.55, False)):
        run, text = told(SquaredPenalty(0.5, **STEPS), lr, 60, curvature=1e-2)
        distance = float((run.models["w"] - run.models["w"].mean()).norm())
        assert (distance < 1) == stable
        assert bool(text) != stable


@pytest.mark.slow
@pytest.mark.parametrize("data_term", ["mean", "sum"])
def test_the_prior_diverges_above_the_bound(data_term: Any) -> None:
    """A step leaves 1 - lr c of a distance to the mean, with c = 4 where a client's objective is
    divided by its 1 sample (mean) or by its 3 (sum of losses, variance 1 / 12)."""
    variance, samples = (0.25, 1) if data_term == "mean" else (1 / 12, 3)
    for lr, stable in ((0.45, True), (0.55, False)):
        method = FedMAP(GaussianPrior(variance), "uniform", data_term=data_term, **STEPS)
        run, text = told(method, lr, 60, curvature=1e-2, samples=[samples] * 4)
        distance = float((run.models["w"] - run.models["w"].mean()).norm())
        assert (distance < 1) == stable
        assert bool(text) != stable


def test_the_fewest_samples_are_pulled_the_most() -> None:
    """Curvature 12 over 3 samples is 4."""
    for lr, said in ((0.4975, ""), (0.5025, "lr * the prior's curvature / samples to be below 2")):
        method = FedMAP(GaussianPrior(1 / 12), data_term="sum", **STEPS)
        text = told(method, lr, samples=[5, 3, 7, 4])[1]
        assert said in text
        assert bool(text) == bool(said)


def test_a_learned_variance_is_watched_in_every_round() -> None:
    """Clients that agree take the variances from 1.25 to the offset, 0.25, in the first round."""
    prior = DiagonalGaussianPrior(spread=1.0, offset=0.25)
    text = told(FedMAP(prior, **STEPS), 0.51, rounds=3)[1]
    assert text.count("Expected") == 1
    assert "lr * the prior's curvature to be below 2, but got 2.04 before round 1" in text


def test_a_prior_whose_curvature_is_not_one_number_has_no_bound() -> None:
    assert not told(FedMAP(LaplacePrior(), prior_lr=0.1, **STEPS), 100.0)[1]
