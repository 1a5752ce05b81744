"""Small trainable layers for a frozen network: an adapter, and a low-rank change of a layer.

Parameters with ``requires_grad=False`` are neither trained nor sent, so with these layers any
method shares, or personalizes, a few numbers of a large network.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_number


class Adapter(nn.Module):
    r"""Adds a linear map of the channels to its inputs, :math:`x + W d(x) + b`, with dropout d.

    For images it is a 1 x 1 convolution. It starts as almost nothing: :math:`W` is drawn from
    :math:`N(0, s^2)`, and :math:`b` is 0.

    Args:
        channels: Length of the second axis, at least 1.
        std: :math:`s \ge 0`.
        dropout: Probability in [0, 1) that an entry of the map's input is dropped in training.

    Example:
        >>> import torch
        >>> Adapter(3)(torch.zeros(2, 3, 5, 5)).shape
        torch.Size([2, 3, 5, 5])

    References:
        Xie, Huang, Chen, Liu, Zhao, Li, Anandkumar, Xiao. PerAda: Parameter-efficient federated
        learning personalization with generalization guarantees. CVPR 2024. arXiv:2302.06637.
    """

    def __init__(self, channels: int, std: float = 1e-4, dropout: float = 0.3) -> None:
        check_types(Adapter.__init__, locals(), least=1)
        super().__init__()
        check_number("std", std, "Use 1e-4 to begin near the identity.")
        if not 0 <= dropout < 1:
            raise ValueError(
                f"Expected `dropout` to be in [0, 1), but got {dropout=}. Use 0 for none."
            )
        self.std = std
        self.dropout = nn.Dropout(dropout)
        self.map = nn.Linear(channels, channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the map anew."""
        nn.init.normal_(self.map.weight, std=self.std)
        nn.init.zeros_(self.map.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs ``(batch, channels, ...)`` to outputs of the same shape."""
        mapped: Tensor = self.map(self.dropout(inputs).movedim(1, -1))
        return inputs + mapped.movedim(-1, 1)


class LowRank(nn.Module):
    r"""Freezes a linear layer and adds a change of low rank to it, :math:`W + \alpha B A`.

    It starts as the layer: :math:`B` is 0.

    Args:
        layer: The layer, whose parameters no longer train.
        rank: Rows of :math:`A` and columns of :math:`B`, at least 1.
        scale: :math:`\alpha`.

    Raises:
        ValueError: If the rank is below 1 or above a side of the layer.

    Example:
        >>> [name for name, p in LowRank(nn.Linear(8, 4), 2).named_parameters() if p.requires_grad]
        ['down.weight', 'up.weight']

    References:
        Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen. LoRA: Low-rank adaptation of large
        language models. ICLR 2022. arXiv:2106.09685, section 4.
    """

    def __init__(self, layer: nn.Linear, rank: int = 4, scale: float = 1.0) -> None:
        check_types(LowRank.__init__, locals())
        super().__init__()
        if not isinstance(layer, nn.Linear):
            raise TypeError(
                f"Expected `layer` to be an nn.Linear, but got {layer=}. Other layers have no "
                "matrix to add to."
            )
        most = min(layer.in_features, layer.out_features)
        if not 1 <= rank <= most:
            raise ValueError(
                f"Expected `rank` to be in 1..{most}, the smaller side of the layer, but got "
                f"{rank=}. Use 4, for example."
            )
        self.layer, self.scale = layer.requires_grad_(False), scale
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Linear(layer.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, layer.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs ``(..., in_features)`` to outputs ``(..., out_features)``."""
        changed: Tensor = self.layer(inputs) + self.scale * self.up(self.down(inputs))
        return changed
