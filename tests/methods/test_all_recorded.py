"""Steps that engines record and replay: what they read is known, and replays have their bits."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine import trace
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import Fit, assert_trees_equal, fit
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.cases import CASES, PROBLEMS

RECORDED = [
    name for name in CASES if hasattr(getattr(methods, name).client_step, "recorded_settings")
]
#: With which settings, where a step of `CASES` reads the learning rate.
SETTINGS: dict[str, Callable[[], Method]] = {"APFL": lambda: methods.APFL(0.3)}
#: What a phase, the module and the parameter split are is known of every recording.
KNOWN = {"parameter_split"}


def reads(kind: type, function: Any, seen: set[str]) -> set[str]:
    """Attributes of a method that a function of it reads, also in others that it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id != "self" or node.attr in seen:
                continue
            seen.add(node.attr)
            other = inspect.getattr_static(kind, node.attr, None)
            if inspect.isfunction(other):
                found |= reads(kind, other, seen)
            else:
                found.add(node.attr)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_names_the_settings_that_it_reads(name: str) -> None:
    kind: Any = getattr(methods, name)
    step = kind.client_step
    assert reads(kind, step, set()) - KNOWN == set(step.recorded_settings)


def clients() -> FederatedTensorDataset:
    """As many minibatches each, so that a chunk's steps are recorded, too."""
    fields = small_clients().fields
    positions = torch.arange(len(fields[0])).split(4)[:4]
    return FederatedTensorDataset(fields, positions, batch_size=1, shuffle=True)


def run(name: str, engine: str) -> tuple[Fit, int]:
    make = PROBLEMS.get(name, {}).get("make_module", small_module)
    method = SETTINGS.get(name, CASES[name])()
    found = fit(method, clients(), make(torch.float64), 3, engine)
    used = found.federation.engine._engines["training_step"]
    return found, used.whole.used


@pytest.mark.sweep(12)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", RECORDED)
def test_replays_have_the_bits_of_steps(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "WARM_UP", 1)
    replayed, used = run(name, engine)
    assert used
    monkeypatch.delattr(getattr(methods, name).client_step, "recorded_settings")
    plain, none = run(name, engine)
    assert not none
    assert_trees_equal(replayed.server, plain.server)
    assert_trees_equal(replayed.client_state, plain.client_state)
    assert_trees_equal(replayed.models, plain.models)
