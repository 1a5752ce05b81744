"""The probe tries a step in double precision where rounding in single precision leaves a doubt."""

from typing import Any

import pytest
import torch

from lightning_pfl.core.tree import is_expanded
from lightning_pfl.engine.safety import compare
from lightning_pfl.engine.safety.compare import is_alike
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import fit
from tests.engine.nets import cnn, image_clients


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the same numbers in single precision are as far apart as those of a deep network."""
    monkeypatch.setitem(compare.TOLERANCE, torch.float32, -1.0)


def vectorized(module: PersonalizedModule, engine: str = "vectorized") -> str:
    """Train a round; return the engine that did."""
    data = image_clients((8, 8), dtype=torch.float32)
    found = fit(FedAvg(), data, module, engine=engine).federation.engine.choices
    return str(found["training_step"])


def single() -> PersonalizedModule:
    return cnn(dtype=torch.float32)


def test_rounding_is_no_reason_against_many_clients_at_once(doubtful: None) -> None:
    assert vectorized(single()) == "vectorized (vmap over the forward pass, 2 at once)"


def test_a_step_that_is_another_in_double_precision_is_refused(
    doubtful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compare.TOLERANCE, torch.float64, -1.0)
    with pytest.raises(ValueError, match="differs from the sequential engine's by more than round"):
        vectorized(single())


class InSingle(PersonalizedModule):
    """A module that knows single precision alone."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.float())


def test_a_module_that_can_not_be_tried_is_refused(doubtful: None) -> None:
    parts = single()
    module = InSingle(parts.backbone, parts.head, lr=0.1)
    with pytest.raises(ValueError, match="differs from the sequential engine's by more than round"):
        vectorized(module)


def test_mixed_precision_is_not_tried_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MIXED_TOLERANCE", 0.0)
    data = image_clients((8, 8), dtype=torch.float32)
    with pytest.raises(ValueError, match="differs from the sequential engine's by more than round"):
        fit(FedAvg(), data, single(), precision="bf16-mixed")


def test_nothing_is_tried_for_an_engine_that_would_not_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of many clients takes seconds for a network that is too large for it."""
    monkeypatch.setattr("lightning_pfl.engine.probe.batching_pays", lambda *_: False)

    def refuse(*_: Any) -> Any:
        raise AssertionError("it was tried")

    monkeypatch.setattr(VectorizedEngine, "train", refuse)
    assert vectorized(single(), "auto").startswith("sequential (many clients at once would be")


def test_a_module_keeps_its_precision(doubtful: None) -> None:
    data, module = image_clients((8, 8), dtype=torch.float32), single()
    found = fit(FedAvg(), data, module)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    floats = [leaf for leaf in found.server["model"].values() if leaf.is_floating_point()]
    assert {leaf.dtype for leaf in floats} == {torch.float32}
    assert data.fields[0].dtype == torch.float32


def test_steps_are_alike_where_a_few_entries_differ() -> None:
    """The length of the difference counts, at most a twentieth of the step's."""
    start = {"uploads": {"w": torch.zeros(1, 10_000)}}
    step = torch.ones(1, 10_000)
    few = step.clone()
    few[0, :20] = 0  # of length sqrt(20 / 10,000) = 0.045
    many = step.clone()
    many[0, :30] = 0  # 0.055
    assert is_alike({"uploads": {"w": step}}, {"uploads": {"w": few}}, start)
    assert not is_alike({"uploads": {"w": step}}, {"uploads": {"w": many}}, start)


def test_a_shared_leaf_stays_shared_in_double() -> None:
    from lightning_pfl.engine.safety.double import _double

    leaf = torch.arange(3.0).expand(4, 3)
    double = _double(leaf)
    assert is_expanded(double)
    assert double.dtype == torch.float64
    assert torch.equal(double, leaf.double())
    whole = torch.arange(3)
    assert _double(whole) is whole
