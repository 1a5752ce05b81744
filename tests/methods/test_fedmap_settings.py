"""Settings that FedMAP refuses."""

from __future__ import annotations

import math
import re

import pytest

from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.methods import FedMAP
from lightning_pfl.priors import GaussianPrior, LaplacePrior
from lightning_pfl.testing import local_round
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.networks import plain_module


def test_the_prior_is_a_prior() -> None:
    with pytest.raises(TypeError, match=r"Expected `prior` to be a Prior, but got prior=15\.0"):
        FedMAP(15.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["weighting", "data_term"])
def test_choices(name: str) -> None:
    with pytest.raises(ValueError, match=f"Expected `{name}` to be '.* or '.*but got {name}='x'"):
        FedMAP(**{name: "x"})  # type: ignore[arg-type]


def test_without_a_closed_form_there_is_a_step_size() -> None:
    with pytest.raises(ValueError, match="Expected `prior_lr` to be a number, as LaplacePrior has"):
        FedMAP(LaplacePrior())


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, float("nan")])
def test_the_step_size_is_positive(bad: float) -> None:
    with pytest.raises(ValueError, match="Expected `prior_lr` to be a finite number > 0"):
        FedMAP(prior_lr=bad)


@pytest.mark.parametrize("parameters", [None, [], "backbone.1.running_mean"])
def test_something_that_trains_is_under_the_prior(parameters: ParameterSpec) -> None:
    method = FedMAP(GaussianPrior(parameters=parameters))
    text = f"Expected the prior's `parameters` .*but got parameters={re.escape(repr(parameters))}"
    with pytest.raises(ValueError, match=text):
        local_round(method, small_module(), small_clients())


@pytest.mark.parametrize("personal", ["head", ["backbone", "head.bias"]])
def test_nothing_is_personal_and_under_the_prior(personal: ParameterSpec) -> None:
    method = FedMAP(GaussianPrior(parameters="head"), personal=personal)
    with pytest.raises(
        ValueError, match=r"Expected `personal` .* to be disjoint, but both have head\.bias"
    ):
        local_round(method, plain_module(), small_clients())
