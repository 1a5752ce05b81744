"""The command that times several processes: it runs, and its ratios are of what it measured."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import processes


def test_the_ratio_is_of_the_least_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter(
        [
            {"wall": 3.0, "cpu": 2.5, "waits": 0.0},
            {"wall": 1.5, "cpu": 1.25, "waits": 0.1},
            {"wall": 1.0, "cpu": 1.0, "waits": 0.0},
            {"wall": 2.0, "cpu": 2.0, "waits": 0.0},
            {"wall": 1.25, "cpu": 1.0, "waits": 0.2},
            {"wall": 1.3, "cpu": 1.0, "waits": 0.0},
        ]
    )
    asked: list[tuple[Any, ...]] = []

    def measure(*given: Any) -> dict[str, float]:
        asked.append(given)
        return next(found)

    monkeypatch.setattr(processes, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["", "--workloads", "w1", "--turns", "2", "--rounds", "4"])
    processes.main()
    of_a_turn = [(1, 4, 1), (2, 4, 1), (1, 4, 2)]
    assert asked == [("w1", "FedAvg", *each) for each in of_a_turn] * 2
    printed = capsys.readouterr().out
    assert "w1, FedAvg, 2 processes: 1.60 by the clock, 2.00 by the" in printed
    assert "at best 2.00" in printed


def test_parts_have_their_share_of_the_clients() -> None:
    whole, half = processes.workload_of("w4"), processes.workload_of("w4", 2)
    assert (half.clients, half.cohort) == (whole.clients // 2, whole.cohort // 2) == (100, 25)


@pytest.mark.slow
def test_runs_are_measured() -> None:
    found = processes.measure("logistic", "FedAvg", 2, 2)
    assert found["cpu"] > 0
    assert found["wall"] > 0
    assert 0 < found["waits"] < 1


@pytest.mark.slow
def test_runs_of_a_part_each_make_no_collective_calls() -> None:
    found = processes.measure("logistic", "FedAvg", 1, 2, 2)
    assert found["wall"] > 0
    assert found["waits"] == 0
