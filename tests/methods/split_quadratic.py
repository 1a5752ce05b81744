"""A quadratic module of two halves, as a model with a backbone and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_pfl.testing import QuadraticModule


class Vector(nn.Module):
    """A module that is nothing but a parameter ``weight`` of shape ``(dim,)``."""

    def __init__(self, dim: int, start: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), start, dtype=dtype))


class SplitQuadraticModule(QuadraticModule):
    r"""Two halves ``backbone.weight`` and ``head.weight``; the loss is the quadratic at their sum.

    The halves are coupled as in a network: what one half does depends on the other. Training both,
    the sum follows ``descend(sum, a, c, 2 * lr, K)`` and each half moves by half of its change;
    training one, with the other at :math:`v`, that half follows ``descend(half, a, c - v, lr, K)``.

    Args:
        dim: Length of each half.
        lr: :math:`\eta` of plain SGD, for both.
        backbone: Initial value of every entry of the backbone.
        head: Initial value of every entry of the head.
        dtype: Type of the parameters.
    """

    def __init__(
        self,
        dim: int = 1,
        lr: float = 0.1,
        backbone: float = 0.0,
        head: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(dim, lr, dtype=dtype)
        del self.w
        self.backbone = Vector(dim, backbone, dtype)
        self.head = Vector(dim, head, dtype)

    def point(self) -> Tensor:
        """The sum of the halves, ``(dim,)``."""
        return self.backbone.weight + self.head.weight
