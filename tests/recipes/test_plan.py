"""The plan of an experiment: every cell once, whatever interrupts it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_pfl.cli.trial import Trial
from recipes.outcome import OUTCOME
from recipes.plan import Plan


def counted(calls: list[int], value: Any) -> Any:
    calls.append(value)
    return {"value": value}


def test_a_cell_runs_once_and_again_when_its_settings_change(tmp_path: Path) -> None:
    calls: list[int] = []
    for settings, value in (({"lr": 1}, 1), ({"lr": 1}, 2), ({"lr": 2}, 3)):
        found = Plan("some", tmp_path).cell("a", settings, partial(counted, calls, value))
        assert found == {"value": calls[-1]}
    assert calls == [1, 3]
    assert Plan("some", tmp_path).cells()["a"]["result"] == {"value": 3}


def test_a_line_that_a_crash_cut_off_is_run_again_and_harms_no_other(tmp_path: Path) -> None:
    calls: list[int] = []
    first = Plan("some", tmp_path)
    first.cell("a", {}, lambda: counted(calls, 1))
    first.cell("b", {}, lambda: counted(calls, 2))
    first.path.write_text(first.path.read_text()[:-20])
    again = Plan("some", tmp_path)
    assert list(again.cells()) == ["a"]
    again.cell("b", {}, lambda: counted(calls, 3))
    assert calls == [1, 2, 3]
    assert {key: cell["result"]["value"] for key, cell in again.cells().items()} == {"a": 1, "b": 3}


def test_a_recipe_runs_in_a_folder_of_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "fedper.yaml"
    recipe.write_text("method:\n  class_path: FedPer\n")
    started: list[Path] = []

    def run(trial: Trial, threads: int | None = None, shows: bool = False) -> int:
        started.append(trial.folder)
        trial.folder.mkdir(parents=True)
        (trial.folder / OUTCOME).write_text(json.dumps({"rounds": trial.options[-1]}))
        return 0

    monkeypatch.setattr(Trial, "run", run)
    some = Plan("some", tmp_path / "results", tmp_path / "logs")
    for _ in range(2):
        for extra in (["--a=1"], ["--a=2"]):
            found = some.recipe(f"{extra} seed 3", recipe, 3, extra)
            assert found.pop("fingerprint")
            assert found == {"recipe": "fedper.yaml", "seed": 3, "rounds": extra[0]}
    assert len(started) == len(set(started)) == 2


def test_a_section_is_replaced_between_its_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- some: begin -->\nold\n<!-- some: end -->\nbelow\n")
    Plan("some", tmp_path).write_section("new", readme)
    assert readme.read_text() == ("above\n<!-- some: begin -->\nnew\n<!-- some: end -->\nbelow\n")
    with pytest.raises(ValueError, match="Expected the lines '<!-- other: begin -->'"):
        Plan("other", tmp_path).write_section("new", readme)
