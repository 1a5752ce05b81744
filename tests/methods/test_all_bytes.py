"""Bytes that each method sends, against the formulas of the papers, written out in numbers."""

from __future__ import annotations

from importlib import import_module

import pytest

from lightning_pfl import methods
from tests.methods.case import Bytes, Case, bytes_of_rounds
from tests.methods.cases import ALL

FORMULAS: dict[str, Bytes] = {
    name if setting == "defaults" else f"{name}, {setting}": formula
    for name, case in ALL.items()
    for setting, formula in (case.bytes or {}).items()
}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("name", FORMULAS)
def test_bytes_are_those_of_the_formula(name: str) -> None:
    case = FORMULAS[name]
    rounds = bytes_of_rounds(case.method(), case.make_module(), 2)
    assert rounds[1] == (case.down, case.up)
    if case.from_the_first_round:
        assert rounds[0] == rounds[1]


@pytest.mark.parametrize("name", ALL)
def test_every_method_has_a_formula(name: str) -> None:
    case: Case = ALL[name]
    if case.bytes is None:
        home = getattr(methods, name).__module__.rsplit(".", 1)[1]
        tests = vars(import_module(f"tests.methods.test_{home}"))
        assert any(test.startswith("test_") and "sends" in test for test in tests)
    else:
        assert case.bytes
