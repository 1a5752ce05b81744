"""A small version of IFCA and CFL on rotated images, and what its table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from sklearn.metrics import adjusted_rand_score

from recipes.experiments import clustered
from recipes.experiments.clustered import CLIENTS, GROUPS, agreement, line, recovered
from tests.recipes.experiments.here import cells_of, readme_for, text_of

EVEN = [client % 2 for client in range(CLIENTS)]
HALVES = [group // 2 for group in GROUPS]


def outcome(clusters: dict[str, list[int]], test: float = 0.5) -> dict[str, Any]:
    return {"test": test, "worst": test / 2, "clusters": clusters}


@pytest.mark.slow
def test_runs_once_and_writes_what_is_stored(tmp_path: Path, fashion_mnist_dir: Path) -> None:
    readme = readme_for("clustered", tmp_path)
    arguments = ["--small", "--seeds", "0", "--data-dir", str(fashion_mnist_dir)]
    arguments += ["--results", str(tmp_path), "--figures", str(tmp_path), "--readme", str(readme)]
    clustered.main(arguments)
    stored = (tmp_path / "clustered.jsonl").read_text()
    cells = cells_of(tmp_path / "clustered.jsonl")
    assert set(cells) == {f"{name} seed=0" for name in clustered.SMALL_LINES}
    text = text_of(readme)
    for key, found in cells.items():
        name = key.removesuffix(" seed=0")
        assert f"| {name} | {100 * found['test']:.2f} | {100 * found['worst']:.2f} |" in text
    assert set(cells["IFCA, 4 models seed=0"]["clusters"]["0"]) <= {0, 1, 2, 3}
    for figure in ("clustered_ari.png", "clustered_rounds.png"):
        assert len(np.unique(imread(tmp_path / figure).reshape(-1, 4), axis=0)) > 3

    clustered.main(arguments)  # nothing is left to run
    assert (tmp_path / "clustered.jsonl").read_text() == stored
    assert readme.read_text() == text

    # Without the last cell, its line is left out.
    (tmp_path / "clustered.jsonl").write_text("".join(stored.splitlines(keepends=True)[:-1]))
    clustered.main([*arguments, "--stored"])
    name = clustered.SMALL_LINES[-1]
    lines = [each for each in text.splitlines() if not each.startswith(f"| {name} |")]
    assert len(lines) == len(text.splitlines()) - 1
    assert readme.read_text().splitlines() == lines


def test_agreement_is_that_of_the_last_change() -> None:
    """Clusters are stored where they change."""
    found = agreement(outcome({"0": [0] * CLIENTS, "2": HALVES, "3": GROUPS}), 6)
    separated, halves = (adjusted_rand_score(GROUPS, each) for each in ([0] * CLIENTS, HALVES))
    assert found == pytest.approx([separated] * 2 + [halves] + [1.0] * 3)


@pytest.mark.parametrize(
    ("values", "begin"),
    [([0.0, 0.5, 1.0, 1.0], 2), ([1.0, 1.0], 0), ([1.0, 0.9, 1.0], 2), ([1.0, 0.9], None)],
)
def test_recovered_counts_from_when_it_stays_exact(values: list[float], begin: int | None) -> None:
    assert recovered(values) == begin


def test_a_line_tells_seed_by_seed() -> None:
    runs = [outcome({"0": EVEN, "1": GROUPS}, 0.6), outcome({"0": EVEN}, 0.7)]
    expected = (1 + adjusted_rand_score(GROUPS, EVEN)) / 2
    begin = "| CFL | 65.00 ± 7.07 | 32.50 ± 3.54 |"
    assert line("CFL", runs, 3) == f"{begin} {expected:.2f} | 4, 2 | 1, never |"
    assert line("FedAvg", [outcome({})], 3) == "| FedAvg | 50.00 | 25.00 | - | - | - |"
