"""A small version of merged clients, and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.experiments import merging
from recipes.experiments.merging import ACCURACIES
from tests.recipes.experiments.here import cells_of, readme_for, text_of


@pytest.mark.slow
def test_runs_once_and_writes_what_is_stored(tmp_path: Path, fashion_mnist_dir: Path) -> None:
    readme = readme_for("merging", tmp_path)
    arguments = ["--small", "--seeds", "0", "--data-dir", str(fashion_mnist_dir)]
    arguments += ["--results", str(tmp_path), "--readme", str(readme)]
    merging.main(arguments)
    stored = (tmp_path / "merging.jsonl").read_text()
    cells = cells_of(tmp_path / "merging.jsonl")
    equal, own = (cells[f"{start} seed=0"] for start in merging.STARTS)
    text = text_of(readme)
    for name in ACCURACIES:
        assert f"| {name} | {100 * equal[name]:.2f} | {100 * own[name]:.2f} |" in text
    for found in (equal, own):
        assert merging.SIZES[1] <= found["units"] <= merging.CLIENTS * merging.SIZES[1]

    merging.main(arguments)  # nothing is left to run
    assert (tmp_path / "merging.jsonl").read_text() == stored
    assert readme.read_text() == text


def test_a_line_has_the_spread_over_seeds() -> None:
    both = [{**dict.fromkeys(ACCURACIES, v), "units": 50, "beta": 10 * v} for v in (0.6, 0.7)]
    shown = merging.table({"equal": both, "own": both[:1]})
    assert "| PFNM | 65.00 ± 7.07 | 60.00 |" in shown
    assert "| the chosen beta | 6.00, 7.00 | 6.00 |" in shown
