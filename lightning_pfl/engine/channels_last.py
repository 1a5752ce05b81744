"""Large pictures of one client on channels-last memory.

oneDNN convolves pictures faster whose channels are neighbours in memory, and BatchNorm, ReLU and
pooling run faster on them. Pictures that are larger than half of the weights are moved there before
a convolution, and what is computed from its result stays there; weights and their gradients lie as
always. Numbers differ in the last bits, so it depends on shapes and on the module's code alone: all
steps of a module, recorded or not, have the same bits.

No number in torch depends on how a tensor lies in memory, but ``view`` wants neighbours, and a few
functions ask for places (``PLACES`` in ``known_code.py``). Code that names one of them, or that may
do anything, has pictures where they always are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def convolve(operator: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run one of :data:`CONVOLUTIONS` on pictures that lie where it is fastest.

    Args:
        operator: The operator, below autograd.
        args: Its arguments.
    """
    if operator is aten.convolution.default:
        pictures, weight, _, *settings = args
        return operator(_placed(pictures, weight, *settings), *args[1:])
    pictures, weight, _, *settings = args[1:]
    placed = _placed(pictures, weight, *settings)
    to_pictures, to_weight, to_bias = operator(args[0], placed, *args[2:])
    return to_pictures, None if to_weight is None else to_weight.contiguous(), to_bias


def _placed(
    pictures: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Any,
    dilation: Any,
    transposed: bool,
    added: Any,
    groups: int,
    *_: Any,
) -> Tensor:
    """Move pictures to channels-last memory, or from there where weights are twice as large."""
    single = pictures.device.type == "cpu" and pictures.dtype == weight.dtype == torch.float32
    # With one channel there is no first and no last.
    several = pictures.ndim == 4 and groups == 1 and pictures.shape[1] > 1
    if not (single and several) or transposed:
        return pictures
    rows, columns = pictures.shape[2:]
    made = len(pictures) * len(weight) * rows * columns // (stride[0] * stride[-1])
    # Weights are moved, too, in each call.
    large = 2 * (pictures.numel() + made) >= weight.numel()
    places = torch.channels_last if large else torch.contiguous_format
    return pictures.contiguous(memory_format=places)
