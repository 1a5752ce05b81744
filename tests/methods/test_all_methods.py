"""The conformance suite over all methods and both engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_pfl.testing.conformance import (
    CHECKS,
    MakeMethod,
    Problem,
    check_engines_agree,
)
from lightning_pfl.testing.rounds import EngineName, assert_trees_close, local_round
from tests.methods import test_fedper
from tests.methods.cases import CASES, PROBLEMS, case_of

ENGINES: tuple[EngineName, ...] = ("vectorized", "sequential")
# Runs both engines by itself.
OTHERS = [check for check in CHECKS if check is not check_engines_agree]


def test_a_test_file_without_a_case_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(test_fedper, "CASE")
    with pytest.raises(
        AssertionError, match=r"test_fedper\.py needs `CASE = Case\(...\)` for FedPer"
    ):
        case_of("FedPer")


@pytest.mark.parametrize("name", CASES)
def test_engines_agree(name: str) -> None:
    check_engines_agree(CASES[name], Problem(**PROBLEMS.get(name, {})))


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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("check", OTHERS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", CASES)
def test_conformance(
    name: str, check: Callable[[MakeMethod, Problem], None], engine: str, tmp_path: Path
) -> None:
    problem = Problem(engine=engine, folder=tmp_path, **PROBLEMS.get(name, {}))
    check(CASES[name], problem)
