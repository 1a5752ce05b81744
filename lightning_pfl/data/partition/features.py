"""Feature skew: clients see similar data through different maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from lightning_pfl.core.checks import check_used
from lightning_pfl.data.partition.base import Array, Partition, Parts, check_positive
from lightning_pfl.data.partition.check import require_partition
from lightning_pfl.data.partition.sizes import IID


@dataclass(frozen=True)
class FeaturePlan:
    """Plan of `FeatureSkew`: the plan of its base partition and the key of the clients' maps."""

    base: Any
    key: int


class FeatureSkew(Partition):
    r"""A map of the features per client; ``base`` assigns the samples.

    ==============  ==============================================================================
    ``rotate90``    Images turned by 0, 90, 180 or 270 degrees: the first quarter of the clients by
                    0, the next by 90, and so on (rotated MNIST of the sheaf experiments).
    ``rotate``      Images turned by an angle drawn uniformly from [-max_angle, max_angle] degrees,
                    bilinear, with zeros (black) outside.
    ``affine``      Vectors :math:`x \mapsto x A_k + b_k` with standard normal entries in
                    :math:`A_k` and :math:`b_k = \text{offset}\,(k+1)\,z_k`, :math:`z_k` standard
                    normal, :math:`k = 0, 1, \dots` (FedMAP's synthetic data, offset 5).
    ==============  ==============================================================================

    Args:
        kind: ``"rotate90"``, ``"rotate"`` or ``"affine"``.
        base: Partition that assigns the samples. ``None``: IID.
        max_angle: Largest angle of ``rotate`` in degrees, in (0, 180].
        offset: Scale of the shifts of ``affine``, positive.
    """

    def __init__(
        self,
        kind: Literal["rotate90", "rotate", "affine"] = "rotate90",
        base: Partition | None = None,
        max_angle: float = 45.0,
        offset: float = 5.0,
    ) -> None:
        if kind not in ("rotate90", "rotate", "affine"):
            raise ValueError(
                f"Expected `kind` to be 'rotate90', 'rotate' or 'affine', but got {kind=}. "
                "Choose one of the three."
            )
        if check_positive("max_angle", max_angle) > 180:
            raise ValueError(
                f"Expected `max_angle` to be in (0, 180] degrees, but got {max_angle=}. "
                "Use 180 for all directions."
            )
        check_used(
            FeatureSkew.__init__, {"max_angle": max_angle}, kind == "rotate", "kind='rotate'"
        )
        check_used(FeatureSkew.__init__, {"offset": offset}, kind == "affine", "kind='affine'")
        self.kind = kind
        self.base = IID() if base is None else require_partition("base", base)
        self.max_angle = float(max_angle)
        self.offset = check_positive("offset", offset)

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Split by the base partition and draw the key of the maps."""
        key = int(rng.integers(2**63))
        parts, base = self.base.split(labels, num_clients, rng)
        return parts, FeaturePlan(base, key)

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Split by the base partition's plan."""
        return self.base.apply(labels, plan.base, rng)

    def keys(self, labels: Array, columns: Any) -> Array:
        """Return the values that the base partition splits by."""
        return self.base.keys(labels, columns)

    def names(self, plan: Any) -> tuple[str, ...] | None:
        """Return the base partition's names."""
        return self.base.names(plan.base)

    def change_features(self, features: Tensor, parts: Parts, plan: Any) -> Tensor:
        """Return a copy in which every client's map is applied to its samples.

        Args:
            features: Images ``(samples, channels, height, width)`` or vectors ``(samples, d)``.
            parts: Positions of each client, disjoint.
            plan: Plan of `split`; the same plan gives a client the same map for train and test.

        Raises:
            ValueError: The shape or type doesn't fit the map, or clients share samples.
        """
        self._check_features(features, parts)
        features = self.base.change_features(features, parts, plan.base).clone()
        for client, part in enumerate(parts):
            rng = np.random.default_rng((plan.key, client))
            rows = torch.from_numpy(part)
            features[rows] = self._map(features[rows], client, len(parts), rng)
        return features

    def _map(self, x: Tensor, client: int, clients: int, rng: Generator) -> Tensor:
        if self.kind == "rotate90":
            return x.rot90(4 * client // clients, dims=(-2, -1))
        if self.kind == "rotate":
            return rotate(x, float(rng.uniform(-self.max_angle, self.max_angle)))
        dim = x.shape[1]
        matrix = torch.from_numpy(rng.standard_normal((dim, dim))).to(x)
        shift = torch.from_numpy(self.offset * (client + 1) * rng.standard_normal(dim)).to(x)
        return x @ matrix + shift

    def _check_features(self, features: Tensor, parts: Parts) -> None:
        if self.kind == "affine" and not (features.ndim == 2 and features.is_floating_point()):
            raise ValueError(
                "Expected floating-point vectors (samples, d) for kind='affine', but got features "
                f"of shape {tuple(features.shape)} and {features.dtype}. Use a rotation for images."
            )
        square = features.ndim == 4 and features.shape[-1] == features.shape[-2]
        if self.kind != "affine" and not square:
            raise ValueError(
                f"Expected square images (samples, channels, size, size) for kind={self.kind!r}, "
                f"but got features of shape {tuple(features.shape)}. Use kind='affine' for vectors."
            )
        held = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
        if len(np.unique(held)) < len(held):
            raise ValueError(
                "Expected clients with disjoint samples for feature skew, but got "
                f"{len(held) - len(np.unique(held))} samples held twice. "
                "Use a base partition that gives each sample to one client."
            )


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Turn images counter-clockwise about their centre, bilinear, with zeros outside.

    Args:
        images: ``(samples, channels, size, size)``, floating point or uint8 (rounded back).
        degrees: Angle.
    """
    angle = np.deg2rad(degrees)
    # affine_grid maps output coordinates to input coordinates, with y pointing down.
    turn = [[np.cos(angle), -np.sin(angle), 0.0], [np.sin(angle), np.cos(angle), 0.0]]
    theta = torch.tensor(turn, dtype=torch.float32).expand(len(images), 2, 3)
    if len(images) == 0:
        return images
    pixels = images.to(torch.float32)
    grid = torch.nn.functional.affine_grid(theta, list(images.shape), align_corners=False)
    turned = torch.nn.functional.grid_sample(pixels, grid, align_corners=False)
    if not images.is_floating_point():
        turned = turned.round()
    return turned.to(images.dtype)
