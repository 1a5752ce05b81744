"""FedRep's convolutional networks for CIFAR-10 and CIFAR-100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_share
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.layers import Layers, convolution_blocks, dense


class CIFARBackbone(Layers):
    """Convolutions from images ``(batch, 3, 32, 32)`` to features ``(batch, hidden[-1])``.

    Two blocks of a 5 x 5 convolution, max pooling and ReLU, then fully connected layers.

    Args:
        channels: Channels of the two convolutions.
        hidden: Units of the fully connected layers.

    Raises:
        ValueError: If ``channels`` doesn't have two entries.
    """

    def __init__(
        self, channels: Sequence[int] = (64, 64), hidden: Sequence[int] = (120, 64)
    ) -> None:
        check_types(CIFARBackbone.__init__, locals(), least=1)
        if len(channels) != 2:
            raise ValueError(
                f"Expected `channels` to have two entries, but got channels={channels!r}. "
                "Give the channels of both convolutions."
            )
        blocks = convolution_blocks([3, *channels], kernel_size=5)
        super().__init__(*blocks, nn.Flatten(), *dense([25 * channels[-1], *hidden]))


class CIFAR10CNN(PersonalizedModule):
    """FedRep's network for CIFAR-10: 307,842 parameters, 650 of them in the head.

    Args:
        settings: Arguments of PersonalizedModule besides backbone and head.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(CIFARBackbone(), nn.Linear(64, 10), **settings)


class CIFAR100CNN(PersonalizedModule):
    """FedRep's network for CIFAR-100: 1,075,044 parameters, 12,900 of them in the head.

    The dropout before the last layer belongs to the head, so that the backbone is deterministic
    and its features can be computed once in a phase that trains the head alone.

    Args:
        dropout: Probability of dropping a feature before the last layer, in [0, 1].
        settings: Further arguments of PersonalizedModule.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5.
    """

    def __init__(self, dropout: float = 0.6, **settings: Any) -> None:
        check_types(CIFAR100CNN.__init__, locals(), least=1)
        check_share("dropout", dropout)
        super().__init__(
            CIFARBackbone(channels=(64, 128), hidden=(256, 128)),
            nn.Sequential(nn.Dropout(dropout), nn.Linear(128, 100)),
            **settings,
        )
        self.save_hyperparameters({"dropout": dropout})
