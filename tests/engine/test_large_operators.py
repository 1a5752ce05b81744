"""The kernels for one client give what torch's own give: values, gradients and, mostly, bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_pfl.engine import large_operators
from lightning_pfl.engine.large_operators import LargeOperators, LargePooling, LargeProducts
from lightning_pfl.engine.operators import has_onednn
from lightning_pfl.engine.pooling import MaxPool2x2
from lightning_pfl.engine.recording import Recorder


def layer_and_gradients(tensors: Sequence[Tensor], bias: bool) -> list[Tensor]:
    """Output of a linear layer, and gradients of its square."""
    leaves = [leaf.clone().requires_grad_() for leaf in tensors]
    out = F.linear(leaves[0], leaves[1], leaves[2] if bias else None)
    grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


ONEDNN = "mkldnn._linear_pointwise.default"


def work_on(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that the processor has these instructions."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)


@pytest.mark.parametrize(
    ("processor", "enabled", "prefers"),
    [("AVX512", True, True), ("AVX512", False, False), ("AVX2", True, False), ("SVE", True, False)],
)
@pytest.mark.skipif(not has_onednn(), reason="torch has no oneDNN for this processor")
def test_onednn_multiplies_where_it_has_instructions_that_blas_leaves_unused(
    processor: str, enabled: bool, prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_on(processor, monkeypatch)
    monkeypatch.setattr("lightning_pfl.engine.operators.has_onednn", lambda: enabled)
    x, w, b = torch.randn(128, 256), torch.randn(64, 256), torch.randn(64)
    assert x.numel() * len(w) > large_operators.LARGE
    with (
        (calls := Recorder([])),
        LargeProducts(),
        torch.no_grad(),
    ):
        F.linear(x, w, b)
        x.mm(w.t())
    found = [str(call.operator) == ONEDNN for call in calls.calls].count(True)
    assert found == (2 if prefers else 0)


@pytest.mark.parametrize("processor", ["AVX512", "AVX2"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(128,), (4, 32)])
def test_large_products_are_those_of_the_layer(
    shape: tuple[int, ...], bias: bool, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_on(processor, monkeypatch)
    torch.manual_seed(0)
    tensors = torch.randn(*shape, 256), torch.randn(64, 256) / 16, torch.randn(64)
    assert math.prod(shape) * 256 * 64 > large_operators.LARGE > 64 * 256 * 64
    with LargeProducts():
        found = layer_and_gradients(tensors, bias)
    want = layer_and_gradients([leaf.double() for leaf in tensors], bias)
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("processor", "product"), [("AVX512", ONEDNN), ("AVX2", "aten.mm.default")]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.skipif(not has_onednn(), reason="torch has no oneDNN for this processor")
@torch.no_grad()
def test_a_layer_on_samples_that_do_not_lie_one_after_another(
    bias: bool, processor: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch multiplies each by a copy of the weights; one product of all is as near to the sums."""
    work_on(processor, monkeypatch)
    torch.manual_seed(0)
    x, w, b = torch.randn(32, 4, 256), torch.randn(64, 256) / 16, torch.randn(64)

    def layer(dtype: torch.dtype) -> Tensor:
        given = x.to(dtype).transpose(0, 1), w.to(dtype), b.to(dtype)
        return F.linear(given[0], given[1], given[2] if bias else None)

    with (calls := Recorder([])), LargeProducts():
        found = layer(torch.float32)
    torch.testing.assert_close(found.double(), layer(torch.float64), rtol=1e-5, atol=1e-4)
    assert found.stride() == layer(torch.float32).stride()
    names = [str(call.operator) for call in calls.calls]
    assert product in names
    assert "aten.bmm.default" not in names


@torch.no_grad()
def test_products_with_matrices_of_their_own_are_torchs() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 32, 256), torch.randn(4, 256, 64)
    with LargeProducts():
        found = a @ b, a @ b[:1].expand(4, -1, -1)[:, :, :32]  # the other one is small
    assert torch.equal(found[0], a @ b)
    assert torch.equal(found[1], a @ b[:1].expand(4, -1, -1)[:, :, :32])


@pytest.mark.parametrize(("rows", "dtype"), [(64, torch.float32), (128, torch.float64)])
def test_other_products_are_torchs(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=dtype) for shape in ((rows, 256), (64, 256), (64,))]
    with LargeProducts():
        found = layer_and_gradients(tensors, True)
    assert all(map(torch.equal, found, layer_and_gradients(tensors, True)))


# --- which operators are looked at ---


class Attention(nn.Module):
    """Attention, whose products are within one function, and a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(64, 4, batch_first=True)
        self.w = nn.Parameter(torch.randn(64, 5) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), -1, 64)
        mixed: Tensor = self.mixed(x, x, x)[0]
        return torch.cat([mixed.relu() @ self.w, x[..., :5]], 1).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(64, 96, batch_first=True), nn.Linear(96, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x.view(len(x), -1, 64))[0][:, -1])
        return out


class OwnGradient(torch.autograd.Function):
    """A product whose gradient is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class OfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(256, 128) / 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = OwnGradient.apply(x, self.w)
        return out


def dense(*sizes: int) -> nn.Module:
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def pictures() -> nn.Module:
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 16, 16)), *layers, nn.Flatten(), nn.Linear(200, 5))


STEPS: dict[str, Callable[[], nn.Module]] = {
    "narrow": lambda: dense(256, 16, 5),
    "wide": lambda: dense(256, 200, 5),
    "the last layer": lambda: dense(256, 16, 1024),
    "attention": Attention,
    "LSTM": Recurrent,
    "own gradient": OfItsOwn,
    "pictures": pictures,
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_steps_have_the_bits_of_looking_at_every_operator(
    make: Callable[[], nn.Module], last: bool
) -> None:
    """In steps with a branch and a mask, which aren't replayed."""
    torch.manual_seed(0)
    network, x, y = make(), torch.randn(100, 256), torch.randint(5, (100,))

    def step(*modes: Any) -> tuple[Tensor, ...]:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            losses = F.cross_entropy(network(x), y, reduction="none")
            kept = losses[losses > losses.median()]
            loss = kept.mean() if kept.mean() > 0 else kept.sum()
            loss.backward()
        leaves = [leaf.grad for leaf in network.parameters() if leaf.grad is not None]
        network.zero_grad()
        return loss.detach(), *leaves

    found, want = step(LargeOperators(last)), step(LargePooling(), LargeProducts(last))
    assert len(found) == len(want) > 1
    assert all(map(torch.equal, found, want))


def test_operators_of_small_steps_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Mock(side_effect=lambda self, func, types, args=(), kwargs=None: func(*args, **kwargs))
    monkeypatch.setattr(LargeProducts, "__torch_dispatch__", lambda *args: seen(*args))
    for hidden, looks in ((16, False), (200, True)):
        network, x, y = dense(256, hidden, 5), torch.randn(100, 256), torch.arange(100) % 5
        with LargeOperators():
            F.cross_entropy(network(x), y).backward()
        assert bool(seen.call_count) is looks


# --- large pictures of one client ---


def pooled(x: Tensor, *, fast: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Windows' maxima and the gradient of a weighted sum of them."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with LargeOperators() if fast else nullcontext():
        out = F.max_pool2d(x, **{"kernel_size": 2, **options})
    weights = torch.arange(1.0, 1 + out.numel(), dtype=out.dtype).view(out.shape)
    out.backward(weights)
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("shape", [(2, 3, 6, 8), (2, 3, 7, 5), (3, 4, 4), (1, 1, 2, 2)])
@pytest.mark.parametrize("stride", [None, 2, (2, 2)])
def test_large_windows_have_torchs_maxima_and_gradients(
    shape: tuple[int, ...], stride: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal maxima, as after a ReLU, the first gets the gradient; NaN is the largest."""
    monkeypatch.setattr(large_operators, "POOLED", 1)
    x = torch.randn(shape).relu()
    monkeypatch.setattr(MaxPool2x2, "apply", spy := Mock(wraps=MaxPool2x2.apply))
    (out, grad), (expected, its) = (pooled(x, fast=fast, stride=stride) for fast in (True, False))
    assert spy.call_count == 1
    assert torch.equal(out, expected)
    assert torch.equal(grad, its)
    assert out.stride() == expected.stride()
    x.view(-1)[1] = torch.nan
    (out, _), (expected, _) = (pooled(x, fast=fast, stride=stride) for fast in (True, False))
    assert torch.allclose(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 3, 6, 8), (2, 3, 7, 5)])
def test_gradients_of_gradients_of_large_windows(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a penalty on a gradient needs them; and those with a graph are those without."""
    monkeypatch.setattr(large_operators, "POOLED", 1)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def second(fast: bool) -> tuple[Tensor, Tensor]:
        with LargePooling() if fast else nullcontext():
            loss = F.max_pool2d(x, 2).pow(3).sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            return grad.detach(), torch.autograd.grad(grad.square().sum(), x)[0]

    for found, expected in zip(second(True), second(False), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12)


def tangent_by_hand(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found: Tensor = forward_ad.unpack_dual(function(dual)).tangent
        return found


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda one: f(one).square().sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        lambda f, x: torch.vmap(f)(torch.stack([x, 2 * x])),
        tangent_by_hand,
    ],
    ids=["grad", "jvp", "vmap", "dual numbers"],
)
def test_large_windows_in_transforms(transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_operators, "POOLED", 1)
    x = torch.randn(2, 3, 6, 8)
    expected = transform(lambda one: F.max_pool2d(one, 2), x)
    with LargePooling():
        found = transform(lambda one: F.max_pool2d(one, 2), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (torch.randn(1, 1, 4, 4), {"kernel_size": 3}),
        (torch.randn(1, 1, 4, 4), {"stride": 1}),
        (torch.randn(1, 1, 4, 4), {"padding": 1}),
        (torch.randn(1, 1, 4, 4), {"dilation": 2}),
        (torch.randn(1, 1, 5, 5), {"ceil_mode": True}),
        (torch.randn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last), {}),
    ],
)
def test_other_windows_are_torchs(
    x: Tensor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_operators, "POOLED", 1)
    monkeypatch.setattr(MaxPool2x2, "apply", Mock(side_effect=AssertionError))
    for a, b in zip(*(pooled(x, fast=fast, **options) for fast in (True, False)), strict=True):
        assert torch.equal(a, b)


def test_pictures_with_too_many_axes_are_refused_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large_operators, "POOLED", 1)
    with LargeOperators(), pytest.raises(RuntimeError, match="3D or 4D"):
        F.max_pool2d(torch.randn(1, 1, 1, 4, 4), 2)


def test_small_windows_and_those_with_positions_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 1, 4, 4)
    monkeypatch.setattr(MaxPool2x2, "apply", Mock(side_effect=AssertionError))
    with LargeOperators():
        F.max_pool2d(x, 2)
    monkeypatch.setattr(large_operators, "POOLED", 1)
    with LargeOperators():
        _, positions = F.max_pool2d(x, 2, return_indices=True)
    assert torch.equal(positions, F.max_pool2d(x, 2, return_indices=True)[1])
