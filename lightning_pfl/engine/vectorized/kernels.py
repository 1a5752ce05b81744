"""Faster CPU kernels for many clients under ``vmap``, and corrections of its rules.

Results equal those of torch's operators but for rounding. Measured on two x86 cores with LeNet at
batch size 10: ``vmap`` turns the convolutions of ten clients into one grouped convolution, which
oneDNN runs two to four times faster on channels-last memory; its gradient of the biases takes
fifteen times longer than a sum. So does torch's max pooling, longer than three elementwise maxima,
unless it runs on channels-last memory, too, where it takes half of their time. The gradient of a
linear layer's weights has their memory layout, which the fused optimizers need, instead of the
transposed one. A loss of classes is one operator, of all clients' samples, instead of a comparison,
a choice and a gather, on a GPU too. The corrections are for the padding of embeddings, means of
whole pictures, classes that are out of range and BatchNorm in mixed precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pfl.engine.large_operators import is_large
from lightning_pfl.engine.operators import (
    beneath_vmap,
    one_hot,
    onednn_product,
    own_function,
    prefers_onednn,
)
from lightning_pfl.engine.pooling import HALVING, MaxPool2x2, pair, pooling_settings


class FastKernels(TorchFunctionMode):
    """A mode that replaces torch's operators under ``vmap`` by faster kernels where they exist."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = own_function(func)
        if func is F.multi_head_attention_forward:
            with self:
                return _opened(func)(*args, **(kwargs or {}))
        if (kernel := _KERNELS.get(func)) is not None:
            result = kernel(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def _opened(function: Any) -> FunctionType:
    """Return a function of torch whose own calls a mode gets, where it would get the whole."""
    names = {**vars(F), "has_torch_function": lambda _: False}  # as replaced by now
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _rows(leaf: Tensor, dim: int | None, clients: int) -> Tensor:
    """Return the rows of the clients, which come first."""
    if dim is None:
        return leaf.expand(clients, *leaf.shape)
    return leaf.movedim(dim, 0) if dim else leaf


# --- convolution ---


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    settings = pair(stride), pair(padding), pair(dilation)
    plain = groups == 1 and input.ndim == weight.ndim == 4 and None not in settings
    if not plain or input.device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return NotImplemented
    return beneath_vmap(_convolutions, input, weight, bias, *settings)


def _convolutions(
    clients: int, dims: Sequence[int | None], x: Tensor, w: Tensor, b: Tensor | None, *settings: Any
) -> tuple[Tensor, int]:
    """Run one grouped convolution on ``(clients, batch, in, h, w)``, a group per client."""
    x_dim, w_dim, b_dim = dims[:3]
    if w_dim is None and b_dim is None:  # one model for all: merge clients into the batch
        x = _rows(x, x_dim, clients)
        out = F.conv2d(x.flatten(0, 1), w, b, *settings)
        return out.unflatten(0, x.shape[:2]), 0
    x = (
        x.movedim(x_dim, 1)
        if x_dim is not None
        else x.unsqueeze(1).expand(-1, clients, *x.shape[1:])
    )
    w = _rows(w, w_dim, clients)
    b = None if b is None else _rows(b, b_dim, clients).reshape(-1)
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


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    # Mixed precision casts inside of torch's operators, which would be inside of this kernel.
    device = input.device.type
    # torch also takes one output's weights, and biases that aren't one for each output.
    plain = input.ndim >= 2 and weight.ndim == 2 and (bias is None or bias.ndim == 1)
    if torch.is_autocast_enabled(device) or not plain:
        return NotImplemented
    return beneath_vmap(_linear_layers, input, weight, bias)


def _linear_layers(
    clients: int, dims: Sequence[int | None], x: Tensor, w: Tensor, b: Tensor | None
) -> tuple[Tensor, int]:
    """Run a batched product, or one product on all samples if clients share the weights."""
    x_dim, w_dim, b_dim = dims
    x = _rows(x, x_dim, clients)
    if w_dim is None and b_dim is None:
        return _shared_linear(x, w, b), 0
    w, b = _rows(w, w_dim, clients), None if b is None else _rows(b, b_dim, clients)
    if x.ndim == 3:
        return BatchedLinear.apply(x, w, b), 0
    out = BatchedLinear.apply(x.flatten(1, -2), w, b)
    return out.view(*x.shape[:-1], out.shape[-1]), 0


def _shared_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Run a layer on the samples of all clients, ``(clients, ..., in)``."""
    flat = x.flatten(0, -2)
    # oneDNN's operator has no gradient.
    if torch.is_grad_enabled() or not prefers_onednn() or not is_large(flat, w.t()):
        return F.linear(x, w, b)
    return onednn_product(flat, w.t(), b).view(*x.shape[:-1], len(w))


class BatchedLinear(torch.autograd.Function):
    """Linear layers on ``(clients, samples, in)`` with weights ``(clients, out, in)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Multiply each client's samples by its weights."""
        ctx.save_for_backward(x, w)
        return _products(x, w.mT, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the weights' gradient in their memory layout."""
        x, w = ctx.saved_tensors
        for_x, for_w, for_b = ctx.needs_input_grad
        return (
            _products(grad, w) if for_x else None,
            _products(grad.mT, x) if for_w else None,
            grad.sum(1) if for_b else None,
        )


LARGE_OF_MANY, LARGE_IN_THREADS = 2_000_000, 4_000_000
"""Multiplications from which oneDNN multiplies the matrices of one client after another faster than
torch's BLAS multiplies those of all, with the copy that puts them together: with one thread, and
for each of several, as BLAS gives a thread whole matrices and oneDNN parts of one.

Measured with MKL on an AMD processor, which it doesn't use all of: 763 to 493 microseconds for ten
times 320 x 64 and 64 x 192 with one thread, 383 to 348 with two. A matrix whose rows aren't one
after another is copied, and needs twice as many.
"""


def _products(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each client's ``(rows, inner)`` by its ``(inner, columns)``, and add its bias."""
    threads = torch.get_num_threads()
    least = LARGE_OF_MANY if threads == 1 else LARGE_IN_THREADS * threads
    if prefers_onednn() and is_large(a[0], b, least if a.stride(-1) == 1 else 2 * least):
        biases = (None,) * len(a) if bias is None else bias.unbind()
        each = zip(a.unbind(), b.unbind(), biases, strict=True)
        return torch.stack([onednn_product(*one) for one in each])
    return a.bmm(b) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, b)


# --- attention ---


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend to all, where torch looks for words that attend to none, as a mask may say."""
    masked = attn_mask is not None or is_causal
    exact = query.dtype in (torch.float32, torch.float64)
    if masked or dropout_p or enable_gqa or not exact or query.device.type != "cpu":
        return NotImplemented
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    return scores.softmax(-1) @ value


# --- pooling ---


def _max_pool2d(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Without a rule, `vmap` would merge clients into the batch, and copy channels-last memory.
    settings = pooling_settings(*args, **kwargs)
    if settings is None or input.ndim not in (3, 4) or input.device.type != "cpu":
        return NotImplemented
    return beneath_vmap(_poolings, input, *settings)


def _poolings(clients: int, dims: Sequence[Any], x: Tensor, *settings: Any) -> tuple[Tensor, int]:
    """Pool all clients' channels at once where they are last in memory."""
    dim = dims[0]
    if dim == 1 and x.ndim == 5:
        merged = x.flatten(1, 2)  # a view of what a convolution of all clients returns
        if merged.is_contiguous(memory_format=torch.channels_last):
            return F.max_pool2d(merged, *settings).unflatten(1, x.shape[1:3]), 1
    if settings == HALVING and x.is_floating_point() and min(x.shape[-2:]) >= 2:
        last = dim >= x.ndim - 2
        x = x.movedim(dim, 0) if last else x
        return MaxPool2x2.apply(x), 0 if last else dim
    x = _rows(x, dim, clients)
    out = F.max_pool2d(x.flatten(0, 1), *settings)
    return out.unflatten(0, x.shape[:2]), 0


def _adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Any:
    """Take means of whole pictures.

    torch then gives channels-last pictures other strides in place, for which there is no batching
    rule.
    """
    return input.mean((-2, -1), keepdim=True) if pair(output_size) == (1, 1) else NotImplemented


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


# --- losses of classes ---


def _loss_of_classes(
    loss: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float | None = None,
) -> Any:
    """Compute a loss of indices of classes, without torch's batching rule of many operators."""
    usual = weight is size_average is reduce is None and reduction in ("none", "mean", "sum")
    usual &= input.ndim == 2 and target.ndim == 1 and not target.is_floating_point()
    # Mixed precision casts inside of torch's operators.
    if not usual or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    if label_smoothing:
        loss = partial(loss, label_smoothing=label_smoothing)
    return beneath_vmap(_losses, input, target, loss, ignore_index, reduction)


def _losses(
    clients: int,
    dims: Sequence[int | None],
    x: Tensor,
    target: Tensor,
    loss: Callable[..., Tensor],
    ignored: int,
    reduction: str,
) -> tuple[Tensor, int]:
    """Compute the losses of all clients' samples at once."""
    x, target = _rows(x, dims[0], clients), _rows(target, dims[1], clients)
    each = loss(x.flatten(0, 1), target.flatten(), ignore_index=ignored, reduction="none")
    each = each.view(target.shape)
    if reduction == "none":
        return each, 0
    total = each.sum(1)
    return total if reduction == "sum" else total / target.ne(ignored).sum(1), 0


_KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.batch_norm: _batch_norm,
    F.conv2d: _conv2d,
    F.cross_entropy: partial(_loss_of_classes, F.cross_entropy),
    F.embedding: _embedding,
    F.linear: _linear,
    F.max_pool2d: _max_pool2d,
    F.nll_loss: partial(_loss_of_classes, F.nll_loss),
    F.one_hot: one_hot,
    F.scaled_dot_product_attention: _attention,
}
