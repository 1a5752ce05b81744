"""Small versions of the FedRep paper's Figures 5 and 6."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pfl.cli.trial import Trial
from recipes.experiments import fedrep_figure5, fedrep_figure6
from tests.recipes.experiments.here import cells_of, readme_for, run_here, text_of


def small(name: str, folder: Path, data: Path) -> list[str]:
    """The command line of a small version that writes into ``folder`` alone."""
    readme = readme_for(name, folder)
    return [
        *("--small", "--seeds", "0", "--data-dir", str(data), "--readme", str(readme)),
        *("--results", str(folder), "--figures", str(folder)),
    ]


@pytest.mark.slow
def test_figure5_runs_once_and_draws_from_what_is_stored(
    tmp_path: Path, fashion_mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "run", run_here)
    arguments = small("fedrep_figure5", tmp_path, fashion_mnist_dir)
    arguments += ["--logs", f"{tmp_path}/logs"]
    fedrep_figure5.main(arguments)
    cells = cells_of(tmp_path / "fedrep_figure5.jsonl")
    assert len(cells) == 4  # two methods, two numbers of epochs
    readme = text_of(tmp_path / "README.md")
    for name in ("FedRep", "FedAvg"):
        errors = [
            100 * (1 - cells[f"{name} E={epoch} seed=0"]["last10"]["val_acc"]["mean"])
            for epoch in (1, 3)
        ]
        assert f"| {name} | {errors[0]:.2f} | {errors[1]:.2f} |" in readme
    assert (tmp_path / "fedrep_figure5.png").stat().st_size > 1000

    monkeypatch.setattr(Trial, "run", None)  # nothing is left to run
    fedrep_figure5.main(arguments)
    assert (tmp_path / "README.md").read_text() == readme

    path = tmp_path / "fedrep_figure5.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    fedrep_figure5.main([*arguments, "--stored"])
    rows = (tmp_path / "README.md").read_text().splitlines()
    assert [row.split(" | ")[-1] for row in rows if row.startswith("| FedAvg")] == ["- |"]


@pytest.mark.slow
def test_figure6_runs_once_and_draws_from_what_is_stored(
    tmp_path: Path, fashion_mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = small("fedrep_figure6", tmp_path, fashion_mnist_dir)
    fedrep_figure6.main(arguments)
    cells = cells_of(tmp_path / "fedrep_figure6.jsonl")
    assert list(cells) == [f"{line} seed=0" for line in fedrep_figure6.LINES]
    readme = text_of(tmp_path / "README.md")
    for line, (_, _, start) in fedrep_figure6.LINES.items():
        accuracies = cells[f"{line} seed=0"]
        assert list(accuracies) == ["1", "2"]
        assert all(0 <= accuracy <= 1 for accuracy in accuracies.values())
        shown = " | ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies.values())
        assert f"| {line} | {start} | {shown} |" in readme
    assert (tmp_path / "fedrep_figure6.png").stat().st_size > 1000

    monkeypatch.setattr(fedrep_figure6, "adapt", pytest.fail)  # nothing is left to run
    fedrep_figure6.main(arguments)
    assert (tmp_path / "README.md").read_text() == readme
    assert "Not run yet" not in readme

    path = tmp_path / "fedrep_figure6.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    fedrep_figure6.main([*arguments, "--stored"])
    assert "Not run yet: APFL." in (tmp_path / "README.md").read_text()
