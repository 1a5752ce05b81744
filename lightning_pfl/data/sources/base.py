"""The base classes of data sources, and the transform of image sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pfl.core.argument_types import check_types

# A tuple of tensors (features, labels, ...), each with one row per sample.
Fields = tuple[Tensor, ...]
Labels = npt.NDArray[Any]


@dataclass(frozen=True)
class SourceData:
    """A data set in memory, before it is split over clients.

    Attributes:
        fields: ``(features, labels, ...)`` of the training samples. Images stay uint8.
        labels: Labels that partitions split by, ``(samples,)``: classes, or floats for regression.
        test_fields: The data set's own test samples, ``None`` if it has none.
        test_labels: Their labels.
        transform: Deterministic, per sample, applied to gathered batches (uint8 to floats).
        augment: Random, for training batches of one client.
        eval_transform: Replaces ``transform`` for validation and test batches; ``None``: the same.
        num_classes: Number of classes, ``None`` for regression.
        columns: Further columns of the training samples, such as the client that owns them.
        test_columns: The same columns of the test samples.
    """

    fields: Fields
    labels: Labels
    test_fields: Fields | None = None
    test_labels: Labels | None = None
    transform: Callable[[Any], Any] | None = None
    augment: Callable[[Any], Any] | None = None
    eval_transform: Callable[[Any], Any] | None = None
    num_classes: int | None = None
    columns: Mapping[str, Labels] = field(default_factory=dict)
    test_columns: Mapping[str, Labels] = field(default_factory=dict)


class Source(ABC):
    """A source of samples: `prepare` may download and runs on one process, `load` on all."""

    def prepare(self) -> None:  # noqa: B027 - most sources have nothing to prepare
        """Download or convert files where needed."""

    @abstractmethod
    def load(self) -> SourceData:
        """Read everything into memory."""


class FreshSource(Source):
    """A source with new training samples for every round; see ``FreshDataModule``."""

    @abstractmethod
    def draw(self, round: int) -> Fields:
        """Draw the training samples of a round, from 0, with the sizes and clients of `load`."""


class NormalizeImages:
    r"""Turn uint8 images of a batch into floats: :math:`(x / 255 - \text{mean}) / \text{std}`.

    Args:
        mean: Mean of each channel, of pixels in [0, 1].
        std: Standard deviation of each channel, positive.

    Example:
        >>> images = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
        >>> NormalizeImages([0.5], [0.5])((images, torch.tensor([7])))[0].round()
        tensor([[[[-1.,  1.]]]])
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        check_types(NormalizeImages.__init__, locals())
        self.mean, self.std = tuple(mean), tuple(std)

    def __call__(self, batch: Fields) -> Fields:
        """Normalise the first field, ``(samples, channels, height, width)``; keep the others."""
        images, *rest = batch
        scale, shift = _scale_and_shift(self.mean, self.std, images.device)
        return (torch.addcmul(shift, images.to(torch.float32), scale), *rest)


@lru_cache(maxsize=64)
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cache the constants on the device: a copy from the host per batch would stall a GPU."""
    # Outside inference mode, or a later training step could not use the cached tensors.
    with torch.inference_mode(False):
        sigma = np.asarray(std, dtype=np.float64).reshape(-1, 1, 1)
        mu = np.asarray(mean, dtype=np.float64).reshape(-1, 1, 1)
        scale, shift = torch.from_numpy(1 / (255 * sigma)), torch.from_numpy(-mu / sigma)
        return scale.to(device, torch.float32), shift.to(device, torch.float32)


def load_error(what: str, tried: Sequence[str], remedy: str) -> FileNotFoundError:
    """Build the error for data that were found in none of the searched places."""
    return FileNotFoundError(
        f"Expected {what} in one of these places, but got nothing usable: {'; '.join(tried)}. "
        f"{remedy}"
    )
