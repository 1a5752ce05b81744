"""Warnings of runs that diverge, while all numbers are finite; others are in `test_gate.py`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.federation.sampling import sample_cohort
from lightning_pfl.methods import FedAvg, LocalOnly
from tests.trainer.setting import (
    BATCH,
    CENTRES,
    SIZES,
    Quadratic,
    mean,
    points,
    steps_of,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
LR = 12.0
"""With it a step multiplies the distance to a client's centre by -11, and its loss by 121."""


def losses(rounds: int, centres: Tensor) -> Tensor:
    """Mean loss of each client's minibatches in each round of FedAvg, ``(rounds, clients)``."""
    w, found = torch.zeros(2, dtype=torch.float64), []
    for _ in range(rounds):
        ends, row = [], []
        for size, centre in zip(SIZES, centres, strict=True):
            steps = steps_of(size)
            sizes = torch.tensor([min(BATCH, size - BATCH * step) for step in range(steps)])
            each = (w - centre).square().sum() / 2 * 121.0 ** torch.arange(steps)
            row.append((each * sizes).sum() / size)
            ends.append(centre + (1 - LR) ** steps * (w - centre))
        found.append(torch.stack(row))
        w = mean(ends, list(SIZES))
    return torch.stack(found)


def said(run: Any, data: Any, **fit: Any) -> list[str]:
    """Fit, and return what is said of divergence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Quadratic(fit.pop("lr", LR)), data, **fit)
    return [str(each.message) for each in caught if "diverges" in str(each.message)]


def test_growing_losses_are_warned_of_once_with_clients_and_a_remedy(tmp_path: Path) -> None:
    expected = losses(4, CENTRES)
    first = float(expected[0].max())
    # torch's median of four is the second.
    round = next(k for k in range(4) if expected[k].sort().values[1] > 1000 * first)
    assert 0 < round < 3
    run = trainer(FedAvg(), max_epochs=4)
    (text,) = said(run, points())
    listed = [
        f"'{client}': {float(expected[round, client]):.3g}"
        for client in expected[round].argsort(descending=True).tolist()
    ]
    assert text.startswith(f"Round {round} diverges: ")
    assert f"was {first:.3g} at most ({'; '.join(listed)}). Use a smaller learning rate" in text
    # A run that is resumed knows the first round's.
    begun = trainer(FedAvg(), max_epochs=1)
    assert said(begun, points()) == []
    path = str(tmp_path / "first.ckpt")
    begun.save_checkpoint(path)
    assert said(trainer(FedAvg(), max_epochs=4), points(), ckpt_path=path) == [text]


def test_losses_that_grow_to_usual_numbers_are_not_warned_of() -> None:
    expected = losses(2, CENTRES * 1e-6)
    assert expected[1].median() > 1000 * expected[0].max()
    assert expected.max() < 1
    assert said(trainer(FedAvg(), max_epochs=2), points(centres=CENTRES * 1e-6)) == []


def test_large_losses_of_few_clients_are_not_warned_of() -> None:
    """A client that is far away takes part after the first round, which may be for good."""
    centres = torch.cat([CENTRES, torch.tensor([[1e7, 0.0]], dtype=torch.float64)])

    def drawn(seed: int) -> list[bool]:
        cohorts = (sample_cohort(seed, round, torch.arange(5), 3) for round in range(4))
        return [bool((cohort == 4).any()) for cohort in cohorts]

    seed = next(seed for seed in range(100) if drawn(seed) == [False, True, True, False])
    run = trainer(LocalOnly(), max_epochs=4, participation=3, seed=seed)
    assert said(run, points((*SIZES, 4), centres), lr=0.1) == []


@pytest.mark.parametrize("lr", [0.01, 0.5, 1.9])
def test_ordinary_runs_are_not_warned_of(lr: float) -> None:
    assert said(trainer(FedAvg(), max_epochs=6), points(), lr=lr) == []
