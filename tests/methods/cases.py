"""The cases of all methods, collected from their test files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from lightning_pfl import methods
from lightning_pfl.methods.base import Method
from tests.methods.case import Case


def case_of(name: str) -> Case:
    """The ``CASE`` of a method's test file."""
    module = getattr(methods, name).__module__.rsplit(".", 1)[1]
    found = getattr(import_module(f"tests.methods.test_{module}"), "CASE", None)
    assert isinstance(found, Case), (
        f"tests/methods/test_{module}.py needs `CASE = Case(...)` for {name}; "
        "tests/methods/case.py says what each argument is"
    )
    return found


ALL: dict[str, Case] = {name: case_of(name) for name in methods.__all__}
CASES: dict[str, Callable[[], Method]] = {name: case.method for name, case in ALL.items()}
PROBLEMS: dict[str, Mapping[str, Any]] = {name: case.problem for name, case in ALL.items()}
