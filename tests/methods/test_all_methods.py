"""The conformance suite over all methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.methods.base import Method
from lightning_pfl.priors import DiagonalGaussianPrior, GaussianPrior, LaplacePrior
from lightning_pfl.testing.conformance import (
    CHECKS,
    SIZES,
    MakeMethod,
    Problem,
    check_engines_agree,
    check_received_is_not_changed,
    check_resume_is_exact,
    check_what_is_kept_is_not_trained,
)
from lightning_pfl.testing.rounds import EngineName, assert_trees_close, local_round
from tests.methods import test_fedper
from tests.methods.cases import CASES, PROBLEMS, case_of
from tests.methods.test_heterofl import thin

ENGINES: tuple[EngineName, ...] = ("vectorized", "sequential")
# Runs both engines by itself.
OTHERS = [check for check in CHECKS if check is not check_engines_agree]
adam = partial(torch.optim.Adam, lr=0.01)
VARIANTS: dict[str, Callable[[], Method]] = {
    "APFL, fixed": lambda: methods.APFL(mixing=0.3),
    "APFL, outputs": lambda: methods.APFL(mixing=0.3, adaptive=True, mix="outputs"),
    "ConvexClustering, printed": lambda: methods.ConvexClustering(
        0.2, step="printed", proximal_weight=0.3
    ),
    "ConvexClustering, blocks": lambda: methods.ConvexClustering(0.2, blocks=0.4, graph="ring"),
    "Ditto, separate epochs": lambda: methods.Ditto(personal_epochs=2),
    "Ditto, separate steps": lambda: methods.Ditto(
        personal_steps=5, local_epochs=None, local_steps=2
    ),
    "FedAvg, steps": lambda: methods.FedAvg(local_epochs=None, local_steps=3),
    "FedMAP, exact": lambda: methods.FedMAP(DiagonalGaussianPrior(), "exact", prior_lr=0.1),
    "FedMAP, Laplace": lambda: methods.FedMAP(LaplacePrior(), "per_sample", prior_lr=0.1),
    "FedMAP, sum over the head": lambda: methods.FedMAP(
        GaussianPrior(2.0, parameters="head"), "uniform", data_term="sum"
    ),
    "FedMTL, asrun": lambda: methods.FedMTL(0.05, "asrun"),
    "FedMTL, none": lambda: methods.FedMTL(0.05, "none"),
    "FedRep, steps and rates": lambda: methods.FedRep(
        head_steps=4, body_steps=2, head_lr=0.1, body_lr=0.02
    ),
    "FedU, decentralized": lambda: methods.FedU("complete", 0.3, decentralized=True),
    "GTVMin, l1": lambda: methods.GTVMin("complete", 0.05, "l1", step_ratio=2.0),
    "GTVMin, squared": lambda: methods.GTVMin("complete", 0.05, "squared"),
    "FedASA, random": lambda: methods.FedASA(rule="random", every=2),
    "FedAvg, Adam on the server": lambda: methods.FedAvg(server_optimizer=adam),
    "FedMD, clusters": lambda: methods.FedMD(7, local_epochs=1, clusters=2),
    "FedMD, graph": lambda: methods.FedMD(7, local_epochs=1, graph="ring"),
    "HeteroFL, all widths": lambda: methods.HeteroFL({"thin": thin()}),
    "HeteroFL, rolling": lambda: methods.HeteroFL({"thin": thin()}, rule="rolling"),
    "HeteroFL, random": lambda: methods.HeteroFL({"thin": thin()}, rule="random"),
    "FedEM, trajectory": lambda: methods.FedEM(2, weight_step=0.5, local_steps=3),
    "FedEM, normal distributions": lambda: methods.FedEM(2, input_size=25),
    "FedPop, learned variances": lambda: methods.FedPop(
        DiagonalGaussianPrior(parameters="head"), 0.02, chain_steps=4, burn_in=2
    ),
    "PFedBayes, moments": lambda: methods.PFedBayes(0.01, "moments", copy_steps=None),
    "IFCA, gradients": lambda: methods.IFCA(2, averaging="gradients"),
    "IFCA, restarts": lambda: methods.IFCA(2, restarts=2, trial_rounds=1),
    "LGFedAvg, backbone": lambda: methods.LGFedAvg("backbone"),
    "LinearFedRep, gradients": lambda: methods.LinearFedRep(
        "module", "gradient", head_steps=3, body_lr=0.02, head_lr=0.03
    ),
    "MOCHA, own bounds": lambda: methods.MOCHA(0.05, local_fraction=2.0, bound="own"),
    "PFedMe, over-mixed": lambda: methods.PFedMe(15.0, server_mixing=1.4),
    "PerFedAvg, first order": lambda: methods.PerFedAvg(0.1),
    "PerFedAvg, learned rates": lambda: methods.PerFedAvg(0.1, "hessian-free", learn_inner_lr=True),
    "SCAFFOLD, option II": lambda: methods.SCAFFOLD("II"),
    "SheafFMTL, separate": lambda: methods.SheafFMTL(
        "complete", 0.05, 0.1, 0.3, laplacian="separate"
    ),
}
"""Settings that change what clients compute, beyond those of the cases."""


def test_a_test_file_without_a_case_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(test_fedper, "CASE")
    with pytest.raises(
        AssertionError, match=r"test_fedper\.py needs `CASE = Case\(...\)` for FedPer"
    ):
        case_of("FedPer")


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_engines_agree(name: str) -> None:
    check_engines_agree(CASES[name], Problem(**PROBLEMS[name]), (2, len(SIZES)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engines_agree_for_every_chunk_size(name: str) -> None:
    check_engines_agree(CASES[name], Problem(**PROBLEMS[name]), range(1, len(SIZES) + 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_engines_agree_on_other_settings(name: str) -> None:
    check_engines_agree(VARIANTS[name], Problem(**PROBLEMS[name.split(",")[0]]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Expected more rounds than the 3 in which IFCA")
@pytest.mark.parametrize("check", [check_resume_is_exact, check_what_is_kept_is_not_trained])
@pytest.mark.parametrize("name", VARIANTS)
def test_other_settings_conform(name: str, check: Any, tmp_path: Path) -> None:
    """Where settings change what clients and the server keep."""
    check(VARIANTS[name], Problem(folder=tmp_path, **PROBLEMS[name.split(",")[0]]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engines_agree_in_single_precision(name: str) -> None:
    problem = Problem(**PROBLEMS.get(name, {}))
    data = problem.make_data(torch.float32, True)
    one, other = (
        local_round(CASES[name](), problem.make_module(torch.float32), data, engine)
        for engine in ENGINES
    )
    for got, want in (
        (one.result.uploads, other.result.uploads),
        (one.result.client_state, other.result.client_state),
        (one.server, other.server),
    ):
        assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def problems(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Problem]:
    """Make one problem for each method, so that its checks share fits."""
    return cache(lambda name: Problem(engine, tmp_path_factory.mktemp("fits"), **PROBLEMS[name]))


@pytest.mark.parametrize("check", OTHERS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", CASES)
def test_conformance(
    name: str,
    check: Callable[[MakeMethod, Problem], None],
    problems: Callable[[str], Problem],
) -> None:
    check(CASES[name], problems(name))


@pytest.mark.sweep(10)
@pytest.mark.parametrize("name", CASES)
def test_the_sequential_engine_does_not_change_what_was_received(name: str) -> None:
    """It hands methods the rows themselves, where the vectorized engine hands them copies."""
    check_received_is_not_changed(CASES[name], Problem("sequential", **PROBLEMS[name]))
