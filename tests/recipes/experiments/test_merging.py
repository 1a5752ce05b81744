"""A small version of merged clients, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.experiments import merging
from recipes.experiments.merging import ACCURACIES


@pytest.mark.slow
def test_runs_once_and_writes_what_is_stored(tmp_path: Path, fashion_mnist_dir: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- merging: begin -->\nold\n<!-- merging: end -->\nbelow\n")
    arguments = ["--small", "--seeds", "0", "--data-dir", str(fashion_mnist_dir)]
    arguments += ["--results", str(tmp_path), "--readme", str(readme)]
    merging.main(arguments)
    stored = (tmp_path / "merging.jsonl").read_text()
    (cell,) = [json.loads(line) for line in stored.splitlines()]
    text = readme.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    for name in ACCURACIES:
        assert f"| {name} | {100 * cell['result'][name]:.2f} |" in text
    units = cell["result"]["units"]
    assert merging.SIZES[1] <= units <= merging.CLIENTS * merging.SIZES[1]

    merging.main(arguments)  # nothing is left to run
    assert (tmp_path / "merging.jsonl").read_text() == stored
    assert readme.read_text() == text


def test_a_line_has_the_spread_over_seeds() -> None:
    found = [dict.fromkeys(ACCURACIES, value) for value in (0.6, 0.7)]
    assert "| PFNM | 65.00 ± 7.07 |" in merging.table(found)
