"""Every method is compared with an independent reference, and with a closed form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from lightning_pfl import methods
from tests.methods.cases import ALL


def of_file(name: str) -> Iterator[Callable[..., Any]]:
    """The tests of a method's file, also those in classes."""
    home = getattr(methods, name).__module__.rsplit(".", 1)[1]
    module = import_module(f"tests.methods.test_{home}")
    classes = [one for one in vars(module).values() if inspect.isclass(one)]
    for place in [module, *(one for one in classes if one.__module__ == module.__name__)]:
        yield from (test for key, test in vars(place).items() if key.startswith("test_"))


@pytest.mark.parametrize("name", ALL)
def test_every_method_has_a_reference_and_a_closed_form(name: str) -> None:
    """The reference on either engine: what tests compare with each other may be wrong alike."""
    compared, closed = [], []
    for test in of_file(name):
        marks = {mark.name for mark in getattr(test, "pytestmark", [])}
        either = "engine" in inspect.signature(test).parameters
        compared += [test] if "reference" in test.__name__ and either else []
        closed += [test] if "quick" in marks and "slow" not in marks else []
    assert compared, f"tests of {name} need one with `engine` whose name says `reference`"
    assert closed, f"tests of {name} need one with `@closed_form`"
