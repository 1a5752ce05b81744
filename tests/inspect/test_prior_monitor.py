"""PriorMonitor against the uploads of the rounds and the server's own prior."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pfl.inspect import PriorMonitor
from lightning_pfl.inspect.prior_monitor import (
    draw_layers,
    draw_measure,
    from_mean,
    over_rounds,
)
from lightning_pfl.methods import FedAvg, FedMAP
from lightning_pfl.priors import DiagonalGaussianPrior, GaussianPrior
from lightning_pfl.testing import Recorder
from tests.callbacks.setting import classes, network, quadratics, split, trainer
from tests.inspect.board import Board, count_colours

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


def expected(recorder: Recorder, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and distances of a round, from what went through it."""
    round = recorder.rounds[number]
    uploads, server = round.uploads or {}, recorder.servers[number]["model"]
    change = [uploads["model"][n] - server[n] for n in ("backbone.weight", "head.weight")]
    logs = uploads["log_weight"].numpy()
    raw = np.exp(logs - logs.max())
    return raw / raw.sum(), torch.cat(change, 1).norm(dim=1).numpy()


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_every_round_logs_its_cohort_to_any_logger(engine: str, tmp_path: Path) -> None:
    recorder = Recorder()
    run = trainer(
        FedMAP(GaussianPrior(0.5)), PriorMonitor(), recorder, max_epochs=3, participation=2,
        engine=engine, logger=CSVLogger(tmp_path), log_every_n_steps=1,
    )  # fmt: skip
    run.fit(split(), quadratics())
    with (Path(run.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for number, row in enumerate(rows):
        weights, distance = expected(recorder, number)
        want = {
            "prior/weight/max": weights.max(),
            "prior/effective_clients": 1 / (weights**2).sum(),
            "prior/distance": distance.mean(),
            "prior/distance/max": distance.max(),
        }
        for name, value in want.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-5)


def test_learned_variances_reach_any_logger(tmp_path: Path) -> None:
    """Each round the variances s + c, c = 1, of what the server holds after it."""
    recorder = Recorder()
    run = trainer(
        FedMAP(DiagonalGaussianPrior(epsilon=1e-3)), PriorMonitor(), recorder, max_epochs=3,
        logger=CSVLogger(tmp_path), log_every_n_steps=1,
    )  # fmt: skip
    run.fit(network(), classes()[0])
    with (Path(run.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for row, server in zip(rows, recorder.servers[1:], strict=True):
        for name, leaf in server["prior"]["spread"].items():
            entries = sorted((leaf + 1).flatten().tolist())
            want = {
                "min": entries[0],
                "median": entries[(len(entries) - 1) // 2],
                "max": entries[-1],
            }
            for which, value in want.items():
                assert float(row[f"prior/variance/{name}/{which}"]) == pytest.approx(
                    value, rel=1e-6
                )


def test_a_plain_prior_has_no_variances_to_log(tmp_path: Path) -> None:
    run = trainer(FedMAP(), PriorMonitor(), max_epochs=1, logger=CSVLogger(tmp_path))
    run.fit(split(), quadratics())
    assert not [name for name in run.logged_metrics if "variance" in name]


def test_clients_rounds_and_layers_reach_the_board(tmp_path: Path) -> None:
    recorder, monitor = Recorder(), PriorMonitor(every_n_rounds=2)
    run = trainer(
        FedMAP(DiagonalGaussianPrior()), monitor, recorder, max_epochs=3,
        logger=TensorBoardLogger(tmp_path), log_every_n_steps=1,
    )  # fmt: skip
    run.fit(network(), classes()[0])
    board = Board(run)
    assert list(board.histograms("prior/weights")) == [0, 1, 2]
    for value in board.histograms("prior/weights").values():
        assert value.num == 5
        assert value.sum == pytest.approx(1.0, rel=1e-5)
    for client in range(5):
        curve = board.events.Scalars(f"prior/distance/{client}")
        rounds = [float(monitor.rounds[number]["distance"][client]) for number in range(3)]
        assert [event.value for event in curve] == pytest.approx(rounds, rel=1e-5)
    for name in ("prior/weights/rounds", "prior/distances/rounds", "prior/variance"):
        assert board.steps(name) == [1, 2]
        assert count_colours(board.picture(name)) > 10
    spread = recorder.servers[-1]["prior"]["spread"]
    for name, leaf in spread.items():
        found = board.histograms(f"prior/variance/{name}")
        assert list(found) == [1, 2]
        assert found[2].num == leaf.numel()
        assert found[2].sum == pytest.approx(float((leaf + 1).sum()), rel=1e-5)


def test_a_resumed_run_shows_all_rounds(tmp_path: Path) -> None:
    def run(rounds: int, monitor: PriorMonitor, path: Any = None) -> Any:
        made = trainer(FedMAP(GaussianPrior(0.5)), monitor, max_epochs=rounds, participation=2)
        made.fit(split(), quadratics(), ckpt_path=path)
        return made

    whole, first, second = PriorMonitor(), PriorMonitor(), PriorMonitor()
    run(4, whole)
    run(2, first).save_checkpoint(tmp_path / "half.ckpt")
    run(4, second, tmp_path / "half.ckpt")
    assert list(second.rounds) == [0, 1, 2, 3]
    for number, found in second.rounds.items():
        for name, values in found.items():
            assert torch.equal(values, whole.rounds[number][name])


def test_another_fit_forgets() -> None:
    monitor = PriorMonitor()
    for rounds in (3, 1):
        trainer(FedMAP(), monitor, max_epochs=rounds).fit(split(), quadratics())
    assert list(monitor.rounds) == [0]


def test_distances_are_those_of_the_flat_vectors() -> None:
    theta = {"a": torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "b": torch.tensor([4.0, 1.0])}
    gamma = {"mean": {"a": torch.zeros(2, 2), "b": torch.zeros(2)}}
    found = from_mean(theta, gamma)
    assert found is not None
    assert found.tolist() == [5.0, 1.0]
    assert from_mean(theta, {"scale": torch.ones(2)}) is None


def test_who_was_not_there_has_no_value() -> None:
    history = {
        2: {"clients": torch.tensor([2, 0]), "weight": torch.tensor([0.7, 0.3])},
        5: {"clients": torch.tensor([1]), "weight": torch.tensor([1.0])},
    }
    columns = over_rounds(history, "weight", 3)
    assert list(columns) == [2, 5]
    assert columns[2].tolist()[::2] == pytest.approx([0.3, 0.7])
    assert math.isnan(columns[2][1])
    image = draw_measure(columns, "weight").axes[0].images[0]
    drawn: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
    assert drawn.shape == (3, 4)  # rounds 3 and 4 had no cohort
    assert np.isnan(drawn[:, 1:3]).all()
    assert drawn[1, 3] == 1.0


def test_layers_are_drawn_by_their_quantiles() -> None:
    entries = {"wide": torch.logspace(-3, 3, 101), "equal": torch.full((4,), 2.0)}
    axes = draw_layers(entries, "variance", 7).axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "variance (logarithmic)"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["wide", "equal"]
    assert axes.lines[0].get_xdata() == pytest.approx([1.0, 2.0])  # the medians


def test_other_methods_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"a method with a prior .* but got FedAvg"):
        trainer(FedAvg(), PriorMonitor()).fit(split(), quadratics())


def test_the_interval_is_checked() -> None:
    with pytest.raises(ValueError, match="Expected `every_n_rounds` to be a whole number >= 1"):
        PriorMonitor(every_n_rounds=0)
