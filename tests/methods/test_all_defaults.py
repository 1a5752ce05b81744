"""What a method does without arguments: the published settings, and never nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model
from lightning_pfl.methods.base import Method
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.cases import PROBLEMS

Make = Callable[[], Method]

#: What a method can't do without; all other arguments are the defaults.
NEEDED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "ClusterOracle": lambda: (lambda client: client % 2,),
    **dict.fromkeys(
        ("FedU", "GTVMin", "HomologicalConstraints", "SheafFMTL"), lambda: ("complete",)
    ),
}


def default(name: str) -> Method:
    made: Method = getattr(methods, name)(*NEEDED.get(name, tuple)())
    return made


def test_what_is_needed_is_what_has_no_default() -> None:
    for name in methods.__all__:
        parameters = list(inspect.signature(getattr(methods, name)).parameters.values())
        without = [one for one in parameters if one.default is one.empty]
        assert len(without) == len(NEEDED.get(name, tuple)()), name


@pytest.mark.parametrize("name", methods.__all__)
def test_by_default_a_method_is_itself(name: str) -> None:
    method = default(name)
    made: Callable[..., Any] = PROBLEMS.get(name, {}).get("make_module", small_module)
    module = made(torch.float64)
    assert (
        method.notes(ParameterSplit(module, method.resolve_personal(ParameterSplit(module)))) == []
    )


#: Of each paper, or of its authors' code where the paper says nothing.
PUBLISHED: dict[str, dict[str, Any]] = {
    "APFL": {"mixing": 0.5, "adaptive": False, "mix": "parameters", "weighting": "uniform"},
    "CFL": {"eps_mean": 0.4, "eps_max": 1.6, "start_round": 20},
    "Ditto": {"prox_weight": 1.0, "weighting": "uniform"},
    "FedAvg": {"local_epochs": 1, "weighting": "samples", "server_optimizer": None},
    "FedBN": {"weighting": "uniform"},
    "FedMAP": {"weighting": "posterior", "data_term": "mean", "prior_lr": None},
    "FedPer": {"personal": "head", "weighting": "samples"},
    "FedProx": {"prox_weight": 0.1, "weighting": "samples"},
    "FedRep": {"personal": "head", "head_epochs": 10, "body_epochs": 1, "weighting": "samples"},
    "FedU": {"lap_factor": 1.0, "decentralized": False},
    "L2GD": {"mixing_weight": 0.5, "local_steps": 1},
    "LGFedAvg": {"shared": "head", "weighting": "uniform"},
    "LinearFedRep": {"initialization": "moments", "head_solver": "exact", "weighting": "uniform"},
    "MOCHA": {"outer_iterations": 10, "inner_iterations": 100, "local_fraction": 0.5},
    "PFedMe": {"moreau_weight": 15.0, "inner_steps": 5, "inner_lr": 0.05, "server_mixing": 1.0},
    "PerFedAvg": {"inner_lr": 0.01, "order": "first", "difference": 1e-3, "weighting": "uniform"},
    "SCAFFOLD": {"option": "II", "server_lr": 1.0},
    "SheafFMTL": {"regularization": 1e-3, "map_lr": 0.01, "map_std": 0.01},
}
#: Their papers have another problem or no number, so that any value above 0 does.
OURS = {"FedMTL": "regularization", "SquaredPenalty": "penalty_weight", "GTVMin": "regularization"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    method = default(name)
    assert {key: getattr(method, key) for key in PUBLISHED[name]} == PUBLISHED[name]


def test_fedmaps_prior_is_a_gaussian_of_variance_15() -> None:
    prior = methods.FedMAP().prior
    assert isinstance(prior, GaussianPrior)
    assert prior.variance == 15.0


@pytest.mark.parametrize("name", OURS)
def test_defaults_of_ours_do_something(name: str) -> None:
    assert getattr(default(name), OURS[name]) > 0


# By name: what the method would be if a setting were 0, or its idea were missing.
TWINS: dict[str, Make] = {
    "APFL": lambda: methods.APFL(0.0),
    "ClusterOracle": methods.FedAvg,
    "ConvexClustering": methods.LocalOnly,
    "Ditto": lambda: methods.Ditto(0.0),
    "FedBN": lambda: methods.FedAvg(weighting="uniform"),
    "FedMAP": methods.LocalOnly,
    "FedMTL": lambda: methods.FedMTL(0.0),
    "FedPer": methods.FedAvg,
    "FedProx": methods.FedAvg,
    "FedRep": methods.FedPer,
    "FedU": lambda: methods.FedU("complete", 0.0),
    "GTVMin": methods.LocalOnly,
    "HomologicalConstraints": lambda: methods.LocalOnly(local_epochs=None, local_steps=1),
    "IFCA": lambda: methods.FedAvg(weighting="uniform"),
    "L2GD": lambda: methods.L2GD(0.0),
    "LGFedAvg": lambda: methods.FedAvg(weighting="uniform"),
    "PFedMe": lambda: methods.FedAvg(weighting="uniform"),
    "PerFedAvg": lambda: methods.PerFedAvg(0.0),
    "SCAFFOLD": lambda: methods.FedAvg(weighting="uniform"),
    "SheafFMTL": lambda: methods.SheafFMTL("complete", 0.0),
    "SquaredPenalty": methods.LocalOnly,
}
#: CFL splits nobody before round 20; the others have no such twin.
WITHOUT_TWIN = {"CFL", "FedAvg", "LinearFedRep", "LocalOnly", "MOCHA"}


def models_of(method: Method) -> Model:
    """After three rounds, of which L2GD's coin makes one an aggregation."""
    return fit(method, small_clients(), small_module(), 3).models


def test_every_method_is_compared_or_excused() -> None:
    assert set(TWINS) | WITHOUT_TWIN == set(methods.__all__)
    assert not set(TWINS) & WITHOUT_TWIN


@pytest.mark.parametrize("name", TWINS)
def test_a_default_is_never_a_no_op(name: str) -> None:
    """A difference far beyond rounding, which is below 1e-12."""
    ours, twin = models_of(default(name)), models_of(TWINS[name]())
    trained = [n for n, _ in small_module().named_parameters()]
    largest = max(float((ours[n] - twin[n]).abs().max()) for n in trained)
    assert largest > 1e-6
