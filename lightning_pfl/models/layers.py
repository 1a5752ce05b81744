"""Lists of layers that most of the papers' networks consist of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pfl.core.argument_types import check_types


class Layers(nn.Sequential):
    """Layers in a row whose slices are plain ``nn.Sequential`` modules of the same layers.

    ``nn.Sequential`` makes a slice by the constructor of its class, which is another one here.

    Example:
        >>> Layers(nn.Linear(2, 3), nn.ReLU())[:1]
        Sequential(
          (0): Linear(in_features=2, out_features=3, bias=True)
        )
    """

    def __getitem__(self, index: Any) -> Any:
        """Return a layer by its number, or the layers of a slice."""
        return nn.Sequential(*self)[index]


class Scaler(nn.Module):
    r"""Divides by a rate in training mode, for networks of several widths (HeteroFL).

    A unit of a narrow network then has activations as large as if the others were there. Put it
    behind a layer, before BatchNorm; in evaluation it does nothing.

    Args:
        rate: The network's share of the full width, in (0, 1].

    Example:
        >>> Scaler(0.5)(torch.ones(2))
        tensor([2., 2.])

    References:
        Diao, Ding, Tarokh. HeteroFL. ICLR 2021. arXiv:2010.01264, section 3.
    """

    rate: Tensor

    def __init__(self, rate: float = 1.0) -> None:
        check_types(Scaler.__init__, locals())
        super().__init__()
        if not 0 < rate <= 1:
            raise ValueError(
                f"Expected `rate` to be in (0, 1], but got rate={rate!r}. Use the network's share "
                "of the full width."
            )
        self.register_buffer("rate", torch.tensor(float(rate)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scale activations of any shape."""
        return inputs / self.rate if self.training else inputs


def dense(sizes: Sequence[int]) -> list[nn.Module]:
    """Make fully connected layers, each followed by ReLU.

    Args:
        sizes: Numbers of units, inputs first; n sizes make n - 1 layers.

    Raises:
        ValueError: If a size isn't positive.

    Example:
        >>> nn.Sequential(*dense([4, 3]))
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): ReLU()
        )
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"Expected `sizes` to be positive numbers of units, but got sizes={sizes!r}. "
            "Begin with the number of inputs."
        )
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers


def convolution_blocks(
    channels: Sequence[int], kernel_size: int, padding: int = 0, batch_norm: bool = False
) -> list[nn.Module]:
    """Make blocks of convolution, optional BatchNorm, 2 x 2 max pooling and ReLU.

    The papers write ReLU before the pooling; values and gradients are the same, since ReLU is
    monotone, at a quarter of the cost.

    Args:
        channels: Numbers of channels, the image's first; n numbers make n - 1 blocks.
        kernel_size: Side of the square kernels, in pixels.
        padding: Zeros added on each side, in pixels.
        batch_norm: Whether BatchNorm follows each convolution.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers.append(nn.Conv2d(inputs, outputs, kernel_size, padding=padding))
        layers += [nn.BatchNorm2d(outputs)] if batch_norm else []
        layers += [nn.MaxPool2d(2), nn.ReLU()]
    return layers
