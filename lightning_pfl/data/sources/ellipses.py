"""Clusters of clients whose two classes fill ellipses: the data of convex clustering."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import Source, SourceData
from lightning_pfl.data.sources.synthetic import DType

Floats = npt.NDArray[np.float64]
Point = tuple[float, float]
Setting = Literal["overlap", "recovery", "separable"]


@dataclass(frozen=True)
class Ellipses:
    """The two classes of a cluster, uniform in ellipses of one shape.

    Attributes:
        positive: Centre of class 1.
        negative: Centre of class 0.
        axes: Semi-axes.
        angle: Rotation of both, in radians.
    """

    positive: Point
    negative: Point
    axes: Point
    angle: float = 0.0

    def draw(self, positive: bool, count: int, rng: np.random.Generator) -> Floats:
        """Draw ``count`` points of a class, ``(count, 2)``: all angles first, then all radii."""
        turn = rng.uniform(0, 2 * np.pi, count)
        radius = np.sqrt(rng.uniform(0, 1, count))
        flat = np.stack([self.axes[0] * np.cos(turn), self.axes[1] * np.sin(turn)], 1)
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        rotation = np.array([[cos, -sin], [sin, cos]])
        center = np.array(self.positive if positive else self.negative)
        found: Floats = (radius[:, None] * flat) @ rotation.T + center
        return found


def _star(distance: float, axes: Point) -> tuple[Ellipses, ...]:
    """Make three clusters, each turned by a third of a circle."""
    found = []
    for k in range(3):
        angle = 2 * math.pi * k / 3
        x, y = distance * math.cos(angle), distance * math.sin(angle)
        found.append(Ellipses((x, y), (-x, -y), axes, angle))
    return tuple(found)


SETTINGS: Mapping[str, tuple[Ellipses, ...]] = MappingProxyType(
    {
        "overlap": (
            Ellipses((2.0, 0.0), (0.2, 0.0), (1.5, 1.0)),
            Ellipses((-2.0, 0.0), (-0.2, 0.0), (1.5, 1.0)),
            Ellipses((0.0, 2.2), (0.0, 0.0), (1.0, 1.6)),
        ),
        "recovery": _star(8.0, (8.4, 4.0)),
        "separable": _star(4.0, (1.0, 1.5)),
    }
)


class EllipseClusters(Source):
    """Three clusters of clients; a client sees a few of its cluster's samples.

    The two classes of a cluster lie in two ellipses. Each cluster has a pool of training samples,
    of which every client draws some; all clients of a cluster are tested on the same fresh samples.
    Fields are the points ``(samples, 2)`` and the classes 0 and 1. The column ``client`` numbers
    the clients, cluster by cluster.

    Args:
        setting: ``"overlap"``: classes overlap and clusters contradict each other; ``"recovery"``:
            overlapping classes, and clusters that can be recovered from the data; ``"separable"``:
            neither overlaps.
        clients_per_cluster: Clients of each cluster.
        samples: Samples of each client, at least 2; drawn again if all have one class, which has
            no optimal classifier.
        pool: Samples of each class in a cluster's pool.
        test_samples: Test samples of each class.
        seed: Seed of all draws.
        dtype: Type of the points.

    Raises:
        ValueError: If a setting is unknown or out of range.

    Deviation from the paper: it doesn't state its ellipses; these are ours.

    Example:
        >>> EllipseClusters(clients_per_cluster=2).load().fields[0].shape
        torch.Size([60, 2])

    References:
        Armacki, Bajovic, Jakovetic, Kar. Personalized federated learning via convex clustering.
        2022. arXiv:2202.00718, section V.
    """

    def __init__(
        self,
        setting: Setting = "overlap",
        clients_per_cluster: int = 20,
        samples: int = 10,
        pool: int = 100,
        test_samples: int = 1000,
        seed: int = 0,
        dtype: DType = "float32",
    ) -> None:
        check_types(EllipseClusters.__init__, locals())
        if not 2 <= samples <= 2 * pool or clients_per_cluster < 1 or test_samples < 1:
            raise ValueError(
                "Expected clients with 2 to 2 * pool samples, and test samples, but got "
                f"{clients_per_cluster=}, {samples=}, {pool=}, {test_samples=}. Use 20, 10, 100 "
                "and 1000, for example."
            )
        self.setting, self.clusters = setting, SETTINGS[setting]
        self.clients_per_cluster, self.samples = clients_per_cluster, samples
        self.pool, self.test_samples = pool, test_samples
        self.seed, self.dtype = seed, dtype

    @property
    def labels(self) -> list[int]:
        """Return each client's true cluster."""
        return [k for k in range(len(self.clusters)) for _ in range(self.clients_per_cluster)]

    def load(self) -> SourceData:
        """Draw the samples, sorted by client."""
        rng = np.random.default_rng(self.seed)
        train: list[tuple[Floats, Floats]] = []
        test: list[tuple[Floats, Floats]] = []
        for cluster in self.clusters:
            pool, fresh = (self._both(cluster, n, rng) for n in (self.pool, self.test_samples))
            for _ in range(self.clients_per_cluster):
                train.append(self._client(pool, rng))
                test.append(fresh)
        fields, labels, owner = self._joined(train)
        test_fields, test_labels, test_owner = self._joined(test)
        columns = ({"client": owner}, {"client": test_owner})
        return SourceData(
            fields,
            labels,
            test_fields,
            test_labels,
            num_classes=2,
            columns=columns[0],
            test_columns=columns[1],
        )

    def _both(
        self, cluster: Ellipses, count: int, rng: np.random.Generator
    ) -> tuple[Floats, Floats]:
        points = [cluster.draw(positive, count, rng) for positive in (True, False)]
        return np.concatenate(points), np.repeat([1.0, 0.0], count)

    def _client(
        self, pool: tuple[Floats, Floats], rng: np.random.Generator
    ) -> tuple[Floats, Floats]:
        while True:
            chosen = rng.choice(2 * self.pool, self.samples, replace=False)
            if 0 < pool[1][chosen].sum() < self.samples:
                return pool[0][chosen], pool[1][chosen]

    def _joined(
        self, clients: list[tuple[Floats, Floats]]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        points = np.concatenate([x for x, _ in clients])
        labels = np.concatenate([y for _, y in clients]).astype(np.int64)
        owner = np.repeat(np.arange(len(clients)), [len(y) for _, y in clients])
        dtype = getattr(torch, self.dtype)
        return (torch.from_numpy(points).to(dtype), torch.from_numpy(labels)), labels, owner
