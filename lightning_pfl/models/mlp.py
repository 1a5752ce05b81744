"""Multilayer perceptrons: general, for digits, and FedRep's for FEMNIST."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.layers import Layers, dense
from lightning_pfl.models.losses import Loss

LossChoice = Literal["cross_entropy", "mse", "bce"] | Loss


class MLPBackbone(Layers):
    """Fully connected layers with ReLU after each, on flattened inputs.

    Args:
        sizes: Numbers of units, from inputs to features; a single number makes no layer.
        pool: Average-pool images ``(channels, height, width)`` over ``pool * pool`` pixels first.

    Raises:
        ValueError: If ``pool`` isn't an integer >= 1.
    """

    def __init__(self, sizes: Sequence[int], pool: int = 1) -> None:
        check_types(MLPBackbone.__init__, locals())
        if pool < 1:
            raise ValueError(
                f"Expected `pool` to be a whole number >= 1, but got pool={pool!r}. Use 1 for no "
                "pooling."
            )
        first = [nn.AvgPool2d(pool)] if pool > 1 else []
        super().__init__(*first, nn.Flatten(), *dense(sizes))


class MLP(PersonalizedModule):
    """A multilayer perceptron whose last layer is the head.

    Args:
        sizes: Numbers of units from inputs to outputs, at least two. Two make a linear model, whose
            backbone has no parameters.
        pool: Average-pool images over ``pool * pool`` pixels first; ``sizes`` begins with the
            remaining pixels.
        loss: See PersonalizedModule.
        settings: Further arguments of PersonalizedModule.

    Raises:
        ValueError: If there are fewer than two sizes.

    Example:
        >>> MLP([64, 32, 10]).head
        Linear(in_features=32, out_features=10, bias=True)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        pool: int = 1,
        loss: LossChoice = "cross_entropy",
        **settings: Any,
    ) -> None:
        check_types(MLP.__init__, locals())
        if len(sizes) < 2:
            raise ValueError(
                "Expected `sizes` to have at least the numbers of inputs and outputs, but got "
                f"sizes={sizes!r}. Use [inputs, outputs] for a linear model."
            )
        super().__init__(
            MLPBackbone(sizes[:-1], pool), nn.Linear(sizes[-2], sizes[-1]), loss=loss, **settings
        )
        self.save_hyperparameters({"sizes": list(sizes), "pool": pool})


class DigitsMLP(PersonalizedModule):
    """A perceptron 64-64-10 for scikit-learn's 8 x 8 digits, as images or vectors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(MLPBackbone([64, 64]), nn.Linear(64, 10), **settings)


class FEMNISTMLP(PersonalizedModule):
    """FedRep's network for FEMNIST: 784-512-256-64-10, 550,346 parameters, 650 in the head.

    Args:
        double_softmax: Whether the head ends in a softmax although the loss takes logits, as in the
            authors' code. It flattens the gradients; needed to replicate the paper's numbers.
        settings: Arguments of PersonalizedModule besides backbone and head.

    Deviation from the paper: the text calls it a network of two layers; this is the authors' code.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5.
    """

    def __init__(self, double_softmax: bool = False, **settings: Any) -> None:
        check_types(FEMNISTMLP.__init__, locals())
        head: nn.Module = nn.Linear(64, 10)
        if double_softmax:
            head = nn.Sequential(head, nn.Softmax(dim=1))
        super().__init__(MLPBackbone([784, 512, 256, 64]), head, **settings)
        self.save_hyperparameters({"double_softmax": double_softmax})
