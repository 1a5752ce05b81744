"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32 x 32, read and downloaded by torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import Fields, NormalizeImages, Source, SourceData, load_error

Channels = tuple[float, float, float]


class CropAndFlip:
    """Random crop after padding, and random horizontal flip, of a batch.

    The padding is black *before* normalisation, as in the usual pipeline, although this runs on
    normalised images. Every draw is a ``torch.rand`` call of one number per image and no control
    flow depends on values, so the engine can key and batch it.

    Args:
        mean: Mean of each channel that the images were normalised with.
        std: Standard deviation of each channel.
        padding: Pixels on each side, at least 0.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], padding: int = 4) -> None:
        check_types(CropAndFlip.__init__, locals())
        self.padding = padding
        self.black = tuple(-m / s for m, s in zip(mean, std, strict=True))

    def __call__(self, batch: Fields) -> Fields:
        """Augment the first field, ``(samples, channels, height, width)``; keep the others."""
        images, *rest = batch
        count = images.shape[0]
        down, right, flip = (torch.rand(count, device=images.device) for _ in range(3))
        return (self.crop(images, self._shift(down), self._shift(right), flip < 0.5), *rest)

    def crop(self, images: Tensor, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
        """Shift every image by its own offsets, fill with black, and mirror where ``flip``.

        Args:
            images: ``(samples, channels, height, width)``.
            down: Rows of the crop's centre below the image's, ``(samples,)`` long.
            right: Columns of the crop's centre right of the image's, ``(samples,)`` long.
            flip: Which images to mirror left to right, ``(samples,)`` bool.
        """
        height, width = images.shape[-2:]
        rows = torch.arange(height, device=images.device) + down[:, None]
        across = torch.arange(width, device=images.device)
        columns = torch.where(flip[:, None], width - 1 - across, across) + right[:, None]
        inside = ((rows >= 0) & (rows < height))[:, None, :, None] & (
            (columns >= 0) & (columns < width)
        )[:, None, None, :]
        taken = images.gather(
            2, rows.clamp(0, height - 1)[:, None, :, None].expand_as(images)
        ).gather(3, columns.clamp(0, width - 1)[:, None, None, :].expand_as(images))
        black = torch.stack([torch.full((), v, device=images.device) for v in self.black])
        return torch.where(inside, taken, black.to(images.dtype)[:, None, None])

    def _shift(self, uniform: Tensor) -> Tensor:
        """Map uniform numbers in [0, 1) to integer offsets in -padding .. padding."""
        steps = 2 * self.padding + 1
        return (uniform * steps).long().clamp(max=steps - 1) - self.padding


class _CIFAR(Source):
    """The common part of both data sets: torchvision's reader, uint8 pool, normalisation."""

    name: str
    num_classes: int
    mean: Channels
    std: Channels

    def __init__(self, data_dir: str = "data", augment: bool = True) -> None:
        check_types(_CIFAR.__init__, locals())
        self.data_dir = data_dir
        self.augment = augment

    def prepare(self) -> None:
        """Download unless the files are there.

        Raises:
            FileNotFoundError: They are not there and the download failed.
        """
        self._open(train=True, download=True)

    def load(self) -> SourceData:
        """Read both splits.

        Raises:
            FileNotFoundError: The files are not in ``data_dir`` or damaged.
        """
        train, test = self._open(train=True), self._open(train=False)
        train_labels, test_labels = np.asarray(train.targets), np.asarray(test.targets)
        return SourceData(
            (_images(train.data), torch.from_numpy(train_labels)),
            train_labels,
            (_images(test.data), torch.from_numpy(test_labels)),
            test_labels,
            transform=NormalizeImages(self.mean, self.std),
            augment=CropAndFlip(self.mean, self.std) if self.augment else None,
            num_classes=self.num_classes,
        )

    def _open(self, train: bool, download: bool = False) -> Any:
        try:
            import torchvision.datasets

            reader = getattr(torchvision.datasets, self.name)
            return reader(self.data_dir, train=train, download=download)
        except Exception as error:  # torchvision missing, no network, damaged files
            raise load_error(
                f"the files of {self.name} as torchvision lays them out",
                [str(self.data_dir), f"torchvision ({error})"],
                f"Install torchvision and run once with network access, or unpack the archive of "
                f"{self.name} (python version) into data_dir.",
            ) from error


class CIFAR10(_CIFAR):
    """CIFAR-10, normalised with ImageNet's mean and standard deviation as in FedRep's code.

    Args:
        data_dir: Directory to read from and to download to.
        augment: Whether training batches get a random crop (padding 4) and flip.

    References:
        Krizhevsky. Learning multiple layers of features from tiny images. 2009.
    """

    name = "CIFAR10"
    num_classes = 10
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)


class CIFAR100(_CIFAR):
    """CIFAR-100 with its 100 fine classes, normalised as in FedRep's code.

    Args:
        data_dir: Directory to read from and to download to.
        augment: Whether training batches get a random crop (padding 4) and flip.

    References:
        Krizhevsky. Learning multiple layers of features from tiny images. 2009.
    """

    name = "CIFAR100"
    num_classes = 100
    mean = (0.507, 0.487, 0.441)
    std = (0.267, 0.256, 0.276)


def _images(pixels: Any) -> Tensor:
    """Turn ``(n, 32, 32, 3)`` into ``(n, 3, 32, 32)``, contiguous."""
    return torch.from_numpy(np.ascontiguousarray(np.asarray(pixels).transpose(0, 3, 1, 2)))
