"""2 x 2 max pooling by elementwise maxima, and the settings of layers with windows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALVING = (2, 2), (2, 2), (0, 0), (1, 1), False
"""The settings of 2 x 2 max pooling."""


def pooling_settings(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...] | None:
    """Return settings of ``F.max_pool2d`` as pairs, and whether it rounds up; None for others."""
    sides = kernel_size, kernel_size if stride in (None, []) else stride, padding, dilation
    pairs = tuple(map(pair, sides))
    return None if return_indices or None in pairs else (*pairs, ceil_mode)


def pair(value: Any) -> tuple[int, int] | None:
    """Return a setting for both sides, None if it is neither a number nor numbers."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[-1])
    return None


def _quadrants(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four members of each 2 x 2 window in row-major order, without odd last rows."""
    height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    x = x[..., :height, :width]
    return (
        x[..., 0::2, 0::2],
        x[..., 0::2, 1::2],
        x[..., 1::2, 0::2],
        x[..., 1::2, 1::2],
    )


def _side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """Return columns of both by turns."""
    return torch.stack([left, right], -1).flatten(-2)


class MaxPool2x2(torch.autograd.Function):
    """2 x 2 max pooling over the last two axes; the first of equal maxima gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Take maxima by rows, then by columns, in contiguous memory."""
        a, b, c, d = _quadrants(x)
        top, bottom = torch.maximum(a, b), torch.maximum(c, d)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, a >= b, c >= d, top >= bottom)
        return torch.maximum(top, bottom)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Route each window's gradient to its first maximum."""
        x, left_above, left_below, above = ctx.saved_tensors
        height, width = x.shape[-2:]
        top = grad * above
        bottom = grad - top
        if torch.is_grad_enabled():  # another gradient will be taken of this one
            rows = [_side_by_side(row * left, row * ~left) for row, left in
                    ((top, left_above), (bottom, left_below))]  # fmt: skip
            result = torch.stack(rows, -2).flatten(-3, -2)
            return F.pad(result, (0, width % 2, 0, height % 2))
        result = torch.zeros_like(x) if height % 2 or width % 2 else torch.empty_like(x)
        to_a, to_b, to_c, to_d = _quadrants(result)
        torch.sub(top, torch.mul(top, left_above, out=to_a), out=to_b)
        torch.sub(bottom, torch.mul(bottom, left_below, out=to_c), out=to_d)
        return result
