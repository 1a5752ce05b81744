"""The small version of the experiment on convex clustering."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.experiments import convex_clustering, convex_clustering_report
from tests.recipes.experiments.here import cells_of, readme_for, text_of


@pytest.mark.slow
def test_runs_once_and_draws_from_what_is_stored(tmp_path: Path) -> None:
    page = readme_for("convex_clustering", tmp_path)
    arguments = ["--small", "--seeds", "0", "--readme", str(page)]
    arguments += ["--results", str(tmp_path), "--figures", str(tmp_path)]
    convex_clustering.main(arguments)
    cells = cells_of(tmp_path / "convex_clustering.jsonl")
    assert len(cells) == 2 * (4 + 3)
    reference = cells["reference overlap seed=0"]
    readme = text_of(page)
    assert f"| overlap | local | {100 * reference['local']['accuracy']:.2f} | - |" in readme
    assert reference["global"]["clusters"] == 1
    assert reference["oracle"]["clusters"] == 3
    for name in ("accuracy", "distance", "dendrogram"):
        assert (tmp_path / f"convex_clustering_{name}.png").stat().st_size > 1000
    convex_clustering.main(arguments)
    assert page.read_text() == readme
    assert len((tmp_path / "convex_clustering.jsonl").read_text().splitlines()) == len(cells)


def test_the_note_says_what_the_results_say() -> None:
    """The crossing that holds for all seeds and for all larger weights; residuals by weight."""

    def cell(norms: list[float], residuals: list[float]) -> convex_clustering_report.Cell:
        weights = [0.1, 0.2, 0.3, 0.4]
        rows = [
            {"weight": weight, "within": within, "residual": residual}
            for weight, within, residual in zip(weights, norms, residuals, strict=True)
        ]
        return {"norms": rows, "squares": [{"weight": w, "within": 1.0} for w in weights]}

    fine = [1e-7] * 4
    crossing = {0: cell([0.5, 2.0, 0.5, 0.5], fine), 1: cell([2.0, 0.5, 0.5, 0.5], fine)}
    never = {0: cell([0.5, 0.5, 0.5, 2.0], [1e-3, 1e-7, 2e-5, 1e-6])}
    text = convex_clustering_report.note({"overlap": crossing, "recovery": never})
    assert "that holds from 0.3 on for the overlapping clusters and at no weight for" in text
    assert text.endswith("a largest residual of: 0.1 (1e-03), 0.3 (2e-05).")
    always = {0: cell([0.5] * 4, fine)}
    text = convex_clustering_report.note({"overlap": always, "recovery": always})
    assert "from 0.1 on for the overlapping clusters" in text
    assert text.endswith("The direct solver reached its tolerance of 1e-06 at every weight.")
