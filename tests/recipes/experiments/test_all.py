"""All experiments with one command: each is run, whatever became of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.experiments.__main__ import experiments, main
from recipes.experiments.setting import parser
from recipes.outcome import RECIPES
from recipes.plan import README, Plan


def test_every_experiment_has_its_section_in_the_readme() -> None:
    text = README.read_text()
    assert "fashion_mnist_table" in experiments()
    for name in experiments():
        assert f"<!-- {name}: begin -->" in text
        assert f"<!-- {name}: end -->" in text
        assert f"| `{name}` |" in text  # in the table of contents


def test_a_failed_experiment_stops_no_other_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        assert command[:2] == [sys.executable, "-m"]
        started.append(command[2].removeprefix("recipes.experiments."))
        return SimpleNamespace(returncode=int(len(started) == 1))

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=rf"reasons above: {experiments()[0]}\.$"):
        main([])
    assert started == experiments()
    main(["fedrep_figure5"])
    assert started[-1] == "fedrep_figure5"
    assert len(started) == len(experiments()) + 1


def test_a_small_run_leaves_what_is_published_alone(tmp_path: Path) -> None:
    command = parser("An experiment", "Two rounds.", "results", "figures", "readme")
    whole = command.parse_args([])
    assert (whole.small, whole.results, whole.readme) == (False, RECIPES / "results", README)
    small = command.parse_args(["--small"])
    assert (small.small, small.readme) == (True, None)
    assert small.results == Path("logs/small/results")
    assert small.figures == Path("logs/small/figures")
    readme = tmp_path / "README.md"
    given = command.parse_args(["--results", str(tmp_path), "--small", "--readme", str(readme)])
    assert (given.results, given.readme) == (tmp_path, readme)
    before = README.read_text()
    Plan("fedrep_figure1").write_section("text", small.readme)
    assert README.read_text() == before
