"""Each argument of each method has an effect in each combination with a switch, or is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl import methods
from lightning_pfl.core.tree import named_leaves
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.cases import ALL

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
#: Smaller than the defaults, or such that two rounds show an effect.
BASE: dict[str, dict[str, Any]] = {
    "CFL": {"eps_mean": 1e3, "eps_max": 1e-9, "start_round": 0, "min_gap": 0.0},
    "ConvexClustering": {"fusion_weight": 1e-5},
    "FedDF": {"server_steps": 3},
    "FedMD": {"public_samples": 2, "local_epochs": 1},
    "FedRep": {"head_epochs": 2},
    "LinearFedRep": {"body_lr": 0.02},
    "MOCHA": {"inner_iterations": 1, "outer_iterations": 2},
    "PerAda": {"server_steps": 3, "local_epochs": 1},
    "PFedBayes": {"kl_weight": 0.1},
}
#: Other values than the default; without an entry half or one more of it.
OTHER: dict[str, Any] = {
    "aggregation_probability": 0.9,
    "blocks": 0.5,
    "cells": ["backbone", "head"],
    "classifier": "backbone",
    "clusters": 2,
    "distil_rounds": 0,
    "dual_blocks": 0.5,
    "eps_mean": 1e-9,
    "eps_max": 1e9,
    "graph": "ring",
    "initial": None,
    "local_epochs": 2,
    "local_steps": 3,
    "min_gap": 0.99,
    "personal": "backbone",
    "personal_epochs": 3,
    "personal_steps": 3,
    "server_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "shared": "backbone",
    "start_round": 2,
    "step": 0.3,
    "sweeps": 0,
}
#: Of 0 of these a part of a method is off. With 0 epochs of what is shared nothing is left.
LENGTHS = {
    "server_steps",
    "distil_rounds",
    "digest_epochs",
    "head_epochs",
    "outer_iterations",
}
#: By method, where an argument of the name is another in each.
OWN: dict[tuple[str, str], Any] = {
    ("ClusterOracle", "clusters"): [0, 1, 0, 1, 0],
    ("ClusterOracle", "method"): methods.FedProx(0.5),
    ("ConvexClustering", "graph"): "ring",
    ("FedASA", "cells"): ["*.weight", "*.bias"],
    ("FedASA", "shared"): ["backbone.0"],
    ("FedMAP", "prior"): GaussianPrior(0.5),
    ("FedPop", "prior"): GaussianPrior(0.2, parameters="head"),
    ("HeteroFL", "groups"): "full",
    ("PFedBayes", "evaluation_draws"): 2,
    ("PFedBayes", "copy_steps"): 2,
    ("PerAda", "server_weight_decay"): 0.5,
}
#: Tested elsewhere, for the reason that stands here.
ELSEWHERE: dict[tuple[str, str], str] = {
    ("FedMD", "num_outputs"): "the head has as many, and other numbers are refused",
    ("HeteroFL", "narrow"): "networks",
    ("FedEM", "initial"): "models",
    ("IFCA", "initial"): "models",
    ("ConvexClustering", "local_solver"): "for models of few parameters",
    ("FedSplit", "local_solver"): "for models of few parameters",
    ("GTVMin", "local_solver"): "for models of few parameters",
    ("SquaredPenalty", "local_solver"): "for models of few parameters",
    ("MatchedFedAvg", "sweeps"): "units of models that begin as one match at once",
}


def choices(hint: Any) -> list[Any]:
    """The values of a switch."""
    if hint is bool:
        return [False, True]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return next((found for each in get_args(hint) if (found := choices(each))), [])


def switches(name: str) -> Iterator[dict[str, Any]]:
    """Settings that may switch an argument off, or on."""
    yield {}
    make: Any = getattr(methods, name)
    hints = get_type_hints(make.__init__)
    for key, parameter in inspect.signature(make).parameters.items():
        if (name, key) not in ELSEWHERE and key != "weighting" and parameter.default is not None:
            for value in choices(hints[key]):
                if value != parameter.default and value != "given":
                    yield {key: value}
            if key in LENGTHS:
                yield {key: 0}
    if name == "IFCA":
        yield {"restarts": 1, "trial_rounds": 1}
    if name == "FedASA":
        yield {"rule": "given", "shared": ["head"]}
    if name in ("ConvexClustering", "FedMD"):
        yield {"graph": "complete"}


def another(name: str, key: str, now: Any, hint: Any) -> Any:
    """Another value than that of now."""
    if (name, key) in OWN:
        return OWN[name, key]
    if values := choices(hint):
        return next(value for value in values if value not in (now, "given"))
    if key in OTHER:
        return OTHER[key]
    if isinstance(now, int):
        return now + 1
    return now / 2 if now else 0.3


def outcome(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    case = ALL[name]
    make: Any = getattr(methods, name)
    needed = dict(zip(inspect.signature(make).parameters, case.needed, strict=False))
    module: Any = small_module if name == "HeteroFL" else case.problem.get("make_module")
    data: Any = case.problem.get("make_data", small_clients)
    method = make(**{**needed, **settings})
    run = fit(method, data(), (module or small_module)(torch.float64), 3, participation=3)
    trees = {"server": run.server, "state": run.client_state, "models": dict(run.models)}
    sent = [(r.bytes_down, r.bytes_up, r.bytes_exchanged) for r in run.recorder.rounds]
    return {**{name: leaf.clone() for name, leaf in named_leaves(trees).items()}, "sent": sent}


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if not isinstance(a, Tensor):
            return bool(a == b)
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())

    return one.keys() == other.keys() and all(equal(leaf, other[n]) for n, leaf in one.items())


@pytest.mark.parametrize("name", methods.__all__)
def test_an_argument_changes_a_run_or_is_refused(name: str) -> None:
    make: Any = getattr(methods, name)
    hints = get_type_hints(make.__init__)
    parameters = inspect.signature(make).parameters
    needed = dict(zip(parameters, ALL[name].needed, strict=False))
    idle: list[Any] = []
    for switch in switches(name):
        off = LENGTHS & switch.keys()
        base = BASE.get(name, {}).items()
        settings = {k: v for k, v in base if not off or k == "public_samples"} | switch
        reference = outcome(name, settings)
        for key, parameter in parameters.items():
            skipped = key == "local_epochs" and "local_steps" in parameters
            if key in switch or (name, key) in ELSEWHERE or skipped:
                continue
            now = settings.get(key, needed.get(key, parameter.default))
            value = another(name, key, now, hints[key])
            other = {**settings, key: value}
            if key == "local_steps":
                other.pop("local_epochs", None)
            try:
                found = outcome(name, other)
            except (ValueError, MisconfigurationException) as error:
                refused = f"`{key}`" in str(error) or f"{key}=" in str(error)
                idle += [] if refused else [(switch, key, error)]
                continue
            idle += [(switch, key, value)] if is_same(reference, found) else []
    assert idle == []
