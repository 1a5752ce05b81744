"""What the pictures show, and what is said where they can't be drawn."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import FederatedDataModule
from lightning_pfl.data import (
    ClassesPerClient,
    Digits,
    FederatedLoaders,
    FederatedTensorDataset,
)
from lightning_pfl.inspect import (
    ClientHistogram,
    DriftMonitor,
    PairwiseDistance,
    PartitionPicture,
)
from lightning_pfl.inspect.board import new_figure
from lightning_pfl.inspect.client_histogram import QUANTILES, draw_quantiles, draw_sorted
from lightning_pfl.inspect.pairwise_distance import distances, draw_matrix
from lightning_pfl.inspect.partition_picture import draw_dataset
from lightning_pfl.methods import (
    FedAvg,
    FedMAP,
    FedRep,
    SquaredPenalty,
)
from lightning_pfl.models import DigitsCNN
from lightning_pfl.priors import GaussianPrior
from tests.callbacks.setting import Data, classes, network, quadratics, split, trainer
from tests.inspect.board import Board, count_colours

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


def board_run(tmp_path: Path, method: Any, *callbacks: Any, **kwargs: Any) -> Any:
    logger = TensorBoardLogger(tmp_path)
    return trainer(method, *callbacks, logger=logger, log_every_n_steps=1, **kwargs)


def is_drawn(picture: np.ndarray) -> bool:
    """More than a blank sheet: several colours, and a share of it not white."""
    return count_colours(picture) > 10 and bool((picture[..., :3] < 0.95).any(2).mean() > 0.05)


# --- ClientHistogram ------------------------------------------------------------------------------


def test_clients_of_every_evaluation_reach_the_board(tmp_path: Path) -> None:
    histogram = ClientHistogram(["val_acc", "global/val_acc"], every_n_rounds=2)
    run = board_run(tmp_path, FedAvg(), histogram, max_epochs=5, num_sanity_val_steps=1)
    data = Data(*classes())
    run.fit(network(), datamodule=data)
    run.test(run.lightning_module, datamodule=data, verbose=False)
    board = Board(run)
    with (Path(run.log_dir) / "clients_val.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("val_acc", "global/val_acc"):
        found = board.histograms(f"clients/{name}")
        assert list(found) == [0, 1, 2, 3, 4]
        for round, histogram_value in found.items():
            values = [float(row[name]) for row in rows if row["round"] == str(round)]
            assert histogram_value.num == 5
            assert histogram_value.sum == pytest.approx(sum(values), rel=1e-6)
            quantiles = np.quantile(values, QUANTILES)
            np.testing.assert_allclose(histogram.rounds[name][round], quantiles, rtol=1e-6)
        assert board.steps(f"clients/{name}/sorted") == [1, 3, 4]
        assert board.steps(f"clients/{name}/rounds") == [4]
        for picture in ("sorted", "rounds"):
            assert is_drawn(board.picture(f"clients/{name}/{picture}"))
    assert board.steps("clients/test_acc/sorted") == [4]
    assert board.histograms("clients/global/test_acc")[4].num == 5


def test_a_resumed_run_draws_all_rounds(tmp_path: Path) -> None:
    first = ClientHistogram()
    run = board_run(tmp_path, FedAvg(), first, max_epochs=2)
    run.fit(network(), *classes())
    path = tmp_path / "run.ckpt"
    run.save_checkpoint(path)
    second = ClientHistogram()
    again = board_run(tmp_path, FedAvg(), second, max_epochs=4)
    again.fit(network(), *classes(), ckpt_path=path)
    assert list(second.rounds["val_acc"]) == [0, 1, 2, 3]
    assert second.rounds["val_acc"][1] == first.rounds["val_acc"][1]


@pytest.mark.parametrize(
    ("name", "order"), [("val_acc", [0.9, 0.5, 0.2]), ("val_loss", [0.2, 0.5, 0.9])]
)
def test_bars_run_from_the_best_client_to_the_worst(name: str, order: list[float]) -> None:
    values = torch.tensor([0.5, 7.0, 0.9, 0.2], dtype=torch.float64)
    figure: Any = draw_sorted(values, torch.tensor([3, 0, 1, 2]), name, 6, name == "val_acc")
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == order
    mean, worst = (line.get_ydata()[0] for line in axes.lines)
    assert mean == pytest.approx((0.5 + 0.9 + 0.2) / 3)
    assert worst == order[-1]  # the worst tenth of three clients is one client
    assert axes.get_title() == f"{name} after round 6"


def test_bars_of_a_broken_model_are_drawn_all_the_same() -> None:
    values = torch.tensor([0.5, torch.nan], dtype=torch.float64)
    figure: Any = draw_sorted(values, torch.tensor([1, 1]), "val_loss", 0, False)
    assert len(figure.axes[0].patches) == 2
    assert figure.axes[0].get_ylim()[0] == 0


def test_quantiles_are_drawn_against_the_rounds() -> None:
    history = {4: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 1: [0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.1]}
    axes: Any = draw_quantiles(history, "val_acc").axes[0]
    assert axes.lines[0].get_xdata().tolist() == [1, 4]
    assert axes.lines[0].get_ydata().tolist() == [0.1, 0.3]
    assert len(axes.collections) == 3


# --- PairwiseDistance -----------------------------------------------------------------------------


def test_distances_are_euclidean_and_exact() -> None:
    models = {
        "w": torch.tensor([[[0.0, 3.0]], [[4.0, 3.0]], [[0.0, 3.0]]]),
        "b": torch.tensor([1.0, 4.0, 1.0 + 1e-6], dtype=torch.float64),
        "steps": torch.tensor([1, 2, 3]),
    }
    want = torch.tensor(
        [[0.0, 5.0, 1e-6], [5.0, 0.0, 5.0 - 0.6e-6], [1e-6, 5.0 - 0.6e-6, 0.0]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(distances(models), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [5, 41])
def test_clusters_are_framed_blocks_of_the_matrix(count: int) -> None:
    clusters = torch.arange(count) % 2
    at = torch.arange(count, dtype=torch.float64)
    matrix = (at.unsqueeze(1) - at).abs() + 100 * (clusters.unsqueeze(1) != clusters)
    axes: Any = draw_matrix(matrix, 3, clusters).axes[0]
    order = [*range(0, count, 2), *range(1, count, 2)]
    np.testing.assert_array_equal(axes.images[0].get_array(), matrix[order][:, order])
    frames = [(*frame.get_xy(), frame.get_width(), frame.get_height()) for frame in axes.patches]
    half = (count + 1) // 2
    assert frames == [
        (-0.5, -0.5, half, half),
        (half - 0.5, half - 0.5, count - half, count - half),
    ]
    named = [text.get_text() for text in axes.get_xticklabels()]
    assert named == ([str(k) for k in order] if count == 5 else [])
    assert axes.get_xlabel() == "client, by cluster"
    assert draw_matrix(matrix, 3).axes[0].get_xlabel() == "client"


def test_the_matrix_is_that_of_the_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}

    def keep(trainer: Any, name: str, figure: Any, round: int) -> None:
        drawn[round] = np.asarray(figure.axes[0].images[0].get_array())

    monkeypatch.setattr("lightning_pfl.inspect.models_picture.show", keep)
    pairs = PairwiseDistance(every_n_rounds=2, max_clients=4)
    run = board_run(tmp_path, FedRep(head_epochs=1), pairs, max_epochs=3, participation=3)
    run.fit(network(), classes()[0])
    assert list(drawn) == [1, 2]
    heads = []
    for client in range(4):
        state = run.strategy.client_state_dict(client)
        heads.append(torch.cat([state["head.weight"].flatten(), state["head.bias"]]).numpy())
    want = [[np.linalg.norm(a - b) for b in heads] for a in heads]
    np.testing.assert_allclose(drawn[2], want, rtol=1e-10, atol=1e-12)


def test_models_that_the_server_knows_are_compared_as_a_whole(tmp_path: Path) -> None:
    """They are personal, though nothing of them stays on the client; FedMAP's head alone is."""
    for method, names in (
        (SquaredPenalty(), {"backbone.weight", "head.weight"}),
        (FedMAP(GaussianPrior(parameters="head")), {"head.weight"}),
    ):
        pairs = PairwiseDistance()
        run = board_run(tmp_path, method, pairs)
        run.fit(split(), quadratics())
        assert pairs._names(run.strategy.federation) == names
        assert is_drawn(Board(run).picture("distance"))


def test_the_matrix_reaches_the_board(tmp_path: Path) -> None:
    run = board_run(tmp_path, FedRep(head_epochs=1), PairwiseDistance())
    run.fit(network(), classes()[0])
    board = Board(run)
    assert board.steps("distance") == [0]
    assert is_drawn(board.picture("distance"))


def test_a_method_without_a_personal_part_has_no_distances(tmp_path: Path) -> None:
    with pytest.raises(
        Exception, match="personal models for PairwiseDistance, but FedAvg shares all"
    ):
        board_run(tmp_path, FedAvg(), PairwiseDistance()).fit(split(), quadratics())


def test_titles_count_from_round_zero() -> None:
    figure: Any = draw_matrix(torch.zeros(2, 2), 0)
    assert figure.axes[0].get_title() == "distance of models after round 0"


# --- PartitionPicture -----------------------------------------------------------------------------


def image_of(axes: Any) -> np.ndarray:
    return np.asarray(axes.images[0].get_array())


def test_the_map_counts_classes_and_clients() -> None:
    x, y = torch.zeros(6, 1), torch.tensor([0, 0, 1, 1, 1, 2])
    data = FederatedTensorDataset((x, y), [[0, 2, 3], [1, 4, 5]])
    _, axes = new_figure()
    draw_dataset(data, axes)
    assert image_of(axes).tolist() == [[1, 1], [2, 1], [0, 1]]
    _, axes = new_figure()
    draw_dataset(data, axes, labels=lambda fields: 1 - (fields[1] > 0).long())
    assert image_of(axes).tolist() == [[2, 2], [1, 1]]


def test_data_without_labels_show_their_sizes() -> None:
    loaders = [DataLoader(TensorDataset(torch.zeros(n, 2))) for n in (3, 1)]
    tensors = FederatedTensorDataset((torch.zeros(4, 2), torch.zeros(4, 2)), [[0, 1, 2], [3]])
    for data in (FederatedLoaders(loaders), tensors):
        _, axes = new_figure()
        draw_dataset(data, axes)
        assert [bar.get_height() for bar in axes.patches] == [3, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("labelled", [True, False])
def test_the_partition_names_clients_that_have_names(labelled: bool) -> None:
    y = torch.tensor([0, 1, 1]) if labelled else torch.zeros(3, 2)
    data = FederatedTensorDataset((torch.zeros(3, 1), y), [[0, 2], [1]], names=("north", "101"))
    _, axes = new_figure()
    draw_dataset(data, axes)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["north", "101"]
    assert axes.get_xticks().tolist() == [0, 1]


def test_the_partition_of_many_clients_names_none() -> None:
    names = [f"client {k}" for k in range(41)]
    data = FederatedTensorDataset(
        (torch.zeros(41, 1), torch.zeros(41).long()), [[k] for k in range(41)], names=names
    )
    _, axes = new_figure()
    draw_dataset(data, axes)
    assert len(axes.get_xticks()) < 41


def test_the_partition_of_a_data_module_shows_its_new_clients(tmp_path: Path) -> None:
    data = FederatedDataModule(
        Digits(), ClassesPerClient(2), num_clients=6, new_clients=2, val_fraction=0.2
    )
    run = board_run(tmp_path, FedAvg(), PartitionPicture("test"))
    run.fit(DigitsCNN(), datamodule=data)
    board = Board(run)
    assert board.steps("partition/test") == [0]
    assert is_drawn(board.picture("partition/test"))


def test_other_splits_need_a_data_module_that_can_draw(tmp_path: Path) -> None:
    run = board_run(tmp_path, FedAvg(), PartitionPicture("val"))
    with pytest.raises(ValueError, match="Expected split='train' without a FederatedDataModule"):
        run.fit(split(), quadratics(), quadratics())


# --- where they can't be drawn --------------------------------------------------------------------

PICTURES = [ClientHistogram, PairwiseDistance, PartitionPicture]


class TakesImages(CSVLogger):
    """As W&B's logger does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.images: list[tuple[str, int, np.ndarray]] = []

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        assert step is not None
        self.images += [(key, step, image) for image in images]


def test_pictures_go_to_files_and_to_loggers_that_take_images(tmp_path: Path) -> None:
    logger = TakesImages(tmp_path)
    pictures = (ClientHistogram(["val_loss"]), PairwiseDistance(), PartitionPicture())
    run = trainer(FedRep(head_epochs=2), *pictures, logger=logger, max_epochs=2)
    run.fit(split(), quadratics(), quadratics())
    last = run.current_epoch - 1
    names = {
        f"clients-val_loss-sorted-{last:04d}.png",
        f"clients-val_loss-rounds-{last:04d}.png",
        f"distance-{last:04d}.png",
        "partition-train-0000.png",
    }
    files = {path.name: path for path in Path(str(run.log_dir), "pictures").iterdir()}
    assert set(files) == names
    from matplotlib.image import imread

    assert all(is_drawn(np.asarray(imread(path))) for path in files.values())
    shown = {f"{key.replace('/', '-')}-{step:04d}.png" for key, step, _ in logger.images}
    assert shown == names
    assert all(is_drawn(image / 255) for _, _, image in logger.images)


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_need_a_logger(kind: Any) -> None:
    run = trainer(FedRep(head_epochs=2), kind(), logger=False)
    match = f"a logger for the pictures of {kind.__name__}, but got none"
    with pytest.raises(MisconfigurationException, match=match):
        run.fit(split(), quadratics(), quadratics())


def test_the_worst_clients_are_named() -> None:
    values = torch.arange(50.0).flip(0)
    names = [f"hospital_{k}" for k in range(50)]
    many = draw_sorted(values, torch.ones(50), "val_acc", 0, True, names)
    worst = "hospital_49, hospital_48, hospital_47, hospital_46, hospital_45"
    assert many.axes[0].get_xlabel() == f"50 clients, best to worst; the worst are {worst}"
    few = draw_sorted(values[:3], torch.tensor([1, 0, 1]), "val_acc", 0, True, names[:3])
    ticks = [label.get_text() for label in few.axes[0].get_xticklabels()]
    assert ticks == ["hospital_0", "hospital_2"]


def test_a_matrix_of_the_first_clients_says_so() -> None:
    title = draw_matrix(torch.zeros(4, 4), 2, of_clients=9).axes[0].get_title()
    assert title == "distance of models after round 2 (the first 4 of 9 clients)"


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_need_matplotlib(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = board_run(tmp_path, FedRep(head_epochs=2), kind())
    with pytest.raises(ModuleNotFoundError, match=r"Install 'lightning-pfl\[plots\]'"):
        run.fit(split(), quadratics(), quadratics())


def test_a_fast_dev_run_draws_nothing_and_asks_for_nothing() -> None:
    callbacks = [
        ClientHistogram(["val_loss"]),
        PairwiseDistance(),
        PartitionPicture(),
        DriftMonitor(),
    ]
    run = trainer(FedRep(head_epochs=2), *callbacks, fast_dev_run=True)
    run.fit(split(), quadratics(), quadratics())
    assert run.global_step == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClientHistogram(every_n_rounds=0), "whole number >= 1, but got every_n_rounds=0"),
        (lambda: PairwiseDistance(every_n_rounds=1.5), "but got every_n_rounds=1.5"),  # type: ignore[arg-type]
        (
            lambda: ClientHistogram("val_acc"),
            "of evaluated values, but got metrics='val_acc'",
        ),
        (lambda: ClientHistogram([]), r"but got metrics=\[\]"),
        (
            lambda: PairwiseDistance(max_clients=1),
            "Expected `max_clients` to be a whole number >= 2",
        ),
        (lambda: PartitionPicture("all"), "Expected `split` to be 'train', 'val' or 'test'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_metric_that_is_not_validated_is_named(tmp_path: Path) -> None:
    run = board_run(tmp_path, FedRep(head_epochs=2), ClientHistogram(["val_f1"]))
    with pytest.raises(ValueError, match=r"got 'val_f1' and the validation logged \['val_loss'\]"):
        run.fit(split(), quadratics(), quadratics())
