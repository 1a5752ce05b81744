"""The experiment of FedMAP's section A.4, small: cells, figure, section, and what is computed."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from lightning_pfl.data import ShiftedLines
from recipes.experiments import fedmap_regression
from recipes.experiments.fedmap_regression import (
    POOLED_PRECISION,
    PRINTED,
    arrays,
    error,
    minimiser,
    personal,
    pooled,
    section,
)
from tests.methods.references.fedmap import learn_prior, local_line, pooled_fit, shifted_lines

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no `val_dataloader`.*", "ignore:.*No client has.*"
)


def test_the_exact_numbers_are_those_of_the_reference() -> None:
    lines, test = arrays(ShiftedLines(seed=0, dtype="float64"))
    want = shifted_lines(0)
    for line, other in zip(lines, want, strict=True):
        np.testing.assert_array_equal(line, other)
    assert [len(line) for line in test] == [100] * 5
    np.testing.assert_allclose(pooled(lines), pooled_fit(want))
    mean, spread, _ = learn_prior(want, 30, np.zeros(2))
    found = minimiser(lines)
    np.testing.assert_allclose([found[n] for n in PRINTED], [*mean, *spread], rtol=1e-8)
    precision = 1 / (spread + 1)
    for line in lines:
        theta, _ = local_line(line, mean, precision)
        np.testing.assert_allclose(personal(line, mean, precision), theta)
    # At the minimum, 4 eps s (s + 1)^2 is the deviation of the intercepts.
    assert 4e-4 * spread[1] * (spread[1] + 1) ** 2 == pytest.approx(found["deviation"], rel=1e-6)


def test_the_anchors_of_seed_0() -> None:
    """The pooled line in rational arithmetic: five decimals of what the floats drawn give."""
    lines, _ = arrays(ShiftedLines(seed=0, dtype="float64"))
    xs, ys = ([Fraction(float(v)) for v in column] for column in np.concatenate(lines).T)
    n, sum_x, sum_y = len(xs), sum(xs), sum(ys)
    squares = n * sum(x * x for x in xs) - sum_x * sum_x
    slope = (n * sum(x * y for x, y in zip(xs, ys, strict=True)) - sum_x * sum_y) / squares
    intercept = (sum_y - slope * sum_x) / n
    assert (float(slope), float(intercept)) == pytest.approx((2.26862, 1.31813), abs=5e-6)
    assert pooled(lines) == pytest.approx([float(slope), float(intercept)], rel=1e-12)
    # The minimiser, which has five or six digits.
    found = minimiser(lines)
    anchors = dict(zip(PRINTED, (-0.89616, 6.72340, 4.23769, 49.0379), strict=True))
    assert {name: found[name] for name in PRINTED} == pytest.approx(anchors, rel=3e-6)


@pytest.mark.slow
def test_the_papers_story_holds_for_other_samples() -> None:
    """What 300 seeds of a simulation apart from this code gave, and what must be in the mean."""
    pooled_lines, ours, near = [], [], []
    for seed in range(20):
        lines, test = arrays(ShiftedLines(seed=seed, dtype="float64"))
        pooled_lines.append(pooled(lines))
        found = minimiser(lines, rounds=10)
        assert -1.3 < found["mean slope"] < -0.45
        assert 43 < found["spread intercept"] < 55
        precision = 1 / (np.array([found["spread slope"], found["spread intercept"]]) + 1)
        assert precision[0] > 4 * precision[1]
        mean = np.array([found["mean slope"], found["mean intercept"]])
        ours.append(error(test, [personal(line, mean, precision) for line in lines]))
        alternative = np.full(2, POOLED_PRECISION)
        near.append(error(test, [personal(line, pooled(lines), alternative) for line in lines]))
    slopes, intercepts = np.array(pooled_lines).T
    assert (slopes > 0).all()
    # The seeds' deviations are 0.13 and 0.39: three standard errors of a mean of 20.
    assert slopes.mean() == pytest.approx(2.19, abs=3 * 0.13 / 20**0.5)
    assert intercepts.mean() == pytest.approx(1.47, abs=3 * 0.39 / 20**0.5)
    # FedMAP's lines are better on new samples, which have a noise of 0.8; seed by seed by luck.
    assert 0.8 < np.mean(ours) < np.mean(near) / 2
    assert np.mean(np.less(ours, near)) >= 0.9


def test_errors_are_means_over_clients() -> None:
    lines = [np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[1.0, 0.0]])]
    # Off by 1 twice; off by 3 once.
    assert error(lines, [[1.0, 0.0], [2.0, 1.0]]) == pytest.approx((1 + 9) / 2)


@pytest.mark.slow
def test_a_small_version_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    name = "fedmap_regression"
    readme.write_text(f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n")
    places = ["--results", str(tmp_path), "--figures", str(tmp_path), "--readme", str(readme)]
    fedmap_regression.main(["--small", "--seeds", "0", "1", *places])
    cells = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert [cell["key"] for cell in cells] == ["seed=0", "seed=1", "minimisers"]
    assert all(len(cell["result"]["models"]) == 5 for cell in cells[:2])
    assert "| mean slope | -1.0735 |" in readme.read_text()
    assert "would need 381;" in " ".join(readme.read_text().split())
    picture = matplotlib.image.imread(tmp_path / f"{name}.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50

    def never(*_: Any) -> Any:
        raise AssertionError("ran again")

    monkeypatch.setattr(fedmap_regression, "train", never)
    fedmap_regression.main(["--small", "--seeds", "0", "1", *places])


def test_one_seed_has_no_deviation() -> None:
    run = {**PRINTED, "errors": (1.0, 2.0)}
    exact = {**PRINTED, "deviation": 50.0, "pooled slope": 2.0}
    text = section({"runs": {0: run}, "exact": [exact], "steps": 5, "rounds": 2})
    assert "| mean slope | -1.0735 | -1.07 | -1.07 |" in text
    assert "the largest of 1 seeds is 50" in text
