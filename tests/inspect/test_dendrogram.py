"""Pictures of the regularisation path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_pfl.inspect.dendrogram import draw_dendrogram, draw_path, joining_weights

CLUSTERS = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 1, 1], [0, 0, 1, 1]])
WEIGHTS = [0.1, 0.2, 0.4, 0.8]


def test_joining_counts_from_when_it_is_for_good() -> None:
    """Clients 0 and 1 join at 0.2, part at 0.4 and join again; 1 and 2 part at the end."""
    found = joining_weights(CLUSTERS, WEIGHTS)
    assert torch.equal(found, found.T)
    assert float(found[0, 1]) == 0.8
    assert float(found[2, 3]) == 0.4
    assert torch.isinf(found[1, 2])
    assert found.diagonal().tolist() == [0.0] * 4


def test_the_dendrogram_has_the_clients_and_the_weights() -> None:
    figure = draw_dendrogram(CLUSTERS, WEIGHTS, torch.tensor([0, 0, 1, 1]))
    (axes,) = figure.axes
    assert sorted(label.get_text() for label in axes.get_xticklabels()) == ["0", "1", "2", "3"]
    heights = {
        round(float(y), 6)
        for collection in axes.collections
        for path in collection.get_paths()
        for y in np.asarray(path.vertices)[:, 1]
    }
    assert {0.4, 0.8, round(1.3 * 0.8, 6)} <= heights


@pytest.mark.parametrize(
    ("clusters", "shape"),
    [(CLUSTERS[:, :1], r"\(4, 1\)"), (CLUSTERS[:3], r"\(3, 4\)"), (CLUSTERS[0], r"\(4,\)")],
)
def test_wrong_clusters_are_refused(clusters: torch.Tensor, shape: str) -> None:
    match = f"of at least 2 clients at each of 4 weights, but got the shape {shape}"
    with pytest.raises(ValueError, match=match):
        draw_dendrogram(clusters, WEIGHTS)


@pytest.mark.parametrize("weights", [WEIGHTS[::-1], [0.1, 0.1, 0.4, 0.8]])
def test_weights_have_to_ascend(weights: list[float]) -> None:
    for draw in (draw_dendrogram, joining_weights):
        with pytest.raises(ValueError, match=r"`weights` to ascend, but got \[0\.[18], "):
            draw(CLUSTERS, weights)
    with pytest.raises(ValueError, match="`weights` to ascend, but got"):
        draw_path(torch.randn(4, 5, 3), weights)
    with pytest.raises(ValueError, match=r"`weights` to be positive, but got 0\.0"):
        draw_dendrogram(CLUSTERS, [0.0, *WEIGHTS[1:]])


def test_groups_and_models_of_others_are_refused() -> None:
    with pytest.raises(
        ValueError, match="`known_clusters` to have one entry for each of 4 clients, but"
    ):
        draw_dendrogram(CLUSTERS, WEIGHTS, [0, 1])
    with pytest.raises(
        ValueError, match="`known_clusters` to have one entry for each of 5 clients, but"
    ):
        draw_path(torch.randn(4, 5, 3), WEIGHTS, [0, 1])
    with pytest.raises(ValueError, match=r"the shape \(4, clients, dim\), but got \(3, 5, 3\)"):
        draw_path(torch.randn(3, 5, 3), WEIGHTS)


def test_the_path_has_a_line_for_each_client() -> None:
    models = torch.randn(4, 5, 3)
    figure = draw_path(models, WEIGHTS, torch.tensor([0, 0, 1, 1, 2]))
    (axes,) = figure.axes
    lines = [line for line in axes.lines if np.size(line.get_xdata()) == 4]
    assert len(lines) == 5
    one = draw_path(torch.randn(4, 5, 1), WEIGHTS)
    assert len(one.axes[0].lines) == 15
