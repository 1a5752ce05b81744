"""What a method does without arguments: the published settings, and never nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.contract.local import PerClient
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model
from lightning_pfl.methods.base import Method
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.cases import ALL


def default(name: str) -> Method:
    made: Method = getattr(methods, name)(*ALL[name].needed)
    return made


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.needed])
def test_what_is_needed_is_named_where_it_is_missing(name: str) -> None:
    method = getattr(methods, name)
    first = next(iter(inspect.signature(method).parameters))
    with pytest.raises((TypeError, ValueError), match=first):
        method()


@pytest.mark.parametrize("name", methods.__all__)
def test_by_default_a_method_is_itself(name: str) -> None:
    method = default(name)
    made: Callable[..., Any] = ALL[name].problem.get("make_module", small_module)
    module = made(torch.float64)
    assert (
        method.notes(ParameterSplit(module, method.resolve_personal(ParameterSplit(module)))) == []
    )


@pytest.mark.parametrize("name", methods.__all__)
def test_passes_and_steps_may_differ_between_clients(name: str) -> None:
    """On the command line, which takes what annotations say."""
    hints = get_type_hints(getattr(methods, name).__init__)
    found = {hints[each] for each in ("local_epochs", "local_steps") if each in hints}
    assert found <= {PerClient | None}


PUBLISHED = [name for name, case in ALL.items() if case.published]


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    method, published = default(name), ALL[name].published
    assert {key: getattr(method, key) for key in published} == published


def test_fedmaps_prior_is_a_gaussian_of_variance_15() -> None:
    prior = methods.FedMAP().prior
    assert isinstance(prior, GaussianPrior)
    assert prior.variance == 15.0


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.above_zero])
def test_defaults_of_ours_do_something(name: str) -> None:
    assert getattr(default(name), str(ALL[name].above_zero)) > 0


def models_of(method: Method) -> Model:
    """After three rounds, of which L2GD's coin makes one an aggregation."""
    return fit(method, small_clients(), small_module(), 3).models


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.twin])
def test_a_default_is_never_a_no_op(name: str) -> None:
    """A difference far beyond rounding, which is below 1e-12."""
    make = ALL[name].twin
    assert make is not None
    ours, twin = models_of(default(name)), models_of(make())
    trained = [n for n, _ in small_module().named_parameters()]
    largest = max(float((ours[n] - twin[n]).abs().max()) for n in trained)
    assert largest > 1e-6
