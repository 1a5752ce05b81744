"""EllipseClusters: the documented draws, and clients that can be solved for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data import EllipseClusters, FederatedDataModule
from lightning_pfl.data.sources.ellipses import SETTINGS
from lightning_pfl.metrics import within_cluster_distance
from recipes.centralized.losses import Grouped
from recipes.centralized.newtons_method import newton, proximal_newton
from tests.solvers.problems import Hinges


def ellipse(rng: np.random.Generator, n: int, axes: Any, phi: float, center: Any) -> np.ndarray:
    """R(phi) (a_x sqrt(u) cos t, a_y sqrt(u) sin t) + centre; n angles, then n radii."""
    t = rng.uniform(0, 2 * np.pi, n)
    u = rng.uniform(0, 1, n)
    points = [
        [
            axes[0] * np.sqrt(b) * np.cos(a) * np.cos(phi)
            - axes[1] * np.sqrt(b) * np.sin(a) * np.sin(phi)
            + center[0],
            axes[0] * np.sqrt(b) * np.cos(a) * np.sin(phi)
            + axes[1] * np.sqrt(b) * np.sin(a) * np.cos(phi)
            + center[1],
        ]
        for a, b in zip(t, u, strict=True)
    ]
    return np.array(points)


def test_draws_are_in_the_documented_order() -> None:
    """Pool of class 1, of class 0, test of class 1, of class 0, the clients; clusters in turn."""
    rng = np.random.default_rng(3)
    found = EllipseClusters(
        "recovery", 2, samples=5, pool=20, test_samples=7, seed=3, dtype="float64"
    ).load()
    assert found.test_fields is not None
    train, test = found.fields[0].numpy(), found.test_fields[0].numpy()
    for k in range(3):
        phi = 2 * np.pi * k / 3
        u = 8 * np.array([np.cos(phi), np.sin(phi)])
        draws = [(20, u), (20, -u), (7, u), (7, -u)]
        plus, minus, test_plus, test_minus = (
            ellipse(rng, n, (8.4, 4.0), phi, center) for n, center in draws
        )
        pool, labels = np.concatenate([plus, minus]), np.repeat([1, 0], 20)
        for client in (2 * k, 2 * k + 1):
            chosen = rng.choice(40, 5, replace=False)
            while len(set(labels[chosen])) == 1:
                chosen = rng.choice(40, 5, replace=False)
            np.testing.assert_allclose(train[5 * client : 5 * client + 5], pool[chosen])
            np.testing.assert_array_equal(
                found.fields[1][5 * client : 5 * client + 5], labels[chosen]
            )
            fresh = np.concatenate([test_plus, test_minus])
            np.testing.assert_allclose(test[14 * client : 14 * client + 14], fresh)


@pytest.mark.parametrize("setting", SETTINGS)
def test_points_lie_in_their_ellipses(setting: Any) -> None:
    source = EllipseClusters(setting, 2, pool=50, samples=60, dtype="float64")
    points, targets = source.load().fields
    for client, label in enumerate(source.labels):
        cluster = SETTINGS[setting][label]
        for x, y in zip(
            points[60 * client : 60 * client + 60].numpy(),
            targets[60 * client : 60 * client + 60].tolist(),
            strict=True,
        ):
            offset = x - np.array(cluster.positive if y else cluster.negative)
            cos, sin = np.cos(cluster.angle), np.sin(cluster.angle)
            along, across = cos * offset[0] + sin * offset[1], -sin * offset[0] + cos * offset[1]
            assert (along / cluster.axes[0]) ** 2 + (across / cluster.axes[1]) ** 2 <= 1 + 1e-9


def test_every_client_has_both_classes() -> None:
    targets = EllipseClusters(clients_per_cluster=200, samples=2).load().fields[1].view(-1, 2)
    assert (targets.sum(1) == 1).all()


def test_the_anchors_of_the_overlapping_clusters() -> None:
    """Seed 0, in percent: every client alone 81.36, one model 60.47, one per cluster 87.23."""
    source = EllipseClusters("overlap", dtype="float64")
    data = FederatedDataModule(source)
    data.setup()
    train, test = data.train_dataloader(), data.test_dataloader()
    points = train.fields[0][torch.stack(list(train.indices))]
    signs = 2.0 * train.fields[1][torch.stack(list(train.indices))].double() - 1
    losses, truth = Hinges(points, signs), torch.tensor(source.labels)

    def accuracy(models: torch.Tensor) -> float:
        rows = torch.stack(list(test.indices))
        scores = (test.fields[0][rows] @ models[:, :2, None]).squeeze(2) + models[:, 2:]
        return 100 * float(((scores > 0) == (test.fields[1][rows] > 0)).double().mean())

    def shared(labels: torch.Tensor) -> torch.Tensor:
        grouped = Grouped(losses, labels)
        start = torch.zeros(grouped.count, 3, dtype=torch.float64)
        return newton(grouped.value, grouped.gradient, grouped.hessian, start)[labels]

    zeros = torch.zeros(60, 3, dtype=torch.float64)
    alone = proximal_newton(losses, zeros, zeros[:, 0], zeros)
    assert accuracy(alone) == pytest.approx(81.36, abs=0.005)
    assert within_cluster_distance(alone, truth) == pytest.approx(5.08, abs=0.005)
    assert accuracy(shared(torch.zeros_like(truth))) == pytest.approx(60.47, abs=0.005)
    assert accuracy(shared(truth)) == pytest.approx(87.23, abs=0.005)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Expected `setting` to be .overlap., .*='far'"):
        EllipseClusters("far")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Expected clients with 2 to 2 \* pool samples, .*=1,"):
        EllipseClusters(samples=1)
    with pytest.raises(ValueError, match=r"Expected clients with 2 to .* samples=201"):
        EllipseClusters(samples=201)
