"""A small version of the comparison of Sheaf-FMTL with dFedU and LocalOnly."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.experiments import sheaf
from tests.recipes.experiments.here import cells_of, readme_for, text_of


@pytest.mark.slow
def test_runs_once_and_writes_what_is_stored(tmp_path: Path, fashion_mnist_dir: Path) -> None:
    readme = readme_for("sheaf", tmp_path)
    arguments = ["--small", "--seeds", "0", "--data-dir", str(fashion_mnist_dir)]
    arguments += ["--results", str(tmp_path), "--readme", str(readme)]
    sheaf.main(arguments)
    cells = cells_of(tmp_path / "sheaf.jsonl")
    # LocalOnly, two kinds of SheafFMTL, and dFedU or LGFedAvg.
    assert len(cells) == 8
    text = text_of(readme)
    for key, result in cells.items():
        method = key.split(" lr=")[0].split(" ", 1)[1]
        shown = f"| {method} | {100 * result['test']:.2f} | {100 * result['worst']:.2f} |"
        assert f"{shown} {result['megabits']:.1f} |" in text

    before = (tmp_path / "sheaf.jsonl").read_text()
    sheaf.main(arguments)  # nothing is left to run
    assert (tmp_path / "sheaf.jsonl").read_text() == before
    assert readme.read_text() == text


def test_the_clients_of_the_digits_see_different_pixels() -> None:
    module, (train, val, test) = sheaf.partly_seen(0, 0.1, "data")
    assert module.assignment is not None
    groups = list(module.assignment)
    assert len(train) == len(val) == len(test) == 24
    for client in range(24):
        x, _ = train[client].dataset.tensors
        assert x.shape == (45, sheaf.size_of(client))
        assert len(val[client].dataset) + len(test[client].dataset) == 29
        assert groups[client] == f"pixels{x.shape[1]}"


def test_a_table_says_where_a_method_is_above_local_training() -> None:
    def runs(*tests: float) -> list[dict[str, float]]:
        return [{"test": one, "worst": one / 2, "megabits": 3.0} for one in tests]

    lines = sheaf.table(
        {"LocalOnly": ({"lr": 0.1}, runs(0.5, 0.6)), "dFedU": ({"lr": 0.1}, runs(0.4, 0.7))}
    ).splitlines()
    assert lines[2] == "| LocalOnly | 55.00 ± 7.07 | 27.50 ± 3.54 | 3.0 | - | lr 0.1 |"
    assert lines[3] == "| dFedU | 55.00 ± 21.21 | 27.50 ± 10.61 | 3.0 | 1 of 2 | lr 0.1 |"
