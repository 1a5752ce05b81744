"""Random resized crops of a batch, with different draws for each image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.sources.base import Fields

TRIES = 10


class RandomResizedCrop:
    r"""Random part of every image, resized to a square, and mirrored for half of them.

    The part has a share of the area drawn from ``scale`` and a ratio of width to height drawn from
    ``ratio`` (log-uniformly); the first of ten draws that fits is taken, else the entire image.
    This is torchvision's ``RandomResizedCrop`` followed by ``RandomHorizontalFlip``, with draws per
    image (torchvision takes the centre of long images where nothing fits). Nothing depends on
    pixels, so the engine can key and batch it. Resizing is bilinear, antialiased where it shrinks.

    Args:
        size: Side of the result in pixels.
        scale: Bounds of the share of the area, in (0, 1].
        ratio: Bounds of width over height, positive; 1 must lie between them.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> images = torch.rand(4, 3, 64, 48), torch.zeros(4)
        >>> RandomResizedCrop(32)(images)[0].shape
        torch.Size([4, 3, 32, 32])
    """

    def __init__(
        self,
        size: int = 224,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        check_types(RandomResizedCrop.__init__, locals())
        if size < 1:
            raise ValueError(
                f"Expected `size` to be at least 1, but got {size=}. Use 224 for AlexNet."
            )
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(
                f"Expected `scale` to be two increasing numbers in (0, 1], but got {scale=}. "
                "Use (0.08, 1.0) as torchvision does."
            )
        if not 0 < ratio[0] <= 1 <= ratio[1]:
            raise ValueError(
                f"Expected `ratio` to be two positive numbers with 1 between them, but got "
                f"{ratio=}. Use (0.75, 1.33) as torchvision does."
            )
        self.size, self.scale, self.ratio = size, scale, ratio

    def __call__(self, batch: Fields) -> Fields:
        """Augment the first field, ``(samples, channels, height, width)``; keep the others."""
        images, *rest = batch
        count, device = len(images), images.device
        top, left, height, width = self.boxes(count, images.shape[-2:], device)
        flip = torch.rand(count, device=device) < 0.5
        down = weights(top, height, images.shape[-2], self.size)
        across = weights(left, width, images.shape[-1], self.size)
        across = torch.where(flip[:, None, None], across.flip(1), across)
        down, across = (part.to(images.dtype)[:, None] for part in (down, across))
        return (down @ images @ across.transpose(-1, -2), *rest)

    def boxes(
        self, count: int, shape: tuple[int, int] | torch.Size, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw crops: top, left, height and width in pixels, each ``(count,)``, as floats."""
        rows, columns = shape
        area = torch.rand(count, TRIES, device=device)
        area = rows * columns * (self.scale[0] + (self.scale[1] - self.scale[0]) * area)
        low, high = (math.log(bound) for bound in self.ratio)
        ratio = torch.exp(low + (high - low) * torch.rand(count, TRIES, device=device))
        width, height = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (width > 0) & (width <= columns) & (height > 0) & (height <= rows)
        first = fits.long().argmax(1, keepdim=True)
        some = fits.any(1)
        width = torch.where(some, width.gather(1, first)[:, 0], columns)
        height = torch.where(some, height.gather(1, first)[:, 0], rows)
        down, right = torch.rand(count, device=device), torch.rand(count, device=device)
        top, left = (down * (rows - height + 1)).floor(), (right * (columns - width + 1)).floor()
        return top, left, height, width


def weights(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Compute the weights of an image's pixels for the result's pixels, along one axis.

    Result pixel u has its centre at ``start + (u + 1/2) length / size``; pixels of the crop are
    weighted by a triangle around it, one pixel wide to each side, or ``length / size`` if that is
    more, so that shrinking doesn't skip pixels.

    Args:
        start: First pixel of each crop, ``(count,)``.
        length: Pixels of each crop, ``(count,)``.
        pixels: Pixels of the image.
        size: Pixels of the result.

    Returns:
        ``(count, size, pixels)``; rows sum to 1.
    """
    start, length = start[:, None, None], length[:, None, None]
    step = length / size
    target = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * step
    source = torch.arange(pixels, device=start.device) + 0.5
    found = (1 - (source - target).abs() / step.clamp(min=1)).clamp(min=0)
    found = found * ((source > start) & (source < start + length))
    return found / found.sum(-1, keepdim=True)
