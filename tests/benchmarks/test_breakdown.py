"""A round's parts add up, and the limit counts the operations of its products."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import breakdown, cells
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.test_table import TINY


def event(name: str, parent: Any, milliseconds: float, shape: tuple[int, ...] = (7,)) -> Any:
    return SimpleNamespace(
        name=name, cpu_parent=parent, self_cpu_time_total=1e3 * milliseconds, input_shapes=[shape]
    )


def test_operators_belong_to_their_part() -> None:
    training = event("phase training", None, 0.0)
    operator = event("aten::linear", training, 1.0)
    events = [
        training,
        operator,
        event("aten::addmm", operator, 2.0),
        event("mkldnn::_linear_pointwise", training, 4.0),
        event("aten::convolution_backward", training, 8.0),
        event("aten::_fused_sgd_", training, 3.0),
        event("aten::add_", training, 5.0, (2, 3)),
        event("aten::add_", training, 7.0, (2, 4)),
        event("aten::index_select", training, 9.0),
        event("aten::mm", event("phase evaluation", None, 0.0), 100.0),
    ]
    marks = breakdown.Marks()
    timed = {"round": 0.2, "training": 0.1, "aggregation": 0.02, "evaluation": 0.05}
    marks.rounds = [{}] * cells.WARM_UP + [timed, timed, timed, {}]
    marks.used = 0.5
    found = breakdown.divide(marks, events, {(2, 3)})
    assert found == pytest.approx(
        {
            "products": 0.5 * 0.015,
            "optimizer": 0.5 * 0.008,
            "gathering": 0.5 * 0.009,
            "other operators": 0.5 * 0.007,
            "Python": 0.1 - 0.5 * 0.039,
            "aggregation": 0.02,
            "evaluation": 0.05,
            "rest": 0.03,
        }
    )


def test_a_round_is_divided_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr(breakdown, "peak", lambda: 1e11)
    found = breakdown.measure("tiny")
    for side in ("ours", "theirs"):
        assert set(found[side]) == set(breakdown.PARTS)
        assert min(found[side].values()) >= 0
        assert found[side]["products"] > 0 < found[side]["evaluation"]
    assert found["ours"]["aggregation"] > 0
    assert "limit" in breakdown.describe("tiny", found)


def test_operations_are_those_of_the_layers() -> None:
    """Forward, for the weights, and for the second layer's inputs: 2 for each weight and sample."""
    samples = sum(TINY.sizes()) * TINY.cohort / TINY.clients
    assert breakdown.operations(TINY) == samples * 2 * (2 * (6 * 5 + 5 * 10) + 5 * 10)


def test_recurrent_layers_count() -> None:
    """An LSTM's gates: 64 inputs and 128 states to 512 numbers, 32 times, and about twice back."""
    workload = WORKLOADS["lstm"]
    forward = 2 * (32 * 512 * (64 + 128) + 128 * 10)
    expected = 3 * forward * workload.samples * workload.cohort
    assert breakdown.operations(workload) == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_the_peak_is_a_rate() -> None:
    with torch.inference_mode():
        assert breakdown.peak() > 1e9
