"""Faster CPU kernels for one client alone: large products, convolutions and max pooling.

Results equal those of torch's operators but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pfl.engine import channels_last
from lightning_pfl.engine.operators import (
    OperatorMode,
    fastest_product,
    has_onednn,
    own_function,
    within_transforms,
)
from lightning_pfl.engine.pooling import HALVING, MaxPool2x2, pooling_settings

POOLED = 2**16
"""Entries from which 2 x 2 max pooling takes longer than elementwise maxima and their gradient.

1.45 to 0.67 milliseconds for 10 pictures of 32 channels and 32 x 32 pixels, but 133 to 120
microseconds for 6 channels and 28 x 28.
"""


class LargePooling(TorchFunctionMode):
    """A mode that takes maxima of large pictures' 2 x 2 windows, with the same bits."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = own_function(func)
        if func is F.max_pool2d and _is_large_pooling(*args, **(kwargs or {})):
            return MaxPool2x2.apply(args[0])
        return func(*args, **(kwargs or {}))


def _is_large_pooling(input: Tensor, *args: Any, **kwargs: Any) -> bool:
    plain = input.device.type == "cpu" and input.is_floating_point() and input.is_contiguous()
    large = input.ndim in (3, 4) and input.numel() >= POOLED and min(input.shape[-2:]) >= 2
    halved = plain and large and pooling_settings(*args, **kwargs) == HALVING
    return halved and not within_transforms()


LARGE = 1_500_000
"""Multiplications from which oneDNN multiplies matrices faster than torch's BLAS.

Measured with MKL, which doesn't use all of an AMD processor: 137 to 75 microseconds for 50 samples,
784 inputs and 200 outputs, 31 to 24 for 10 samples, but 5 to 13 for 320 inputs and 50 outputs.
"""
_REPLACED = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        *channels_last.CONVOLUTIONS,
    }
)
"""Operators for which :class:`LargeProducts` may call others."""


class LargeProducts(OperatorMode):
    """A mode, below autograd, that multiplies large matrices of single precision by what is faster.

    To look at every operator costs more than a small step's arithmetic, see
    :class:`LargeOperators`.

    Args:
        last: Whether it moves pictures to where convolutions are fastest, see ``channels_last.py``.
    """

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self._last = last

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func in _REPLACED and has_onednn():
            if self._last and func in channels_last.CONVOLUTIONS:
                return channels_last.convolve(func, args)
            if func is torch.ops.aten.mm.default and is_large(*args):
                return fastest_product(args[0], args[1])
            if func is torch.ops.aten.bmm.default and _is_shared(*args) and is_large(*args):
                return _shared_product(*args)
            if func is torch.ops.aten.addmm.default and args[0].ndim == 1 and is_large(*args[1:]):
                return fastest_product(args[1], args[2], args[0])
        return func(*args, **(kwargs or {}))


def is_large(a: Tensor, b: Tensor, least: int = LARGE) -> bool:
    """Whether two matrices have enough multiplications for oneDNN, and it takes their numbers."""
    plain = a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"
    return plain and a.numel() * b.shape[-1] >= least


def _is_shared(a: Tensor, b: Tensor) -> bool:
    """Whether all of some matrices are multiplied by one.

    So torch runs a linear layer without gradients on samples that don't lie one after another in
    memory, as attention has them.
    """
    return len(b) > 1 and b.stride(0) == 0


def _shared_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices by one as a single product.

    1,050 to 460 microseconds for 32 of 128 x 64 and one of 64 x 192, with the copy.
    """
    return fastest_product(a.reshape(-1, a.shape[-1]), b[0]).view(*a.shape[:-1], b.shape[-1])


class LargeOperators(LargePooling):
    """Both of these modes, the second one where a large operator may be called.

    They pay in steps of one client that are recorded. To look at every operator takes three times
    as long as a small step. So functions that call no products, or small ones, in their gradients,
    too, are called as they are, and so are gradients of these alone. That follows from the
    functions and shapes of a step, and not from what ran before, so that a step has the same bits
    wherever it is taken.

    Args:
        last: As of :class:`LargeProducts`.
    """

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self._products, self._last, self._large = LargeProducts(last), last, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        own = own_function(func)
        if self._is_small(own, args, kwargs):
            return own(*args, **(kwargs or {}))
        if own is F.max_pool2d:
            return super().__torch_function__(func, types, args, kwargs)
        self._large = True
        with self._products:
            return own(*args, **(kwargs or {}))

    def _is_small(self, func: Any, args: Any, kwargs: dict[str, Any] | None) -> bool:
        if func in _WITHOUT_PRODUCTS or type(func) is MethodWrapperType:  # an attribute
            return True
        if func in _GRADIENTS:
            return not self._large
        if func in _CONVOLVING:
            return not self._last
        bound = _PRODUCTS.get(func)
        return bound is not None and not kwargs and bound(*args) < LARGE


def _linear_size(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    return input.numel() * len(weight) if weight.ndim == 2 else LARGE


def _matmul_size(a: Any, b: Any) -> int:
    """Bound the multiplications of a product, of which one side may be the same for many."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and min(a.ndim, b.ndim) >= 2):
        return LARGE
    return max(a.numel() * b.shape[-1], b.numel() * a.shape[-2])


def _named(names: str) -> frozenset[Any]:
    """Return functions of torch by their names, wherever it has them."""
    owners = torch, Tensor, F
    found = (getattr(owner, name, None) for name in names.split() for owner in owners)
    return frozenset(function for function in found if callable(function))


_WITHOUT_PRODUCTS = _named(
    "abs add sub mul div true_divide floor_divide remainder fmod rsub neg pow exp log log1p log2 "
    "expm1 sqrt rsqrt square sin "
    "cos sigmoid tanh erf sign round floor ceil clamp clamp_min clamp_max clip minimum maximum max "
    "min mean sum prod std var amax amin argmax argmin logsumexp cumsum sort argsort topk "
    "where eq ne lt le gt ge equal logical_and logical_or logical_not bitwise_and bitwise_or "
    "bitwise_not isnan isfinite isinf all any nonzero masked_select masked_fill masked_scatter "
    "index_select gather scatter scatter_add take_along_dim roll flip tril triu "
    "add_ sub_ mul_ div_ clamp_ zero_ fill_ copy_ masked_fill_ "
    "__getitem__ __setitem__ __bool__ __len__ __int__ __float__ __iter__ __radd__ __rsub__ "
    "__rmul__ __rtruediv__ __rdiv__ __rpow__ __pow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "__and__ __or__ __invert__ __iadd__ __isub__ __imul__ "
    "view reshape view_as reshape_as flatten unflatten squeeze unsqueeze permute transpose movedim "
    "swapaxes t expand expand_as repeat repeat_interleave cat concat stack chunk split unbind "
    "select narrow contiguous clone detach to float double half bfloat16 long int bool type "
    "type_as item tolist numel size dim stride is_contiguous is_floating_point requires_grad_ "
    "zeros ones full empty arange tensor zeros_like ones_like full_like empty_like new_zeros "
    "new_ones new_full new_tensor one_hot "
    "relu relu_ relu6 leaky_relu elu selu celu gelu silu mish softplus hardtanh hardswish "
    "logsigmoid softmax log_softmax normalize dropout dropout1d dropout2d dropout3d embedding "
    "layer_norm group_norm batch_norm cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss "
    "huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div gaussian_nll_loss "
    "poisson_nll_loss avg_pool1d avg_pool2d adaptive_avg_pool2d max_pool1d"
)
"""Functions that call none of the operators that are replaced, nor do their gradients."""
_CONVOLVING = _named("conv1d conv2d conv3d conv_transpose2d")
"""Functions that call a convolution alone."""
_GRADIENTS = frozenset({Tensor.backward, torch.autograd.grad})
"""Functions that run the operators of gradients."""
_PRODUCTS: dict[Any, Callable[..., int]] = {
    F.linear: _linear_size,
    **dict.fromkeys(_named("matmul mm bmm __matmul__"), _matmul_size),
}
"""Functions that call one product, and what bounds its multiplications and its gradients'."""
