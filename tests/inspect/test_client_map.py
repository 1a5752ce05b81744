"""The map of the clients' models: where they lie, and in which colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.collections import PatchCollection

from lightning_pfl.inspect import ClientMap
from lightning_pfl.inspect.client_map import draw_map, project, slices
from lightning_pfl.inspect.cluster_monitor import colours_of
from lightning_pfl.methods import FedAvg, FedPer
from tests.callbacks.setting import classes, network, trainer
from tests.inspect.board import Board, count_colours

AXES = ("x", "y")


def pies(figure: Any) -> Any:
    (found,) = (each for each in figure.axes[0].collections if isinstance(each, PatchCollection))
    return found


def test_points_are_those_of_the_two_largest_singular_values() -> None:
    """Up to the signs of both axes; the shares of the variance are those of all singular values."""
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points, names = project(rows, "pca")
    centred = rows.numpy() - rows.numpy().mean(0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(points), np.abs(left[:, :2] * values[:2]), rtol=1e-9)
    shares = 100 * values**2 / (values**2).sum()
    assert names[0] == f"first component, {shares[0]:.0f} % of the variance"
    assert names[1] == f"second component, {shares[1]:.0f} % of the variance"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (torch.full((3, 2), 2.0, dtype=torch.float64), [0.0, 0.0, 0.0]),
        (torch.tensor([[0.0], [3.0], [6.0]], dtype=torch.float64), [3.0, 0.0, 3.0]),
        # Squares of these are no floats.
        (torch.tensor([[-1e200, 0.0], [1e200, 0.0]], dtype=torch.float64), [1e200, 1e200]),
    ],
)
def test_models_that_are_equal_have_one_entry_or_are_huge(
    rows: torch.Tensor, expected: list[float]
) -> None:
    points, _ = project(rows, "pca")
    np.testing.assert_allclose(np.abs(points[:, 0]), expected, rtol=1e-12)
    np.testing.assert_allclose(points[:, 1], 0, atol=1e-12 * max(expected))
    draw_map(points, AXES, "title")


def test_tsne_takes_few_clients_and_repeats_itself() -> None:
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points, names = project(rows, "tsne")
    assert points.shape == (4, 2)
    assert np.isfinite(points).all()
    np.testing.assert_array_equal(points, project(rows, "tsne")[0])
    assert names == ("t-SNE, first axis", "t-SNE, second axis")


def test_a_client_is_a_pie_of_its_classes() -> None:
    """Its slices are as large as its shares, from the right, against the clock."""
    mix = torch.tensor([[3, 1, 0], [0, 0, 5], [0, 0, 0]])
    points = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 1.0]])
    figure: Any = draw_map(points, AXES, "title", mix=mix, names=["a", "b", "c"])
    colours = colours_of(np.arange(-1, 3))
    # -1: the last client, who has no samples, is grey and whole.
    expected = np.array([colours[1], colours[2], colours[3], colours[0]])
    np.testing.assert_allclose(pies(figure).get_facecolors()[:, :3], expected)
    areas = []
    for path in pies(figure).get_paths():
        x, y = np.asarray(path.to_polygons()[0]).T
        areas.append(abs(np.dot(x[:-1], y[1:]) - np.dot(y[:-1], x[1:])) / 2)
    np.testing.assert_allclose(np.array(areas) / areas[2], [0.75, 0.25, 1, 1], rtol=0.02)
    names = [text.get_text() for text in figure.axes[0].texts]
    assert names == ["a", "b", "c"]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["unknown", "class 0", "class 1", "class 2"]


def test_with_clusters_a_client_has_the_colour_of_its_own() -> None:
    clusters = torch.tensor([2, 0, -1, 2])
    points = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 1.0], [0.0, 0.0]])
    figure: Any = draw_map(points, AXES, "title", clusters=clusters, names=["a", "b", "c", "d"])
    expected = colours_of(clusters.numpy())
    np.testing.assert_allclose(pies(figure).get_facecolors()[:, :3], expected)
    # Two clients with one model share a label.
    assert sorted(text.get_text() for text in figure.axes[0].texts) == ["a, d", "b", "c"]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["unknown", "cluster 0", "cluster 2"]


def test_labels_lie_towards_the_middle_and_clients_that_touch_share_one() -> None:
    points = np.array([[0.0, 0.0], [9.0, 0.0], [9.2, 0.1], [10.0, 0.0]])
    figure: Any = draw_map(points, AXES, "title", names=["a", "b", "c", "d"])
    sides = {text.get_text(): (text.get_ha(), text.xy[0]) for text in figure.axes[0].texts}
    assert sides == {"a": ("left", 0.0), "b, c": ("right", 9.0), "d": ("right", 10.0)}


def test_without_classes_and_clusters_there_is_one_colour() -> None:
    keys, shares = slices(3, None, None)
    assert keys.tolist() == [-1, 0]
    assert shares.tolist() == [[0, 1]] * 3
    figure: Any = draw_map(np.zeros((3, 2)), AXES, "title")
    assert figure.axes[0].get_legend() is None


def test_a_run_draws_when_due_and_at_the_end(tmp_path: Path) -> None:
    callback = ClientMap(every_n_rounds=2)
    run = trainer(FedPer(), callback, max_epochs=3, logger=TensorBoardLogger(tmp_path))
    run.fit(network(), *classes())
    board = Board(run)
    assert board.steps("clients/models") == [1, 2]
    assert count_colours(board.picture("clients/models")) > 10


def test_what_has_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected `projection` to be 'pca' or 'tsne'"):
        ClientMap(projection="umap")  # type: ignore[arg-type]
    run = trainer(FedAvg(), ClientMap(), max_epochs=1, logger=TensorBoardLogger(tmp_path))
    with pytest.raises(
        MisconfigurationException, match="personal models for ClientMap, but FedAvg"
    ):
        run.fit(network(), *classes())
    run = trainer(
        FedPer(), ClientMap(known_clusters=[0, 1]), max_epochs=1, logger=TensorBoardLogger(tmp_path)
    )
    with pytest.raises(ValueError, match="known_clusters"):
        run.fit(network(), *classes())
