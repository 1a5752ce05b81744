"""ClusterMonitor against the clusters that the server holds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.metrics import adjusted_rand_score

from lightning_pfl.inspect import ClusterMonitor
from lightning_pfl.inspect.cluster_monitor import colours_of, draw_clusters, recoloured
from lightning_pfl.inspect.known_clusters import resolve_known_clusters
from lightning_pfl.methods import (
    CFL,
    IFCA,
    ClusterOracle,
    ConvexClustering,
    FedAvg,
)
from lightning_pfl.testing import QuadraticModule, Recorder, quadratic_clients
from tests.callbacks.setting import trainer
from tests.inspect.board import Board

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")

CENTERS = torch.tensor([[1.0], [-1.0], [1.1], [-0.9], [1.2], [-1.2]], dtype=torch.float64)
PLANTED = [0, 1, 0, 1, 0, 1]


def fit(method: Any, monitor: ClusterMonitor, rounds: int = 4, path: Any = None, **kw: Any) -> Any:
    run = trainer(method, monitor, *kw.pop("callbacks", ()), max_epochs=rounds, **kw)
    data = quadratic_clients([1.0] * len(CENTERS), CENTERS)
    run.fit(QuadraticModule(lr=0.1), data, ckpt_path=path)
    return run


def cfl() -> CFL:
    """Splits once, after the third round."""
    return CFL(0.05, 0.05, start_round=2)


def test_every_round_logs_number_and_agreement_to_any_logger(tmp_path: Path) -> None:
    monitor = ClusterMonitor(PLANTED)
    run = fit(cfl(), monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    with (Path(run.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["clusters/number"]) for row in rows] == [1, 1, 2, 2]
    together, without_communication = (
        adjusted_rand_score(PLANTED, each) for each in ([0] * 6, PLANTED)
    )
    assert [float(row["clusters/ari"]) for row in rows] == [together] * 2 + [
        without_communication
    ] * 2
    assert {number: each.tolist() for number, each in monitor.rounds.items()} == {
        0: [0] * 6,
        2: PLANTED,
    }


def test_clients_without_a_cluster_do_not_count() -> None:
    """IFCA knows nothing of clients that never took part."""
    starts = [{"w": torch.tensor([v], dtype=torch.float64)} for v in (1.0, -1.0, 50.0)]
    recorder, monitor = Recorder(), ClusterMonitor(PLANTED)
    run = fit(
        IFCA(3, initial=starts), monitor, 1, callbacks=[recorder], participation=4, seed=1,
    )  # fmt: skip
    found = recorder.servers[-1]["cluster"]
    assert (found < 0).sum() == 2
    assert found[found >= 0].tolist() == [p for p, c in zip(PLANTED, found, strict=True) if c >= 0]
    assert run.callback_metrics["clusters/ari"] == 1.0
    assert run.callback_metrics["clusters/number"] == 2.0


@pytest.mark.parametrize(
    ("method", "expected"),
    [(ClusterOracle([5, 3, 5, 3, 5, 3]), [1, 0] * 3), (ConvexClustering(0.0), list(range(6)))],
)
def test_other_methods_say_their_clusters(method: Any, expected: list[int]) -> None:
    monitor = ClusterMonitor()
    fit(method, monitor, 2)
    assert monitor.rounds[max(monitor.rounds)].tolist() == expected


def test_pictures_reach_the_board(tmp_path: Path) -> None:
    monitor = ClusterMonitor(PLANTED, every_n_rounds=2)
    run = fit(cfl(), monitor, 5, logger=TensorBoardLogger(tmp_path), log_every_n_steps=1)
    board = Board(run)
    assert board.steps("clusters") == [1, 3, 4]
    # Two clusters at the end, in the first two colours of tab20.
    colors = (board.picture("clusters")[..., :3] * 255).round().reshape(-1, 3).astype(int)
    for color in ((31, 119, 180), (255, 127, 14)):
        assert (colors == color).all(1).mean() > 0.05


def test_a_resumed_run_shows_all_rounds(tmp_path: Path) -> None:
    whole, first, second = ClusterMonitor(), ClusterMonitor(), ClusterMonitor()
    fit(cfl(), whole, 5)
    fit(cfl(), first, 2).save_checkpoint(tmp_path / "half.ckpt")
    fit(cfl(), second, 5, tmp_path / "half.ckpt")
    assert list(second.rounds) == list(whole.rounds) == [0, 2]
    for number, found in second.rounds.items():
        assert torch.equal(found, whole.rounds[number])


def test_another_fit_forgets() -> None:
    monitor = ClusterMonitor()
    for rounds in (4, 1):
        fit(cfl(), monitor, rounds)
    assert list(monitor.rounds) == [0]


def test_a_cluster_keeps_its_colour_as_long_as_it_keeps_most_clients() -> None:
    history = {
        0: torch.tensor([1, 1, 1, 0, 0, -1]),  # begins with 1 and 0 as they are
        3: torch.tensor([0, 0, 0, 1, 1, 1]),  # the same clusters under other names
        5: torch.tensor([0, 0, 2, 1, 1, 1]),  # the lesser part of a split gets a new colour
        6: torch.tensor([0, 0, 0, 0, 0, 0]),  # a union keeps the larger part's (three of six)
    }
    found = {number: labels.tolist() for number, labels in recoloured(history).items()}
    assert found[0] == [1, 1, 1, 0, 0, -1]
    assert found[3] == [1, 1, 1, 0, 0, 0]
    assert found[5] == [1, 1, 2, 0, 0, 0]
    assert found[6] == [0] * 6


def test_columns_are_rounds_and_rows_are_sorted_by_group() -> None:
    history = {2: torch.tensor([0, 0, 0, -1]), 4: torch.tensor([0, 1, 0, 1])}
    known_clusters = torch.tensor([0, 1, 0, 1])
    figure: Any = draw_clusters(history, 5, known_clusters)
    (axes,) = figure.axes
    (image,) = axes.images
    painted = np.asarray(image.get_array())
    assert painted.shape == (4, 4, 3)  # rounds 2 to 5
    assert image.get_extent() == [1.5, 5.5, 3.5, -0.5]
    blue, grey, orange = painted[0, 0], painted[3, 0], painted[2, 2]
    assert grey.tolist() == [0.9] * 3
    assert len({tuple(c) for c in (blue, grey, orange)}) == 3
    expected = [[blue] * 4] * 2 + [[blue] * 2 + [orange] * 2, [grey] * 2 + [orange] * 2]
    np.testing.assert_array_equal(painted, np.array(expected))
    assert [text.get_text() for text in axes.get_yticklabels()] == ["group 0", "group 1"]
    assert axes.get_title() == "clusters: 2 after round 5, grey: unknown"
    unsorted: Any = draw_clusters({0: torch.tensor([0, 1, 0, 1])}, 0).axes[0]
    rows = np.asarray(unsorted.images[0].get_array())[:, 0]
    np.testing.assert_array_equal(rows, [blue, orange] * 2)
    assert unsorted.get_title() == "clusters: 2 after round 0"


def test_blocks_of_clients_are_those_of_rotated_images() -> None:
    found = resolve_known_clusters(4, 10)
    assert found is not None
    assert found.tolist() == [4 * client // 10 for client in range(10)]
    assert resolve_known_clusters(None, 10) is None


@pytest.mark.parametrize(
    ("known_clusters", "match"),
    [
        (0, r"between 1 and the number of clients \(6\), but got known_clusters=0"),
        (7, r"between 1 and the number of clients \(6\), but got known_clusters=7"),
        (True, "but got known_clusters=True"),
        ([0, 1], "one entry for each of 6 clients, but got 2 entries"),
    ],
)
def test_groups_of_other_clients_are_refused(known_clusters: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit(cfl(), ClusterMonitor(known_clusters), 1)


def test_other_methods_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"that forms clusters .* but got FedAvg"):
        fit(FedAvg(), ClusterMonitor(), 1)
    with pytest.raises(ValueError, match="Expected `every_n_rounds` to be a whole number >= 1"):
        ClusterMonitor(every_n_rounds=0)


def test_many_clusters_have_a_colour_each() -> None:
    colours = colours_of(np.arange(82))
    assert len(np.unique(colours.round(4), axis=0)) == 82
    assert colours_of(np.array([-1])).tolist() == [[0.9, 0.9, 0.9]]
