"""Small versions of the FedRep paper's Figures 1, 3 and 4: cells, figures, sections, and risks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data import LinearRepresentation
from recipes.experiments import fedrep_figure1, fedrep_figure3, fedrep_figure4
from recipes.experiments.linear_regressions import risks, samples_of, short, with_heads
from tests.recipes.experiments.here import cells_of, readme_for, text_of


def run(experiment: ModuleType, name: str, folder: Path, seeds: str = "0") -> str:
    """Run a small version that writes into ``folder`` alone; its section."""
    readme = readme_for(name, folder)
    places = ["--results", str(folder), "--figures", str(folder), "--readme", str(readme)]
    experiment.main(["--small", "--seeds", *seeds.split(), *places])
    assert (folder / f"{name}.png").stat().st_size > 1000
    return text_of(readme)


def never(*_: Any) -> Any:
    raise AssertionError("ran again")


@pytest.mark.slow
def test_figures_1_and_4_share_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(fedrep_figure1, "fedrep_figure1", tmp_path)
    found = cells_of(tmp_path / "fedrep_figure1.jsonl")
    assert list(found) == [f"m={m} seed=0" for m in (5, 10, 20)]
    values = [short(cell["risks"]["FedAvg"]) for cell in found.values()]
    assert f"| FedAvg | 1.03 / {values[0]} | 1.00 / {values[1]} | 0.99 / {values[2]} |" in first
    monkeypatch.setattr(fedrep_figure1, "learn", never)
    assert run(fedrep_figure1, "fedrep_figure1", tmp_path) == first
    assert "| Local | 0.98 / " in run(fedrep_figure4, "fedrep_figure4", tmp_path)


@pytest.mark.slow
def test_figure_3_shows_the_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run(fedrep_figure3, "fedrep_figure3", tmp_path, "0 1 2")
    found = cells_of(tmp_path / "fedrep_figure3.jsonl")
    assert len(found) == 2 * 3 * 3  # numbers of clients, methods, seeds
    starts = [found[f"GD-GD n=40 seed={seed}"][0] for seed in range(3)]
    assert f"| 40 | GD-GD | - / {short(sorted(starts)[1])} | - / - |" in text
    monkeypatch.setattr(fedrep_figure3, "distances", never)
    assert run(fedrep_figure3, "fedrep_figure3", tmp_path, "0 1 2") == text


def test_risks_are_half_squared_distances_to_the_truth() -> None:
    source = LinearRepresentation(5, 4, 2, 3, noise_variance=0.0, dtype="float64")
    basis, heads = source.truth()
    truth = torch.from_numpy(heads @ basis.T)
    assert not risks(truth, source, slice(0, 5)).any()
    # A true solution has the norm sqrt(2).
    ones = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(risks(torch.zeros_like(truth), source, slice(5)), ones)
    x, y = samples_of(source, slice(3, 5), 2)
    np.testing.assert_allclose(torch.einsum("cmd,cd->cm", x, truth[3:]), y, rtol=1e-12)
    # A ridge of rho on heads w = (A^T A / m + rho)^-1 A^T A w* / m, of the true representation.
    models = with_heads(torch.from_numpy(basis), x, y)
    a = x @ torch.from_numpy(basis)
    gram, identity = a.mT @ a / 2, torch.eye(2, dtype=torch.float64)
    solved = torch.linalg.solve(gram + 1e-5 * identity, gram @ torch.from_numpy(heads[3:, :, None]))
    torch.testing.assert_close(models, solved[:, :, 0] @ torch.from_numpy(basis).T)


def test_numbers_have_two_digits() -> None:
    assert [short(value) for value in (1.0, 0.254, 0.0254, 0.00254)] == [
        "1.00", "0.25", "0.025", "2.5e-03",
    ]  # fmt: skip
