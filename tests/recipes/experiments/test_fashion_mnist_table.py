"""Small versions of Table 1 on Fashion-MNIST and of the choice of its hyper-parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_pfl.cli.trial import Trial
from recipes.experiments import fashion_mnist_table, fashion_mnist_tuning
from recipes.experiments.fashion_mnist_table import ROWS, SPLITS, parse, planned
from recipes.experiments.fashion_mnist_tuning import GRIDS
from recipes.outcome import RECIPES
from recipes.plan import Plan
from recipes.results_table import spread
from tests.recipes.experiments.here import MARKERS, readme_for, run_here


def small(name: str, folder: Path, data: Path) -> list[str]:
    """The command line of a small version that writes into ``folder`` alone."""
    return [
        *("--small", "--data-dir", str(data), "--readme", str(readme_for(name, folder))),
        *("--results", str(folder), "--logs", f"{folder}/logs"),
    ]


@pytest.mark.slow
def test_the_table_runs_what_is_missing_and_shows_all_that_is_stored(
    tmp_path: Path, fashion_mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(trial: Trial, threads: int | None = None, shows: bool = False) -> int:
        started.append(trial.name)
        return run_here(trial, threads, shows)

    monkeypatch.setattr(Trial, "run", run)
    arguments = small("fashion_mnist_table", tmp_path, fashion_mnist_dir)
    choosing = tmp_path / "choosing.md"
    choosing.write_text(MARKERS.format("fashion_mnist_table"))
    arguments += ["--choosing", str(choosing)]
    some = ["--splits", "100,2", "100,5", "--seeds", "0"]
    fashion_mnist_table.main([*arguments, *some, "--methods", "FedAvg", "FedAvg + FT"])
    # Two lines of one run at each split.
    assert started == ["fedavg_ft_fashion_mnist.yaml"] * 2
    settings = json.loads((tmp_path / "fedavg_ft_fashion_mnist-seed0.json").read_text())
    (line,) = (tmp_path / "fashion_mnist_table.jsonl").read_text().splitlines()
    other = json.loads(line)["result"]
    for name, metric in (("FedAvg", "val_acc"), ("FedAvg + FT", "ft/val_acc")):
        here, there = (spread([o["last10"][metric]["mean"]]) for o in (settings, other))
        paper = ROWS[name].paper
        row = f"| {name} | {here} | {paper[0]} | {there} | {paper[1]} | - | {paper[2]} |"
        assert row in (tmp_path / "README.md").read_text()
    assert settings["last10"]["val_acc"] != other["last10"]["val_acc"]

    fashion_mnist_table.main([*arguments, *some, "--methods", "FedRep"])
    assert started[2:] == ["fedrep_fashion_mnist.yaml"] * 2
    assert row in (tmp_path / "README.md").read_text()
    fashion_mnist_table.main([*arguments, *some, "--methods", "FedRep", "FedAvg"])
    assert len(started) == 4  # nothing was left to run
    tuned = [100 * o["last10"]["ft/val_acc"]["mean"] for o in (settings, other)]
    pattern = r"\| FedAvg \+ FT \| \**{:.1f}\** \| \**{:.1f}\** \| - \| \d+\.\d\d \|"
    assert re.search(pattern.format(*tuned), choosing.read_text())


def test_the_plan_has_every_method_once_for_each_seed_of_a_split() -> None:
    cells = planned(parse([]))
    assert len(cells) == len(set(cells))
    for name in ROWS:
        for split, how in SPLITS.items():
            assert [seed for n, s, seed in cells if (n, s) == (name, split)] == list(how.seeds)


def test_more_passes_are_those_of_the_method_itself() -> None:
    """FedRep's passes are those of its body, L2GD has as many times its own."""
    grid = fashion_mnist_table.Grid(parse([]))
    passes = SPLITS["1000,2"].passes
    settings = yaml.safe_load((RECIPES / "l2gd_fashion_mnist.yaml").read_text())["method"][
        "init_args"
    ]
    assert passes > 1
    for name, expected in {
        "FedRep": [f"--method.body_epochs={passes}"],
        "L2GD": [f"--method.local_epochs={passes * settings['local_epochs']}"],
        "LocalOnly": [],
    }.items():
        extra = [part for part in grid._settings(name, "1000,2") if "method" in part]
        assert extra == expected


def test_mocha_learns_its_relationship_after_the_same_share_of_the_rounds() -> None:
    grid, recipe = fashion_mnist_table.Grid(parse([])), RECIPES / "mocha_fashion_mnist.yaml"
    settings = yaml.safe_load(recipe.read_text())["method"]["init_args"]["inner_iterations"]
    for split in SPLITS:
        share = [part for part in grid._settings("MOCHA", split) if "inner_iterations" in part]
        half = fashion_mnist_table.rounds(split) == fashion_mnist_table.rounds("100,2") / 2
        assert share == ([f"--method.inner_iterations={settings // 2}"] if half else [])


@pytest.mark.slow
def test_the_best_setting_on_validation_data_is_shown(
    tmp_path: Path, fashion_mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ...]] = []

    def run(trial: Trial, threads: int | None = None, shows: bool = False) -> int:
        seen.append(trial.options)
        return run_here(trial, threads, shows)

    monkeypatch.setattr(Trial, "run", run)
    arguments = small("fashion_mnist_tuning", tmp_path, fashion_mnist_dir)
    fashion_mnist_tuning.main(arguments)
    assert len(seen) == 4  # two methods, two values
    assert all({"--data.val_split=train", "--data.val_fraction=0.2"} < set(each) for each in seen)
    stored = (tmp_path / "fashion_mnist_tuning.jsonl").read_text().splitlines()
    scores = {c["key"]: c["result"]["last10"]["val_acc"]["mean"] for c in map(json.loads, stored)}
    best = max((k for k in scores if "MOCHA" in k), key=lambda key: scores[key])
    text = (tmp_path / "README.md").read_text()
    assert f"**{best.removeprefix('MOCHA ')}: {spread([scores[best]])}**" in text

    monkeypatch.setattr(Trial, "run", None)  # nothing is left to run
    fashion_mnist_tuning.main(arguments)
    assert (tmp_path / "README.md").read_text() == text


@pytest.mark.parametrize("name", GRIDS)
def test_recipes_have_the_chosen_settings(name: str) -> None:
    options = fashion_mnist_tuning.parse([])
    scores = {
        shown: fashion_mnist_tuning.score(stored)
        for shown, (recipe, extra) in fashion_mnist_tuning.points(name, options).items()
        if (stored := stored_score(f"{name} {shown}"))
    }
    assert scores, f"{name}'s grid has not been run"
    best = max(scores, key=lambda shown: scores[shown])
    _, extra = fashion_mnist_tuning.points(name, options)[best]
    recipe = yaml.safe_load((RECIPES / f"{GRIDS[name][0]}_fashion_mnist.yaml").read_text())
    for part in extra:
        where, value = part.removeprefix("--").split("=")
        section, *path, argument = where.split(".")
        if section in ("method", "model"):
            place = recipe[section]["init_args"]
            for key in path:
                place = place[key]
            assert place[argument] == yaml.safe_load(value)


def stored_score(key: str) -> Any:
    """The stored outcome of a cell."""
    cell = Plan("fashion_mnist_tuning").cells().get(key)
    return cell["result"] if cell else None
