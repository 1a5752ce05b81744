"""The small version of the experiment on convex clustering."""

from __future__ import annotations

import json
from pathlib import Path

from recipes.experiments import convex_clustering

MARKERS = "above\n<!-- {0}: begin -->\nold\n<!-- {0}: end -->\nbelow\n"


def test_runs_once_and_draws_from_what_is_stored(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(MARKERS.format("convex_clustering"))
    arguments = ["--small", "--seeds", "0", "--readme", f"{tmp_path}/README.md"]
    arguments += ["--results", str(tmp_path), "--figures", str(tmp_path)]
    convex_clustering.main(arguments)
    stored = (tmp_path / "convex_clustering.jsonl").read_text().splitlines()
    cells = {cell["key"]: cell["result"] for cell in map(json.loads, stored)}
    assert len(cells) == 2 * (4 + 3)
    reference = cells["reference overlap seed=0"]
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("above\n")
    assert f"| overlap | local | {100 * reference['local']['accuracy']:.2f} | - |" in readme
    assert reference["global"]["clusters"] == 1
    assert reference["oracle"]["clusters"] == 3
    for name in ("accuracy", "distance", "dendrogram"):
        assert (tmp_path / f"convex_clustering_{name}.png").stat().st_size > 1000
    convex_clustering.main(arguments)
    assert (tmp_path / "README.md").read_text() == readme
    assert len((tmp_path / "convex_clustering.jsonl").read_text().splitlines()) == len(cells)
