"""Drift against flat vectors of numpy, and against the quadratics' closed form."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pfl.inspect import DriftMonitor
from lightning_pfl.inspect.drift import drift
from lightning_pfl.methods import FedAvg, LocalOnly
from lightning_pfl.testing import Recorder, descend, quadratic_clients
from tests.callbacks.setting import (
    BATCH,
    CENTERS,
    CURVATURES,
    LR,
    SIZES,
    classes,
    network,
    quadratics,
    split,
    steps_of,
    trainer,
)
from tests.inspect.board import Board
from tests.trainer.setting import SaveInsideTheRound

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


def reference(changes: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    mean = weights @ changes
    norm = np.linalg.norm(changes, axis=1)
    return norm, changes @ mean / (norm * np.linalg.norm(mean)), float(np.linalg.norm(mean))


def test_drift_is_that_of_the_flat_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3), "b": (4,), "c": ()}
    received = {k: torch.randn(5, *s, generator=generator) for k, s in shapes.items()}
    uploads = {k: torch.randn(5, *s, generator=generator) for k, s in shapes.items()}
    extra = torch.randn(5, 2, generator=generator)  # sent, but not received: counts as it is
    weights = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    changes = [(uploads[k] - received[k]).reshape(5, -1) for k in shapes]
    flat = torch.cat([*changes, extra], 1).double().numpy()
    norm, cosine, mean = drift(
        {
            "model": {**uploads, "extra": extra},
            "counter": torch.ones(5, dtype=torch.int64),
            "log_weight": torch.full((5,), -1e3),  # a number beside the model is no update
        },
        {"model": received},
        weights,
    )
    want = reference(flat, weights.numpy())
    np.testing.assert_allclose(norm.numpy(), want[0], rtol=1e-6)
    np.testing.assert_allclose(cosine.numpy(), want[1], rtol=1e-6)
    assert mean == pytest.approx(want[2], rel=1e-6)


def expected(point: torch.Tensor, clients: list[int]) -> dict[str, float]:
    """Both halves move by half of the change of their sum; one epoch, everybody from ``point``."""
    changes = []
    for k in clients:
        after = descend(point, CURVATURES[k], CENTERS[k : k + 1], 2 * LR, steps_of(SIZES[k]))
        changes.append(((after - point) / 2).repeat(2).numpy())
    sizes = np.array([SIZES[k] for k in clients], dtype=float)
    norm, cosine, mean = reference(np.stack(changes), sizes / sizes.sum())
    return {
        "drift/norm": norm.mean(),
        "drift/norm/max": norm.max(),
        "drift/mean_update_norm": mean,
        "drift/cosine": cosine.mean(),
        "drift/cosine/min": cosine.min(),
    }


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_every_round_logs_the_drift_of_its_cohort_to_any_logger(
    engine: str, tmp_path: Path
) -> None:
    recorder = Recorder()
    run = trainer(
        FedAvg(),
        DriftMonitor(),
        recorder,
        max_epochs=3,
        participation=2,
        engine=engine,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    run.fit(split(), quadratics())
    with (Path(run.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for row, round, server in zip(rows, recorder.rounds, recorder.servers[:-1], strict=True):
        want = expected(sum(server["model"].values()), round.info.index.tolist())
        for name, value in want.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-5)


def test_rejected_clients_do_not_count() -> None:
    centers = CENTERS.clone()
    centers[1] = torch.nan
    data = quadratic_clients(CURVATURES, centers, SIZES, BATCH)
    run = trainer(FedAvg(), DriftMonitor())
    with pytest.warns(UserWarning, match="left out 1 of 4 clients"):
        run.fit(split(), data)
    want = expected(torch.tensor([0.25], dtype=torch.float64), [0, 2, 3])
    for name, value in want.items():
        assert float(run.callback_metrics[name]) == pytest.approx(value, rel=1e-5)


def test_running_statistics_do_not_count() -> None:
    recorder = Recorder()
    run = trainer(FedAvg(), DriftMonitor(), recorder)
    run.fit(network(), classes()[0])
    round: Any = recorder.rounds[0]
    names = [name for name in round.received["model"] if "running" not in name]
    assert len(names) < len(round.received["model"])
    changes = [
        (round.uploads["model"][n] - round.received["model"][n]).reshape(5, -1)
        for n in names
        if round.uploads["model"][n].is_floating_point()
    ]
    norm, _, _ = reference(torch.cat(changes, 1).numpy(), round.info.weights.numpy())
    assert float(run.callback_metrics["drift/norm"]) == pytest.approx(norm.mean(), rel=1e-5)


def test_clients_that_do_not_move_have_no_direction() -> None:
    run = trainer(FedAvg(), DriftMonitor())
    module = split()
    module.lr = 0.0
    run.fit(module, quadratics())
    assert float(run.callback_metrics["drift/norm"]) == 0.0
    assert "drift/cosine" not in run.callback_metrics


def test_a_method_that_shares_nothing_has_nothing_to_measure() -> None:
    run = trainer(LocalOnly(), DriftMonitor())
    with pytest.warns(UserWarning, match="logs nothing, since LocalOnly shares no parameters"):
        run.fit(split(), quadratics())
    assert not [key for key in run.callback_metrics if key.startswith("drift/")]


def test_tensorboard_has_the_cohort_as_a_histogram(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    run = trainer(
        FedAvg(), DriftMonitor(), max_epochs=2, participation=3, logger=logger, log_every_n_steps=1
    )
    run.fit(split(), quadratics())
    board = Board(run)
    for name in ("drift/norm", "drift/cosine"):
        histograms = board.histograms(name)
        assert list(histograms) == [0, 1]
        assert all(found.num == 3 for found in histograms.values())
    assert board.histograms("drift/norm")[1].max == pytest.approx(
        float(run.callback_metrics["drift/norm/max"]), rel=1e-5
    )


def test_a_run_resumed_inside_a_round_logs_its_drift(tmp_path: Path) -> None:
    path = tmp_path / "inside.ckpt"
    whole = trainer(FedAvg(), DriftMonitor(), SaveInsideTheRound(path), max_epochs=2)
    whole.fit(split(), quadratics(), quadratics())
    resumed = trainer(FedAvg(), DriftMonitor(), max_epochs=2)
    resumed.fit(split(), quadratics(), quadratics(), ckpt_path=path)
    names = [key for key in whole.callback_metrics if key.startswith("drift/")]
    assert len(names) == 5
    for name in names:
        assert resumed.callback_metrics[name] == whole.callback_metrics[name]
