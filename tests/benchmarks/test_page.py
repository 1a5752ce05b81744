"""The pages' tables are what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.breakdown import PARTS
from benchmarks.habits import HABITS
from benchmarks.workloads import NETWORKS


def cell(workload: str, method: str, threads: int, cpu: float | None, wall: float | None) -> Any:
    return {
        "workload": workload, "method": method, "engine": "auto", "threads": threads, "cpu": cpu,
        "wall": wall, "cpu_seconds": 0.25,
    }  # fmt: skip


FOUND: page.Found = {
    "cells": {
        "a": cell("w2", "FedAvg", 1, 1.25, 9.0),
        "b": cell("w2", "FedRep", 1, 3.5, 9.0),
        "c": cell("w2", "FedRep, cached", 1, 0.994, 9.0),
        "d": cell("w2", "APFL", 1, None, None),
        "e": cell("w2", "FedAvg", 2, 9.0, 1.5),
        "f": cell("lstm", "FedAvg", 1, 2.0, 9.0),
        "g": cell("w2", "FedAvg", 1, 9.0, 9.0) | {"engine": "sequential"},
    },
    "limits": {
        "w2": {"step": 15e-3, "products": 3e-3, "optimizer": 2e-3, "round": 0.2, "steps": 10}
    },
    "profile": {
        "w2": {
            "ours": dict(zip(PARTS, (4e-2, 1e-2, 0.0, 0.0, 2e-2, 0.0, 3e-2, 0.0), strict=True)),
            "theirs": dict.fromkeys(PARTS, 2.5e-2),
            "operations": 2e9,
            "peak": 2e11,
        }
    },
}


@pytest.mark.parametrize("name", page.PAGES)
def test_pages_have_what_is_kept(name: str) -> None:
    text = (page.ROOT / name).read_text()
    assert text.count("<!-- bench:") == 2 * len(page.BETWEEN.findall(text))
    assert page.write_tables(text, page.read_kept()) == text


def test_pictures_of_what_is_kept_are_there() -> None:
    for name in json.loads(page.KEPT.read_text()).get("profile", {}):
        assert (page.ROOT / "docs" / page.picture(name)).is_file()


def test_rounds_are_compared_by_cpu_time_or_by_the_clock() -> None:
    lines = page.rounds(FOUND).splitlines()
    one, two = (lines.index(next(x for x in lines if x.startswith(t))) for t in ("One", "Two"))
    assert lines[one + 4].startswith("| MLP 784-200-200-10, batch 50 | 1.25 | 3.50; **0.99** |  |")
    assert lines[one + 5].startswith("| LSTM, batch 10 of 32 words | 2.00 |  |")
    assert lines[two + 4].startswith("| MLP 784-200-200-10, batch 50 | 1.50 |  |")
    assert len(lines) == two + 5


def test_users_modules_have_their_later_rounds_and_their_first() -> None:
    row = {"first": 0.5, "later": 1.25, "cpu_seconds": 0.01, "choice": "sequential"}
    lines = page.users({"users": {"mlp, FedRep, 1.0": row}}).splitlines()
    assert "| MLP 20-64-64-10, unequal |  | 1.25; **0.50** |  |" in lines
    assert len(lines) == 2 + 2 * len(NETWORKS)
    assert page.users({}) == ""


def test_habits_have_their_later_rounds_and_their_first() -> None:
    row = {"first": 0.5, "later": 1.25, "cpu_seconds": 0.01, "choice": "sequential"}
    lines = page.habits({"habits": {"sgd, 1.0": row}}).splitlines()
    head = "| the loop's time over ours | 112 samples each | log-normal, a median of 80 |"
    assert lines[0] == head
    assert lines[2] == "| SGD |  | 1.25; **0.50** |"
    assert len(lines) == 2 + len(HABITS)
    assert page.habits({}) == ""


def test_methods_without_a_loop_have_their_time() -> None:
    rows = page.every_method(FOUND).splitlines()[2:]
    assert rows[0] == "| `APFL` |  | 250 |"
    assert rows[1] == "| `FedAvg` | 1.25 | 250 |"


def test_the_limit_is_the_time_of_the_operations() -> None:
    """2e9 operations at 2e11 a second are 10 ms; training is 40 + 10 + 20 ms.

    A loop's round of 10 steps of 15 ms, and 50 ms of other things: with steps of 3 and 2 ms it
    takes 100 ms, and 30 ms of products alone.
    """
    row = page.parts(FOUND).splitlines()[2]
    assert row == "| MLP 784-200-200-10, batch 50 | 100 | 200 | 70 | 40 | 30 | 10 | 2.00 | 2.00 |"
    row = page.parts({"profile": FOUND["profile"]}).splitlines()[2]
    assert row == "| MLP 784-200-200-10, batch 50 | 100 | 200 | 70 | 40 |  | 10 | 2.00 |  |"
    sentence = page.pictures(FOUND).splitlines()[0]
    assert (
        "of 100 ms a round, 40 % are products, 30 % are the evaluation and 20 % are P" in sentence
    )
    assert sentence.endswith("the loop takes 2.00 times as long.")


def test_the_limits_of_methods_stand_beside_each_other() -> None:
    """Steps of SCAFFOLD have 8 ms of passes more: a round takes 100 - 50 + 130 ms."""
    one = FOUND["limits"]["w2"]
    found = {"limits": {"w2": one, "w2, SCAFFOLD": one | {"optimizer": 10e-3}, "w1": one}}
    rows = page.limits(found).splitlines()[2:]
    assert rows == ["| MLP 784-200-200-10, batch 50 | 2.00 |  |  |  | 1.11 |"]


def test_nothing_measured_is_an_empty_table() -> None:
    assert {write({}) for write in page.TABLES.values()} == {""}


def test_a_picture_is_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    row = FOUND["profile"]["w2"]
    for name in ("a.svg", "b.svg"):
        page.draw("w2", row, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "this package: 100" in text
    assert "plain loop: 200" in text


def work_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, marks: str, found: page.Found
) -> list[str]:
    """Let pages be in a folder, each with these marks, and what was measured in a file there."""
    monkeypatch.setattr(page, "ROOT", folder)
    monkeypatch.setattr(page, "KEPT", folder / "kept.json")
    monkeypatch.setattr(page, "KEPT_AVX2", folder / "kept-avx2.json")
    for name in page.PAGES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"before\n{marks}after\n")
    (folder / "docs" / "figures").mkdir()
    (folder / "found.json").write_text(json.dumps(found))
    return [str(folder / "found.json")]


def test_rounds_without_avx512_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = "".join(
        f"<!-- bench: {name} begin -->\nold\n<!-- bench: {name} end -->\n"
        for name in ("rounds", "avx2")
    )
    machine = {"torch": "2", "lightning": "2", "python": "3", "cores": "2", "load": "0.1"}
    other = {"machine": {"machine": {**machine, "device": "X", "instructions": "AVX2"}},
             "cells": {"a": cell("w2", "FedAvg", 1, 1.75, 9.0)}}  # fmt: skip
    arguments = work_in(tmp_path, monkeypatch, marks, other)
    (tmp_path / "kept.json").write_text(json.dumps(FOUND))
    page.main(arguments)
    first, second = (tmp_path / page.PAGES[0]).read_text().split("<!-- bench: avx2 begin -->")
    assert page.rounds(FOUND) in first
    assert "| MLP 784-200-200-10, batch 50 | 1.75 |" in second
    assert "on 2 cores of X with AVX2;" in second
    assert "| MLP 784-200-200-10, batch 50 | 1.25 |" not in second
    assert json.loads((tmp_path / "kept.json").read_text()) == FOUND
    assert json.loads((tmp_path / "kept-avx2.json").read_text()) == other


def test_the_command_keeps_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = "<!-- bench: parts begin (x) -->\nold\n<!-- bench: parts end -->\n"
    page.main(work_in(tmp_path, monkeypatch, marks, FOUND))
    for name in page.PAGES:
        text = (tmp_path / name).read_text()
        assert "old" not in text
        assert page.parts(FOUND) in text
        assert text.startswith("before\n<!-- bench: parts begin (x) -->\n|")
    assert (tmp_path / "docs" / "figures" / "round_w2.svg").is_file()
    assert json.loads((tmp_path / "kept.json").read_text()) == FOUND
