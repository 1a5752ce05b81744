"""What a prior of a user's own may get wrong, and what it is told before the first round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.core.tree import Model, Tree, tmap
from lightning_pfl.methods import FedMAP
from lightning_pfl.priors import (
    GaussianPrior,
    LaplacePrior,
    Prior,
    sum_entries,
)
from lightning_pfl.priors.probe import check_prior, depends_on_gamma
from lightning_pfl.testing import QuadraticModule, fit, q2


def model(dtype: torch.dtype = torch.float32) -> Model:
    return {"weight": torch.linspace(-1, 1, 6, dtype=dtype).view(2, 3), "bias": torch.ones(2)}


def square(t: Tensor, m: Tensor) -> Tensor:
    return (t - m).square()


class Summed(Prior):
    """The sum over clients as well: what is easily forgotten."""

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        return torch.stack([square(t, gamma["mean"][n]).sum() for n, t in theta.items()]).sum()


class Each(Prior):
    """An entry of a layer for each client, and no sum over entries."""

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        return square(theta["bias"], gamma["mean"]["bias"])


class Plain(Prior):
    """A number of Python."""

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        return 0.0  # type: ignore[return-value]


class Mixing(Prior):
    """Shares of the clients' total distance."""

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        each = sum_entries(square, theta, tmap(torch.zeros_like, theta))
        return each / each.sum()


class Blind(Prior):
    """The parameters leave the graph."""

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        return sum_entries(lambda t: t.detach().square(), theta)


class Renamed(GaussianPrior):
    """A gradient of other parameters."""

    def theta_gradient(self, theta: Model, gamma: Tree) -> Model:
        return {f"model.{n}": leaf for n, leaf in super().theta_gradient(theta, gamma).items()}


class OneTensor(LaplacePrior):
    def init(self, model: Model) -> Tree:
        return torch.zeros(3)  # type: ignore[return-value]


class OneNumber(LaplacePrior):
    def init(self, model: Model) -> Tree:
        return {"mean": model, "scale": 1.0}


class OtherMean(LaplacePrior):
    def init(self, model: Model) -> Tree:
        return {"mean": {"weight": model["weight"]}}


class Ridge(Prior):
    """A prior around 0, of which there is nothing to learn."""

    def init(self, model: Model) -> Tree:
        return {}

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        return sum_entries(lambda t: t.square() / 2, theta)


class Still(Ridge):
    """The same, without a step size to give."""

    def closed_form(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        return gamma


MISTAKES: list[tuple[type[Prior], type[Exception], str]] = [
    (
        Summed,
        ValueError,
        r"`regularizer` of Summed .*\(clients,\), one .*, but got shape \(\) for 2 clients",
    ),
    (Each, ValueError, r"`regularizer` of Each .*but got shape \(2, 2\) for 2 clients\. Sum over"),
    (Plain, ValueError, r"`regularizer` of Plain .*but got 0\.0 for 2 clients"),
    (
        Mixing,
        ValueError,
        r"`regularizer` of Mixing to return .* depends on no other client, but got \[.*\] for two",
    ),
    (Blind, ValueError, r"`regularizer` of Blind to depend on `theta`, but got no gradient"),
    (Renamed, ValueError, r"`theta_gradient` of Renamed .*but got \{'model\.weight'"),
    (OneTensor, TypeError, r"`init` of OneTensor to return a dict .*but got Tensor"),
    (OneNumber, TypeError, r"`init` of OneNumber to return a dict .*but got a dict with float in"),
    (OtherMean, ValueError, r"'mean' that `init` of OtherMean returns .*but got \{'mean/weight'"),
]


@pytest.mark.parametrize(("kind", "error", "text"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_a_mistake_has_a_name(kind: type[Prior], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_prior(kind(), model())


def test_it_is_told_before_the_first_round() -> None:
    with pytest.raises(
        ValueError,
        match=r"`regularizer` of Squares to return shape \(clients,\), one number per client",
    ):
        fit(FedMAP(Squares(), prior_lr=0.1), q2())


class Squares(Prior):
    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        return square(theta["w"], gamma["mean"]["w"]).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_mistake(dtype: torch.dtype) -> None:
    """Rows of large models, summed in the precision of the model itself."""

    class Coarse(Prior):
        def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
            return square(theta["w"], gamma["mean"]["w"]).flatten(1).sum(1) + theta["w"].sum(1)

    generator = torch.Generator().manual_seed(0)
    check_prior(Coarse(), {"w": torch.randn(100_001, generator=generator).to(dtype)})


# --- a prior that learns nothing ---


def test_a_fixed_prior_stays_as_it_is() -> None:
    """lr = 0.1, a = (1, 3), c = (0, 1), from 0.5: theta - 0.1 (a (theta - c) + theta)."""
    for prior, lr in ((Ridge(), 0.3), (Still(), None)):
        run = fit(FedMAP(prior, "uniform", prior_lr=lr), q2(), QuadraticModule(1, 0.1, 0.5), 1)
        assert run.server == {}
        want = [0.5 - 0.1 * (0.5 + 0.5), 0.5 - 0.1 * (-1.5 + 0.5)]
        assert run.models["w"].flatten().tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("prior", "learns"), [(Ridge(), False), (LaplacePrior(), True), (GaussianPrior(), True)]
)
def test_what_is_fixed_is_said(prior: Prior, learns: bool) -> None:
    assert depends_on_gamma(prior, model()) == learns
    method: Any = FedMAP(prior, prior_lr=0.1)
    parameter_split = fit(method, q2(), rounds=1).strategy.federation.parameter_split
    said = "Ridge doesn't depend on gamma: the server leaves it as `init` made it."
    assert method.notes(parameter_split) == ([] if learns else [said])
