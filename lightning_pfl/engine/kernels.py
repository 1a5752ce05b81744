"""Faster CPU kernels, for many clients under ``vmap`` and for one alone, and one correction.

Results equal those of torch's operators but for rounding. Measured on two x86 cores with LeNet at
batch size 10: ``vmap`` turns the convolutions of ten clients into one grouped convolution, which
oneDNN runs two to four times faster on channels-last memory; its gradient of the biases takes
fifteen times longer than a sum. So does torch's max pooling, longer than three elementwise maxima,
unless it runs on channels-last memory, too, where it takes half of their time. The gradient of a
linear layer's weights has their memory layout, which the fused optimizers need, instead of the
transposed one. The correction is for embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from lightning_pfl.engine import channels_last
from lightning_pfl.engine.operators import (
    OperatorMode,
    has_onednn,
    onednn_product,
    own_function,
)


class FastKernels(TorchFunctionMode):
    """A mode that replaces torch's operators under ``vmap`` by faster kernels where they exist.

    Args:
        recorded: Whether steps are recorded, so that the time which kernels take in Python doesn't
            count.
    """

    def __init__(self, recorded: bool = False) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = own_function(func)
        kernel = _KERNELS.get(func)
        if kernel is _linear and not self._recorded and _is_narrow(*args, **(kwargs or {})):
            kernel = None
        if kernel is not None:
            result = kernel(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


# --- convolution ---


def _windows(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Any, ...]:
    """Return a pooling's settings as pairs, None for what is no pair; the stride has a default."""
    sides = kernel_size, kernel_size if stride in (None, []) else stride, padding, dilation
    return tuple(map(_pair, sides))


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[-1])
    return None


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    settings = _pair(stride), _pair(padding), _pair(dilation)
    plain = groups == 1 and input.ndim == 4 and None not in settings
    if not plain or input.device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return NotImplemented
    return _ClientConvolution.apply(input, weight, bias, *settings)


class _ClientConvolution(torch.autograd.Function):
    """A convolution of each client's images with its own weights."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, *settings: Any) -> Tensor:
        """Run torch's convolution, without a client axis."""
        return F.conv2d(x, w, b, *settings)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Any, output: Any) -> None:
        """Save nothing: gradients are those of the operators in ``vmap``."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None, *settings: Any
    ) -> tuple[Tensor, int]:
        """Run one grouped convolution on ``(clients, batch, in, h, w)``, a group per client."""
        x_dim, w_dim, b_dim = in_dims[:3]
        if w_dim is None and b_dim is None:  # one model for all: merge clients into the batch
            x = x.movedim(x_dim, 0)
            out = F.conv2d(x.flatten(0, 1), w, b, *settings)
            return out.unflatten(0, x.shape[:2]), 0
        clients = info.batch_size
        x = (
            x.movedim(x_dim, 1)
            if x_dim is not None
            else x.unsqueeze(1).expand(-1, clients, *x.shape[1:])
        )
        w = w.movedim(w_dim, 0) if w_dim is not None else w.expand(clients, *w.shape)
        if b is not None:
            b = b.movedim(b_dim, 0) if b_dim is not None else b.expand(clients, *b.shape)
            b = b.reshape(-1)
        grouped = x.flatten(1, 2).contiguous(memory_format=torch.channels_last)
        kernel = w.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        stride, padding, dilation = settings
        if b is None or torch.is_autocast_enabled("cpu"):
            out = F.conv2d(grouped, kernel, b, stride, padding, dilation, clients)
        else:
            out = GroupedConvolution.apply(grouped, kernel, b, settings, clients)
        return out.unflatten(1, (clients, -1)), 1


class GroupedConvolution(torch.autograd.Function):
    """A grouped convolution on ``(batch, channels, h, w)`` with a fast gradient of its biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, settings: Any, groups: int) -> Tensor:
        """Run torch's convolution."""
        ctx.save_for_backward(x, w)
        ctx.settings = settings, groups
        stride, padding, dilation = settings
        out: Tensor = F.conv2d(x, w, b, stride, padding, dilation, groups)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Let oneDNN compute all gradients but that of the biases."""
        x, w = ctx.saved_tensors
        (stride, padding, dilation), groups = ctx.settings
        for_x, for_w, for_b = ctx.needs_input_grad[:3]
        to_x, to_w, _ = torch.ops.aten.convolution_backward(
            grad, x, w, None, stride, padding, dilation, False, (0, 0), groups,
            [for_x, for_w, False],
        )  # fmt: skip
        return to_x, to_w, grad.sum((0, 2, 3)) if for_b else None, None, None


# --- linear layers ---


WIDE = 2**16
"""Weights of a linear layer from which its kernel is faster than torch's operators on a CPU.

It always is in a step that is recorded, and on a GPU, where it saves launches: four operators
instead of nine, forward and backward.
"""


def _is_narrow(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return input.device.type == "cpu" and weight.numel() < WIDE


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    # Mixed precision casts inside of torch's operators, which would be inside of this kernel.
    device = input.device.type
    if torch.is_autocast_enabled(device) or input.ndim < 2:
        return NotImplemented
    return _ClientLinear.apply(input, weight, bias)


class _ClientLinear(torch.autograd.Function):
    """A linear layer on each client's samples with its own weights."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Run torch's layer, without a client axis."""
        return F.linear(x, w, b)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Any, output: Any) -> None:
        """Save nothing: gradients are those of :class:`BatchedLinear`."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, int]:
        """Run a batched product, or one product on all samples if clients share the weights."""
        clients = info.batch_size
        x_dim, w_dim, b_dim = in_dims
        x = x.movedim(x_dim, 0) if x_dim is not None else x.expand(clients, *x.shape)
        if w_dim is None and b_dim is None:
            return _shared_linear(x, w, b), 0
        w = w.movedim(w_dim, 0) if w_dim is not None else w.expand(clients, *w.shape)
        if b is not None:
            b = b.movedim(b_dim, 0) if b_dim is not None else b.expand(clients, *b.shape)
        out = BatchedLinear.apply(x.flatten(1, -2), w, b)
        return out.view(*x.shape[:-1], out.shape[-1]), 0


def _shared_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Run a layer on the samples of all clients, ``(clients, ..., in)``."""
    flat = x.flatten(0, -2)
    # oneDNN's operator has no gradient.
    if torch.is_grad_enabled() or not has_onednn() or not _is_large(flat, w.t()):
        return F.linear(x, w, b)
    return onednn_product(flat, w.t(), b).view(*x.shape[:-1], len(w))


class BatchedLinear(torch.autograd.Function):
    """Linear layers on ``(clients, samples, in)`` with weights ``(clients, out, in)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Multiply each client's samples by its weights."""
        ctx.save_for_backward(x, w)
        return x.bmm(w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the weights' gradient in their memory layout."""
        x, w = ctx.saved_tensors
        for_x, for_w, for_b = ctx.needs_input_grad
        return (
            grad.bmm(w) if for_x else None,
            grad.mT.bmm(x) if for_w else None,
            grad.sum(1) if for_b else None,
        )


# --- one client ---


@contextmanager
def alone(last: bool = False) -> Iterator[None]:
    """Run steps of one client with faster kernels; it pays in steps that are recorded.

    Args:
        last: Whether pictures may lie with their channels last.
    """
    with LargeOperators(last):
        yield


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


def _is_large_pooling(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    windows = _windows(kernel_size, stride, padding, dilation) == ((2, 2), (2, 2), (0, 0), (1, 1))
    plain = input.device.type == "cpu" and input.is_floating_point() and input.is_contiguous()
    large = input.ndim >= 3 and input.numel() >= POOLED and min(input.shape[-2:]) >= 2
    return windows and plain and large and not ceil_mode and not return_indices


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
    """A mode, below autograd, that multiplies large matrices of single precision by oneDNN.

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
            if func is torch.ops.aten.mm.default and _is_large(*args):
                return onednn_product(args[0], args[1], None)
            if func is torch.ops.aten.bmm.default and _is_shared(*args) and _is_large(*args):
                return _shared_product(*args)
            if func is torch.ops.aten.addmm.default and args[0].ndim == 1 and _is_large(*args[1:]):
                return onednn_product(args[1], args[2], args[0])
        return func(*args, **(kwargs or {}))


def _is_large(a: Tensor, b: Tensor) -> bool:
    plain = a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"
    return plain and a.numel() * b.shape[-1] >= LARGE


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
    return onednn_product(a.reshape(-1, a.shape[-1]), b[0], None).view(*a.shape[:-1], b.shape[-1])


class LargeOperators(LargePooling):
    """Both of these modes, the second one where a large operator may be called.

    To look at every operator takes three times as long as a small step. So functions that call no
    products, or small ones, in their gradients, too, are called as they are, and so are gradients
    of these alone. That follows from the functions and shapes of a step, and not from what ran
    before, so that a step has the same bits wherever it is taken.

    Args:
        last: As of :class:`LargeProducts`.
    """

    def __init__(self, last: bool) -> None:
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


# --- pooling ---


def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    # Without a rule, `vmap` would merge clients into the batch, and copy channels-last memory.
    settings = _windows(kernel_size, stride, padding, dilation)
    if None in settings or input.ndim < 3 or return_indices or input.device.type != "cpu":
        return NotImplemented
    return _ClientPooling.apply(input, *settings, ceil_mode)


class _ClientPooling(torch.autograd.Function):
    """A max pooling of each client's images."""

    @staticmethod
    def forward(x: Tensor, *settings: Any) -> Tensor:
        """Run torch's pooling, without a client axis."""
        out: Tensor = F.max_pool2d(x, *settings)
        return out

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Any, output: Any) -> None:
        """Save nothing: gradients are those of the operators in ``vmap``."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *settings: Any) -> tuple[Tensor, int]:
        """Pool all clients' channels at once where they are last in memory."""
        dim = in_dims[0]
        if dim == 1 and x.ndim == 5:
            merged = x.flatten(1, 2)  # a view of what a convolution of all clients returns
            if merged.is_contiguous(memory_format=torch.channels_last):
                return F.max_pool2d(merged, *settings).unflatten(1, x.shape[1:3]), 1
        plain = settings == ((2, 2), (2, 2), (0, 0), (1, 1), False)
        if plain and x.is_floating_point() and min(x.shape[-2:]) >= 2:
            last = dim >= x.ndim - 2
            x = x.movedim(dim, 0) if last else x
            return MaxPool2x2.apply(x), 0 if last else dim
        x = x.movedim(dim, 0)
        out = F.max_pool2d(x.flatten(0, 1), *settings)
        return out.unflatten(0, x.shape[:2]), 0


def quadrants(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four members of each 2 x 2 window in row-major order, without odd last rows."""
    height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    x = x[..., :height, :width]
    return (
        x[..., 0::2, 0::2],
        x[..., 0::2, 1::2],
        x[..., 1::2, 0::2],
        x[..., 1::2, 1::2],
    )


class MaxPool2x2(torch.autograd.Function):
    """2 x 2 max pooling over the last two axes; the first of equal maxima gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Take maxima by rows, then by columns, in contiguous memory."""
        a, b, c, d = quadrants(x)
        top, bottom = torch.maximum(a, b), torch.maximum(c, d)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, a >= b, c >= d, top >= bottom)
        return torch.maximum(top, bottom)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Route each window's gradient to its first maximum."""
        x, left_above, left_below, above = ctx.saved_tensors
        odd = x.shape[-2] % 2 or x.shape[-1] % 2
        result = torch.zeros_like(x) if odd else torch.empty_like(x)
        to_a, to_b, to_c, to_d = quadrants(result)
        top = grad * above
        bottom = grad - top
        torch.sub(top, torch.mul(top, left_above, out=to_a), out=to_b)
        torch.sub(bottom, torch.mul(bottom, left_below, out=to_c), out=to_d)
        return result


def _adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Any:
    """Take means of whole pictures.

    torch then gives channels-last pictures other strides in place, for which there is no batching
    rule.
    """
    return input.mean((-2, -1), keepdim=True) if _pair(output_size) == (1, 1) else NotImplemented


# --- BatchNorm ---


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *others: Any,
    **settings: Any,
) -> Any:
    """Normalise inputs of mixed precision, whose statistics are in single precision.

    torch's batching rule gives its kernels no weights, and then a CPU wants statistics of the
    inputs' type. Kernels compute in single precision anyway.
    """
    if running_mean is None or running_mean.dtype == input.dtype:
        return NotImplemented
    exact = input.to(running_mean.dtype)
    out = F.batch_norm(exact, running_mean, running_var, weight, bias, *others, **settings)
    return out.to(input.dtype)


# --- embedding ---


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Run an embedding whose padding has no gradient.

    torch's batching rule merges the clients' tables into one, with the padding index of the first.
    """
    if padding_idx is None or max_norm is not None or sparse:
        return NotImplemented
    out = F.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, out.detach(), out)


_KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.batch_norm: _batch_norm,
    F.conv2d: _conv2d,
    F.embedding: _embedding,
    F.linear: _linear,
    F.max_pool2d: _max_pool2d,
}
