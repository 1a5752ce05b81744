"""Every prior: gradients against finite differences, the server's step against what it solves."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl import priors
from lightning_pfl.core.tree import (
    Model,
    Tree,
    expand,
    leaves,
    tmap,
)
from lightning_pfl.priors import (
    DiagonalGaussianPrior,
    GaussianPrior,
    LaplacePrior,
    Prior,
)
from lightning_pfl.priors.base import sum_entries
from lightning_pfl.testing import assert_trees_close


class Cauchy(Prior):
    """A user's prior: the regularizer, and nothing else."""

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        return sum_entries(lambda t, m: (1 + (t - m) ** 2).log(), theta, gamma["mean"])


class Correlated(Prior):
    """A user's prior with parameters of another shape: a scale for the whole of a layer."""

    def init(self, model: Model) -> Tree:
        return {"log_scale": tmap(lambda leaf: leaf.new_zeros(()), model)}

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        terms = [
            leaf.flatten(1).square().sum(1) * (-gamma["log_scale"][name]).exp()
            + leaf[0].numel() * gamma["log_scale"][name]
            for name, leaf in theta.items()
        ]
        return torch.stack(terms).sum(0)


PRIORS: dict[str, Callable[[], Prior]] = {
    "GaussianPrior": lambda: GaussianPrior(0.7),
    "GaussianPrior, by name": lambda: GaussianPrior({"bias": 2.5, "*": 0.4}),
    "DiagonalGaussianPrior": lambda: DiagonalGaussianPrior(0.3, 1.1, 0.01),
    "LaplacePrior": lambda: LaplacePrior(0.8, 0.3),
    "Cauchy": Cauchy,
    "Correlated": Correlated,
}
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def problem(prior: Prior) -> tuple[Model, Tree]:
    """Three clients' parameters, and a gamma that none of them has."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    theta = {"weight": draw(3, 2, 4), "bias": draw(3, 2)}
    gamma = prior.init({"weight": draw(2, 4), "bias": draw(2)})
    return theta, tmap(lambda leaf: leaf + 0.3 * draw(*leaf.shape).abs(), gamma)


def differences(function: Callable[[Tree], Tensor], tree: Tree, step: float = 1e-6) -> Tree:
    """Central differences of a scalar function by every entry."""

    def by(leaf: Tensor) -> Tensor:
        found = torch.zeros_like(leaf)
        flat, entries = leaf.view(-1), found.view(-1)
        for i in range(leaf.numel()):
            old = float(flat[i])
            values = []
            for change in (step, -step):
                flat[i] = old + change
                values.append(float(function(tree)))
            flat[i] = old
            entries[i] = (values[0] - values[1]) / (2 * step)
        return found

    return tmap(by, tree)


def test_every_prior_is_tried() -> None:
    assert set(priors.__all__) - {"Prior", "sum_entries"} <= set(PRIORS)


@pytest.mark.parametrize("name", PRIORS)
class TestGradients:
    def test_by_theta(self, name: str) -> None:
        prior = PRIORS[name]()
        theta, gamma = problem(prior)
        each = expand(gamma, 3)
        want = differences(lambda tree: prior.regularizer(tree, each).sum(), theta)
        assert_trees_close(prior.theta_gradient(theta, each), want, rtol=1e-7, atol=1e-8)

    def test_added_to_a_gradient(self, name: str) -> None:
        prior = PRIORS[name]()
        theta, gamma = problem(prior)
        each = expand(gamma, 3)
        pull = prior.theta_gradient(theta, each)
        grads = {**tmap(torch.sin, theta), "shared": torch.ones(3, 2)}
        found = prior.add_gradient(grads, theta, each)
        assert_trees_close(found, {**grads, **{n: grads[n] + r for n, r in pull.items()}})
        # A parameter that no minibatch's loss reaches has no gradient.
        assert prior.add_gradient({"shared": grads["shared"]}, theta, each).keys() == {"shared"}

    def test_by_gamma(self, name: str) -> None:
        prior = PRIORS[name]()
        theta, gamma = problem(prior)

        def total(tree: Tree) -> Tensor:
            return WEIGHTS @ prior.regularizer(theta, expand(tree, 3)) + prior.hyperprior(tree)

        want = differences(total, gamma)
        assert_trees_close(prior.gamma_gradient(theta, gamma, WEIGHTS), want, 1e-7, 1e-8)

    def test_clients_do_not_mix(self, name: str) -> None:
        prior = PRIORS[name]()
        theta, gamma = problem(prior)
        for k in range(3):
            alone = prior.regularizer(tmap(lambda x, k=k: x[k : k + 1], theta), expand(gamma, 1))
            assert float(alone[0]) == pytest.approx(
                float(prior.regularizer(theta, expand(gamma, 3))[k]), rel=1e-14
            )

    def test_a_step_is_equation_3(self, name: str) -> None:
        """Small enough for no projection to matter."""
        prior = PRIORS[name]()
        theta, gamma = problem(prior)
        slope = prior.gamma_gradient(theta, gamma, WEIGHTS)
        want = tmap(lambda leaf, g: leaf - 0.01 * g, gamma, slope)
        assert_trees_close(prior.update(theta, gamma, WEIGHTS, 0.01), want)


def handwritten(prior: Prior) -> list[str]:
    names = ("theta_gradient", "gamma_gradient")
    return [n for n in names if getattr(type(prior), n) is not getattr(Prior, n)]


@pytest.mark.parametrize("name", [n for n in PRIORS if handwritten(PRIORS[n]())])
def test_written_gradients_are_those_of_autograd(name: str) -> None:
    prior = PRIORS[name]()
    theta, gamma = problem(prior)
    each = expand(gamma, 3)
    assert_trees_close(prior.theta_gradient(theta, each), Prior.theta_gradient(prior, theta, each))
    assert_trees_close(
        prior.gamma_gradient(theta, gamma, WEIGHTS),
        Prior.gamma_gradient(prior, theta, gamma, WEIGHTS),
    )


@pytest.mark.parametrize("name", PRIORS)
def test_the_curvature_is_the_largest_second_derivative(name: str) -> None:
    """A Gaussian's matrix of second derivatives is diagonal: its rows' sums are its diagonal."""
    prior = PRIORS[name]()
    theta, gamma = problem(prior)
    if not name.startswith(("Gaussian", "Diagonal")):
        assert prior.curvature(gamma) is None
        return
    second = differences(
        lambda tree: torch.stack(
            [leaf.sum() for leaf in leaves(prior.theta_gradient(tree, expand(gamma, 3)))]
        ).sum(),
        theta,
    )
    largest = max(float(leaf.max()) for leaf in leaves(second))
    assert prior.curvature(gamma) == pytest.approx(largest, rel=1e-8)


def test_the_gaussian_closed_form_is_a_step_by_its_variance() -> None:
    prior = GaussianPrior(0.7)
    theta, gamma = problem(prior)
    mean = {n: (WEIGHTS.view(-1, *[1] * (x.ndim - 1)) * x).sum(0) for n, x in theta.items()}
    assert_trees_close(prior.update(theta, gamma, WEIGHTS, None), {"mean": mean})
    assert_trees_close(prior.update(theta, gamma, WEIGHTS, 0.7), {"mean": mean})


def test_variances_by_name_are_those_of_the_first_that_picks() -> None:
    """Halves of squares over 2.5 and 0.4, by hand; the mean is that of any variances."""
    prior = GaussianPrior(MappingProxyType({"bias": 2.5, "*": 0.4}))  # type: ignore[arg-type]
    theta, gamma = problem(prior)
    each, mean = expand(gamma, 3), gamma["mean"]
    want = [
        float(((theta["bias"][k] - mean["bias"]) ** 2).sum()) / 5.0
        + float(((theta["weight"][k] - mean["weight"]) ** 2).sum()) / 0.8
        for k in range(3)
    ]
    assert prior.regularizer(theta, each).tolist() == pytest.approx(want, rel=1e-14)
    found = prior.update(theta, gamma, WEIGHTS, None)
    assert_trees_close(found, GaussianPrior(0.7).update(theta, gamma, WEIGHTS, None))
    slope = leaves(prior.gamma_gradient(theta, found, WEIGHTS))
    assert all(float(g.abs().max()) < 1e-14 for g in slope)


@pytest.mark.parametrize(
    ("variance", "text"),
    [
        ({}, r"Expected `variance` to have a variance for every parameter, but got variance=\{\}"),
        ({"*": 0.0}, r"Expected `variance\['\*'\]` to be a number > 0, but got .*=0\.0"),
        ({"head": 1.0, "*": 2.0}, "name in `variance` to match a parameter .*but got 'head' for"),
        ({"*": 1.0, "bias": 2.0}, "that those before it leave, but got 'bias' for .* '.' last"),
        ({"bias": 1.0}, r"a variance for every parameter .*\{'bias': 1\.0\} without weight"),
    ],
)
def test_variances_by_name_are_checked(variance: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        problem(GaussianPrior(variance))


def test_an_infinite_variance_pulls_nobody() -> None:
    prior = GaussianPrior(math.inf)
    theta, gamma = problem(prior)
    each = expand(gamma, 3)
    assert prior.regularizer(theta, each).tolist() == [0, 0, 0]
    assert all(not leaf.any() for leaf in leaves(prior.theta_gradient(theta, each)))


def test_a_gradient_of_a_subclass_is_what_is_added() -> None:
    class Stronger(GaussianPrior):
        def theta_gradient(self, theta: Model, gamma: Tree) -> Model:
            return tmap(lambda leaf: 3 * leaf, super().theta_gradient(theta, gamma))

    theta, gamma = problem(Stronger(2.0))
    found = Stronger(2.0).add_gradient(tmap(torch.zeros_like, theta), theta, expand(gamma, 3))
    # Three times the difference to the mean, over the variance 2.
    assert_trees_close(found, tmap(lambda t, m: 1.5 * (t - m), theta, gamma["mean"]))


class TestDiagonal:
    @pytest.mark.parametrize("epsilon", [1e-6, 1e-4, 1e-2, 1.0])
    @pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
    def test_the_exact_step_has_no_gradient_left(self, epsilon: float, size: float) -> None:
        prior = DiagonalGaussianPrior(epsilon=epsilon)
        theta, gamma = problem(prior)
        theta = tmap(lambda leaf: leaf * size, theta)
        found = prior.update(theta, gamma, WEIGHTS, None)
        slope = prior.gamma_gradient(theta, found, WEIGHTS)
        for name in ("mean", "spread"):
            for g, at in zip(leaves(slope[name]), leaves(found[name]), strict=True):
                # A gradient is a difference of terms of this size.
                assert (g.abs() <= 1e-10 * (2 * epsilon * at.abs() + 1e-9)).all()
        assert all((s >= 0).all() for s in leaves(found["spread"]))

    def test_the_spread_is_the_root_of_the_cubic(self) -> None:
        prior = DiagonalGaussianPrior(offset=0.4, epsilon=1e-3)
        deviation = torch.logspace(-12, 12, 200, dtype=torch.float64)
        for v, s in zip(deviation.tolist(), prior.spread_of(deviation).tolist(), strict=True):
            roots = np.roots([1, 0.8, 0.16, -v / 4e-3])
            want = max(r.real for r in roots if abs(r.imag) <= 1e-9 * abs(r))
            assert s == pytest.approx(want, rel=1e-9)
            assert 4e-3 * s * (s + 0.4) ** 2 == pytest.approx(v, rel=1e-12)
        assert float(prior.spread_of(torch.zeros(()))) == 0.0

    def test_a_step_too_far_is_projected(self) -> None:
        """The gradient by s is 2 eps s - v / (2 (s + c)^2); with v = 0 a step of lr = 300 from
        s = 1 ends at 1 - 2 * 0.01 * 300 = -5, beyond -c + margin = -0.95."""
        prior = DiagonalGaussianPrior(1.0, 1.0, epsilon=0.01, margin=0.05)
        theta = {"w": torch.zeros(2, 3, dtype=torch.float64)}
        gamma = prior.init({"w": torch.zeros(3, dtype=torch.float64)})
        found = prior.update(theta, gamma, torch.tensor([0.5, 0.5]).double(), 300.0)
        assert found["spread"]["w"].tolist() == pytest.approx([-0.95] * 3, abs=1e-15)
        assert found["mean"]["w"].tolist() == [0.0] * 3

    def test_a_constant_spread_is_the_isotropic_prior(self) -> None:
        """alpha = 1 / (s + c) in the place of 1 / variance."""
        prior, plain = DiagonalGaussianPrior(0.5, 1.0), GaussianPrior(1.5)
        theta, _ = problem(plain)
        gamma = prior.init({n: leaf[0] + 1 for n, leaf in theta.items()})
        each, mean = expand(gamma, 3), expand({"mean": gamma["mean"]}, 3)
        torch.testing.assert_close(
            prior.regularizer(theta, each), plain.regularizer(theta, mean), rtol=1e-14, atol=0
        )
        assert_trees_close(prior.theta_gradient(theta, each), plain.theta_gradient(theta, mean))


def test_the_laplace_centre_is_the_median_where_the_smoothing_is_small() -> None:
    """Five clients at 0, 1, 2, 3 and 1000, equal weights: the median is 2, the mean 201.2."""
    prior = LaplacePrior(1.0, 0.01)
    theta = {"w": torch.tensor([[0.0], [1.0], [2.0], [3.0], [1000.0]], dtype=torch.float64)}
    gamma: Tree = {"mean": {"w": torch.tensor([1.4], dtype=torch.float64)}}
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    for _ in range(2000):
        gamma = prior.update(theta, gamma, weights, 0.015)
    assert float(gamma["mean"]["w"]) == pytest.approx(2.0, abs=1e-3)


def test_a_sum_of_millions_in_single_precision_keeps_its_digits() -> None:
    theta = {"w": torch.full((1, 4_000_000), 0.1)}
    total = GaussianPrior(0.5).regularizer(theta, {"mean": {"w": torch.zeros(1, 4_000_000)}})
    square = torch.tensor(0.1).double().square()
    assert float(total[0]) == pytest.approx(4_000_000 * float(square), rel=1e-12)


def test_a_prior_says_how_it_was_made() -> None:
    assert repr(LaplacePrior(2.0, 0.5, parameters="head")) == (
        "LaplacePrior(scale=2.0, smoothing=0.5, parameters='head')"
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (GaussianPrior, "variance"),
        (LaplacePrior, "scale"),
        (LaplacePrior, "smoothing"),
        (DiagonalGaussianPrior, "offset"),
        (DiagonalGaussianPrior, "epsilon"),
        (DiagonalGaussianPrior, "margin"),
    ],
)
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), "1", True])
def test_settings_are_positive(make: Any, name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected `{name}` to be .*but got {name}={bad!r}"):
        make(**{name: bad})


def test_only_the_variance_may_be_infinite() -> None:
    assert GaussianPrior(math.inf).variance == math.inf
    with pytest.raises(ValueError, match="Expected `scale` to be a finite number > 0"):
        LaplacePrior(math.inf)


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan, "0", True])
def test_the_spread_begins_above_the_margin(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected `spread` to be .*but got spread={bad!r}"):
        DiagonalGaussianPrior(bad)


def test_a_prior_without_closed_form_has_none() -> None:
    assert not LaplacePrior().has_closed_form
    theta, gamma = problem(LaplacePrior())
    with pytest.raises(NotImplementedError):
        LaplacePrior().update(theta, gamma, WEIGHTS, None)
