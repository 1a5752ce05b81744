"""LeNet for 28 x 28 images such as Fashion-MNIST, and a smaller network for 8 x 8 digits."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.layers import Layers, convolution_blocks, dense


class LeNetBackbone(Layers):
    """Convolutions from images ``(batch, in_channels, 28, 28)`` to features ``(batch, 100)``.

    Two blocks of a 5 x 5 convolution, max pooling and ReLU with 6 and 16 channels, then fully
    connected layers 256-120-100.

    Args:
        in_channels: Channels of the images.
        batch_norm: Whether BatchNorm follows each convolution.
    """

    def __init__(self, in_channels: int = 1, batch_norm: bool = False) -> None:
        check_types(LeNetBackbone.__init__, locals(), least=1)
        blocks = convolution_blocks([in_channels, 6, 16], kernel_size=5, batch_norm=batch_norm)
        super().__init__(*blocks, nn.Flatten(), *dense([256, 120, 100]))


class LeNet(PersonalizedModule):
    """LeNet with the head ``Linear(100, num_classes)``.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the 28 x 28 images.
        batch_norm: Whether BatchNorm follows each convolution.
        settings: Further arguments of PersonalizedModule.

    Deviation from the paper: ReLU and max pooling instead of sigmoids and subsampling, and 100
    units before the head instead of 84.

    References:
        LeCun, Bottou, Bengio, Haffner. Gradient-based learning applied to document recognition.
        Proceedings of the IEEE 86(11), 1998, figure 2.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        batch_norm: bool = False,
        **settings: Any,
    ) -> None:
        check_types(LeNet.__init__, locals(), least=1)
        super().__init__(
            LeNetBackbone(in_channels, batch_norm),
            nn.Linear(100, num_classes),
            num_classes=num_classes,
            **settings,
        )
        self.save_hyperparameters({"in_channels": in_channels, "batch_norm": batch_norm})


class DigitsBackbone(Layers):
    """Convolutions from digits ``(batch, 1, 8, 8)`` or ``(batch, 64)`` to ``(batch, 64)``."""

    def __init__(self) -> None:
        blocks = convolution_blocks([1, 16, 32], kernel_size=3, padding=1)
        # Sources may return digits as vectors; both become images here.
        to_images = [nn.Flatten(), nn.Unflatten(1, (1, 8, 8))]
        super().__init__(*to_images, *blocks, nn.Flatten(), *dense([128, 64]))


class DigitsCNN(PersonalizedModule):
    """A small convolutional network for scikit-learn's 8 x 8 digits."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(DigitsBackbone(), nn.Linear(64, 10), **settings)
