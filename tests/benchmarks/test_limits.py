"""The products of a step alone, and what they leave to reach."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import limits
from benchmarks.cells import use_threads
from benchmarks.limits import Limit, WrittenDown, ways
from benchmarks.workloads import WORKLOADS, Workload
from lightning_pfl.models import MLP

aten = torch.ops.aten
TINY = Workload(
    "tiny", lambda: MLP([6, 5, 10]), (6,), clients=4, samples=10, batch_size=4, cohort=2
)


def calls_of(module: nn.Module, inputs: Tensor) -> list[Any]:
    optimizer = torch.optim.SGD(module.parameters(), fused=True)
    with WrittenDown() as written:
        F.cross_entropy(module(inputs), torch.zeros(len(inputs), dtype=torch.int64)).backward()
        optimizer.step()
    *calls, last = written.calls.values()
    assert last.call[0] is aten._fused_sgd_.default
    assert [one.is_pass for one in (*calls, last)] == [False] * len(calls) + [True]
    return [one.call for one in calls]


def test_the_products_of_two_layers() -> None:
    """Forward one a layer; backward the weights' gradients, and the inputs' but for the first."""
    found = calls_of(MLP([6, 5, 10]), torch.randn(4, 6))
    shapes = [(operator, *(tuple(arg.shape) for arg in args[-2:])) for operator, args, _ in found]
    assert shapes[:2] == [
        (aten.addmm.default, (4, 6), (6, 5)),
        (aten.addmm.default, (4, 5), (5, 10)),
    ]
    assert sorted(shapes[2:], key=str) == sorted(
        [
            (aten.mm.default, (10, 4), (4, 5)),
            (aten.mm.default, (4, 10), (10, 5)),
            (aten.mm.default, (5, 4), (4, 6)),
        ],
        key=str,
    )


@pytest.mark.parametrize(
    ("module", "inputs", "alternatives"),
    [
        (nn.Linear(6, 10), (4, 6), 2),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3), nn.Flatten()),
         (4, 3, 7, 7), 4),
    ],
)  # fmt: skip
def test_all_ways_compute_the_same(
    module: nn.Module, inputs: tuple[int, ...], alternatives: int
) -> None:
    found = [ways(*call) for call in calls_of(module, torch.randn(inputs))]
    assert sum(len(calls) - 1 for calls in found) == alternatives
    for first, *others in found:
        expected = first()
        for other in others:
            torch.testing.assert_close(other(), expected, rtol=1e-4, atol=1e-5)


def test_equal_calls_are_counted() -> None:
    module, inputs = MLP([6, 5, 10]), torch.randn(4, 6)
    with WrittenDown() as written, torch.no_grad():
        for size in (4, 4, 3):
            module(inputs[:size])
    found = [(tuple(one.call[1][1].shape), one.count) for one in written.calls.values()]
    assert found == [((4, 6), 2), ((4, 5), 2), ((3, 6), 1), ((3, 5), 1)]


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        ("FedAvg", 2),  # those of the optimizer for weights and for biases, which don't decay
        ("FedMAP", 2 + 2),
        ("SCAFFOLD", 2 + 2),
        ("Ditto", 2 * 2 + 2),
        ("PFedMe", 2 + 5 * 3 + 2),
    ],
)
def test_the_passes_of_methods(method: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps for each of two clients; of the measured losses only products count."""
    found: list[WrittenDown] = []

    def seconds(written: WrittenDown, passes: bool) -> float:
        found.append(written)
        return 1.0

    monkeypatch.setattr(WrittenDown, "seconds", seconds)
    steps = limits.measure(TINY, method, rounds=1).steps
    assert steps == 2 * math.ceil(10 / 4)
    counted = found[0].calls.values()
    assert sum(one.count for one in counted if one.is_pass) == steps * passes
    forward = [
        one for one in counted if one.call[0] is aten.addmm.default and len(one.call[1][1]) == 10
    ]
    # All ten samples of each client at once, in two layers.
    assert sum(one.count for one in forward) == (2 * 2 if method == "FedMAP" else 0)


def test_what_is_left_to_reach() -> None:
    """Ten steps of 4 in a round of 50: 10 beside them, and 2 a step are products and optimizer."""
    found = Limit(step=4.0, products=1.5, optimizer=0.5, round=50.0, steps=10)
    assert found.of_step == 2.0
    assert found.of_round == 50 / (10 + 20)


@pytest.mark.parametrize(("threads", "read"), [(1, time.process_time), (2, time.perf_counter)])
def test_several_threads_are_timed_by_the_clock(threads: int, read: Callable[[], float]) -> None:
    with use_threads(threads):
        before, now, after = read(), limits.now(), read()
    assert before <= now <= after


def test_the_command_prints_a_row_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    monkeypatch.setattr(limits, "SECONDS", 0.0)
    found = limits.measure(TINY, rounds=1)
    assert found.steps == 2 * math.ceil(10 / 4)
    assert min(found.step, found.products, found.optimizer, found.round) > 0
    limits.main(["tiny"])
    assert capsys.readouterr().out.splitlines()[1].startswith("tiny ")
