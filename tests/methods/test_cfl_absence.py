"""CFL where clients are away: what was reported before a split counts no more after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.methods import CFL
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR
from tests.methods.references.cfl import cfl_with_absence

QUARTERS = np.array([[10.0, 4.0], [-10.0, 4.0], [10.0, -4.0], [-10.0, -4.0]] * 2)
"""Two clients in each quarter of the plane: left and right part first, then above and below."""
COHORT = 3
#: A mean change of any length, so that nothing but reports is waited for.
THRESHOLDS = 100.0, 0.1
ROUNDS = 20


def in_quarters(engine: str = "vectorized", rounds: int = ROUNDS, **settings: Any) -> Any:
    data = quadratic_clients([1.0] * 8, torch.from_numpy(QUARTERS))
    method, module = CFL(*THRESHOLDS, start_round=0), QuadraticModule(dim=2, lr=LR)
    return fit(method, data, module, rounds, engine, participation=COHORT, **settings)


def expected_rounds() -> list[Any]:
    some = [one.tolist() for one in cohorts(ROUNDS, COHORT, eligible=torch.arange(8))]

    def descended(k: int, w: Any) -> Any:
        return w + LR * (QUARTERS[k] - w)

    return list(cfl_with_absence(descended, some, np.zeros(2), 8, THRESHOLDS))


def test_after_a_split_all_of_a_cluster_report_again_before_the_next(engine: str) -> None:
    run = in_quarters(engine)
    splits, reported_before = [], []
    known = 1
    for number, (models, clusters, reported) in enumerate(expected_rounds()):
        server = run.recorder.servers[number + 1]
        for members in clusters:
            for k in members:
                assert server["together"][k].nonzero().flatten().tolist() == members
        assert server["fresh"].nonzero().flatten().tolist() == sorted(reported)
        np.testing.assert_allclose(server["models"]["w"], np.stack(models), rtol=1e-10, atol=1e-12)
        if len(clusters) > known:
            splits.append(number)
            reported_before.append(len(reported))
            known = len(clusters)
    # Left from right; later both again, in different rounds, and nobody's report outlives them all.
    assert known == 4
    assert len(splits) == 3
    assert splits[1] - splits[0] > 1
    assert reported_before[0] == 0


def test_resume_after_a_split_is_exact(tmp_path: Path) -> None:
    """Saved between the first split and the second, while some have reported again."""
    sizes = [(len(clusters), len(reported)) for _, clusters, reported in expected_rounds()]
    at = next(t for t, (count, reported) in enumerate(sizes, 1) if count == 2 and reported > 0)
    assert sizes[-1][0] == 4
    whole, half = in_quarters(), in_quarters(rounds=at)
    assert 0 < int(half.server["fresh"].sum()) < 8
    resumed = in_quarters(ckpt_path=half.save(tmp_path / "half.ckpt"))
    assert_trees_equal(resumed.server, whole.server)
    assert_trees_equal(resumed.models, whole.models)


@pytest.mark.parametrize(("min_gap", "parts"), [(1.999, 2), (2.0, 1)])
def test_a_gap_at_the_threshold_is_none(min_gap: float, parts: int) -> None:
    """On a line cosines are 1 and -1, to the last bit: the gap is 2."""
    data = quadratic_clients([1.0] * 4, [1.0, -1.0, 1.5, -1.5])
    run = fit(CFL(0.5, 0.05, 0, min_gap=min_gap), data, QuadraticModule(lr=LR), 1)
    assert len(run.server["together"].unique(dim=0)) == parts


@pytest.mark.parametrize("batches", [0, 1])
def test_nobody_waits_for_a_client_that_never_trains(engine: str, batches: int) -> None:
    """Without samples, or with one that drop_last leaves out; it stays with the larger part."""
    centers = torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [1.0], [0.0]])
    data = quadratic_clients([1.0] * 6, centers, [2, 2, 2, 2, 2, batches], 2)
    data.drop_last = batches == 1
    method = CFL(100.0, LR / 2, start_round=0)
    run = fit(method, data, QuadraticModule(lr=LR), 1, engine)
    assert method.clusters(run.server).tolist() == [0, 1, 0, 1, 0, 0]
