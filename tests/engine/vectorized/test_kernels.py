"""The kernels for a CPU give what torch's own give each client alone: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pfl.engine.operators import has_onednn, onednn_product
from lightning_pfl.engine.program import batchable_kernels
from lightning_pfl.engine.vectorized import kernels
from lightning_pfl.engine.vectorized.kernels import FastKernels

CLIENTS = 3
Dims = tuple[int | None, ...]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check(
    function: Callable[..., Tensor], tensors: list[Tensor], dims: Dims, tolerance: float = 1e-12
) -> None:
    """A weighted sum of the outputs and its gradients, under ``vmap`` and client by client."""

    def fast(*args: Tensor) -> Tensor:
        with FastKernels():
            return function(*args)

    def alone(*args: Tensor) -> Tensor:
        def of(k: int) -> list[Tensor]:
            pairs = zip(args, dims, strict=True)
            return [arg if dim is None else arg.select(dim, k) for arg, dim in pairs]

        return torch.stack([function(*of(k)) for k in range(CLIENTS)])

    results = []
    for run in (torch.vmap(fast, in_dims=dims), alone):
        leaves = [tensor.clone() for tensor in tensors]
        numbers = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        out = run(*leaves)
        shares = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        grads = torch.autograd.grad((out * shares).sum(), numbers)
        results.append((out.detach(), *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2},
    "pairs": {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    "all at once": {"stride": 2, "padding": 2, "dilation": 2},
    "padding by name": {"padding": "same"},
    "groups": {"groups": 2},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", ["nothing", "weights", "samples"])
@pytest.mark.parametrize("settings", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(settings: dict[str, Any], shared: str, bias: bool) -> None:
    x, w, b = (2, 4, 7, 6), (6, 4 // settings.get("groups", 1), 3, 2), (6,)
    x_dim, w_dim = None if shared == "samples" else 0, None if shared == "weights" else 0
    shapes = [(x, x_dim), (w, w_dim), (b, w_dim)][: 3 if bias else 2]
    tensors = [draw(*(() if dim is None else (CLIENTS,)), *shape) for shape, dim in shapes]
    dims = tuple(dim for _, dim in shapes)
    check(lambda *args: F.conv2d(*args, **settings), tensors, dims)


@pytest.mark.parametrize("dims", [(1, 0, 0), (0, 1, 0), (2, 3, 1), (0, 0, None), (0, None, 0)])
def test_the_clients_of_a_convolution_may_be_on_any_axis(dims: Dims) -> None:
    shapes: list[list[int]] = [[2, 4, 7, 6], [6, 4, 3, 2], [6]]
    for shape, dim in zip(shapes, dims, strict=True):
        if dim is not None:
            shape.insert(dim, CLIENTS)
    check(F.conv2d, [draw(*shape) for shape in shapes], dims)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)])
@pytest.mark.parametrize(
    "dims", [(0, 0, 0), (1, 2, 1), (0, None, None), (None, 0, 0), (0, 1, None)]
)
def test_linear_layers(dims: Dims, shape: tuple[int, ...], bias: bool) -> None:
    shapes: list[list[int]] = [[*shape], [6, 4], [6]]
    for shape_, dim in zip(shapes, dims, strict=True):
        if dim is not None:
            shape_.insert(dim, CLIENTS)
    count = 3 if bias else 2
    check(F.linear, [draw(*shape_) for shape_ in shapes[:count]], dims[:count])


def test_the_gradient_of_linear_weights_has_their_memory_layout() -> None:
    x, w = draw(CLIENTS, 5, 4), draw(CLIENTS, 6, 4).requires_grad_()

    def layer(x: Tensor, w: Tensor) -> Tensor:
        with FastKernels():
            return F.linear(x, w)

    (grad,) = torch.autograd.grad(torch.vmap(layer)(x, w).sum(), w)
    assert grad.stride() == w.stride()


@pytest.mark.parametrize("bias", [(), (1,), (1, 6), (5, 6)])
def test_biases_that_are_not_one_for_each_output(bias: tuple[int, ...]) -> None:
    tensors = [draw(CLIENTS, *shape) for shape in ((5, 4), (6, 4), bias)]
    check(F.linear, tensors, (0, 0, 0))


def test_weights_of_one_output() -> None:
    check(F.linear, [draw(CLIENTS, 5, 4), draw(CLIENTS, 4)], (0, 0))


LAYERS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (5, 4), (6, 4)),
    "convolution": (F.conv2d, (2, 4, 7, 6), (6, 4, 3, 2)),
    "pooling": (lambda x, w: F.max_pool2d(x * w, 2), (2, 4, 6, 6), ()),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_in_other_transforms_are_those_of_each_client(layer: str) -> None:
    """A gradient inside of ``vmap``, a ``vmap`` of a ``vmap``, and none."""
    function, *shapes = LAYERS[layer]
    x, w = (draw(CLIENTS, *shape) for shape in shapes)
    two = torch.stack([x, x.flip(0)])

    def loss(w: Tensor, x: Tensor) -> Tensor:
        with FastKernels():
            return function(x, w).square().sum()

    each = [torch.func.grad(loss)(w[k], x[k]) for k in range(CLIENTS)]
    assert torch.allclose(torch.vmap(torch.func.grad(loss))(w, x), torch.stack(each))
    nested = torch.vmap(torch.vmap(loss), in_dims=(None, 0))(w, two)
    plain = [[function(row[k], w[k]).square().sum() for k in range(CLIENTS)] for row in two]
    assert torch.allclose(nested, torch.tensor(plain, dtype=torch.float64))


@pytest.mark.parametrize(
    ("function", "shapes", "match"),
    [
        (F.conv2d, [(2, 4, 7, 6), (6, 4, 3)], "to match the convolution dimensions"),
        (lambda x: F.max_pool2d(x, 2), [(1, 2, 4, 6, 6)], None),
    ],
    ids=["convolution", "pooling"],
)
def test_tensors_of_other_shapes_are_refused_by_torch(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], match: str | None
) -> None:
    tensors = [draw(CLIENTS, *shape) for shape in shapes]
    with FastKernels(), pytest.raises(RuntimeError, match=match):
        torch.vmap(function)(*tensors)


def test_a_layer_that_fails_leaves_vmap_as_it_was() -> None:
    """The next layer of the same ``vmap`` gives each client's values."""
    x, w = draw(CLIENTS, 5, 4), draw(CLIENTS, 6, 4)

    def layers(x: Tensor, w: Tensor) -> Tensor:
        with FastKernels():
            with pytest.raises(RuntimeError, match="size"):
                F.linear(x, w[:, :3])
            return F.linear(x, w)

    assert torch.allclose(torch.vmap(layers)(x, w), x @ w.mT)


def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that oneDNN will multiply, on a processor that suits it."""
    monkeypatch.setattr(kernels, "prefers_onednn", lambda: True)
    seen: list[tuple[int, ...]] = []

    def watched(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((*a.shape, b.shape[1]))
        return onednn_product(a, b, bias)

    monkeypatch.setattr(kernels, "onednn_product", watched)
    return seen


OF_LAYER = {"outputs": (5, 4, 6), "for inputs": (5, 6, 4), "for weights": (6, 5, 4)}
"""Rows, inner and columns of a layer's products, of 120 multiplications."""


@pytest.mark.skipif(not has_onednn(), reason="torch has no oneDNN for this processor")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("least", "threads", "large"),
    [
        (60, 1, ["outputs", "for inputs", "for weights"]),
        # The gradient of the weights needs a copy, and twice as many multiplications.
        (61, 1, ["outputs", "for inputs"]),
        (120, 1, ["outputs", "for inputs"]),
        (121, 1, []),
        (40, 3, ["outputs", "for inputs"]),
        (41, 3, []),
    ],
)
def test_large_products_of_linear_layers(
    least: int, threads: int, large: list[str], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = "LARGE_OF_MANY" if threads == 1 else "LARGE_IN_THREADS"
    monkeypatch.setattr(kernels, which, least)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seen = products(monkeypatch)
    tensors = [draw(CLIENTS, 5, 4).float(), draw(CLIENTS, 6, 4).float(), draw(CLIENTS, 6).float()]
    check(F.linear, tensors[: 3 if bias else 2], (0, 0, 0)[: 3 if bias else 2], 1e-5)
    assert seen == [OF_LAYER[which] for which in large for _ in range(CLIENTS)]


def test_products_in_double_precision_are_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LARGE_OF_MANY", 1)
    monkeypatch.setattr(kernels, "LARGE_IN_THREADS", 1)
    seen = products(monkeypatch)
    check(F.linear, [draw(CLIENTS, 5, 4), draw(CLIENTS, 6, 4)], (0, 0))
    assert not seen


WIDTH, WORDS, HEADS = 8, 5, 2


def attend(weights: bool, words: Tensor, into: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Run a layer of attention on ``(words, samples, width)``; with weights by other functions."""
    given = WIDTH, HEADS, into, bias, None, None, False, 0.0, out, None
    found, _ = F.multi_head_attention_forward(words, words, words, *given, need_weights=weights)
    return found


def attention(dims: Dims) -> list[Tensor]:
    shapes = (WORDS, 2, WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH)
    pairs = zip(shapes, dims, strict=True)
    return [draw(*(() if dim is None else (CLIENTS,)), *shape) for shape, dim in pairs]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, 0)])
def test_layers_inside_of_attention(
    dims: Dims, weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one for queries, keys and values, and the one for outputs."""
    calls: list[Tensor] = []
    linear = kernels._KERNELS[F.linear]

    def counted(*given: Tensor) -> Any:
        calls.append(given[1])
        return linear(*given)

    monkeypatch.setitem(kernels._KERNELS, F.linear, counted)
    with batchable_kernels("forward"):
        check(partial(attend, weights), attention(dims), dims)
    assert [len(layer) for layer in calls] == [3 * WIDTH, WIDTH]


MASK = torch.tensor([[True, False, True], [True, True, False], [False, False, True]])


@pytest.mark.parametrize(
    "settings", [{}, {"scale": 0.3}, {"is_causal": True}, {"attn_mask": MASK}], ids=str
)
def test_attention_with_its_settings(settings: dict[str, Any]) -> None:
    def attend_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = F.scaled_dot_product_attention(q, k, v, **settings)
        return out

    with batchable_kernels("forward"):
        check(attend_to, [draw(CLIENTS, 2, HEADS, 3, 4) for _ in range(3)], (0, 0, 0))


def test_functions_inside_of_attention_that_a_user_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, dims = F.softmax, (0, 0, 0, 0)
    monkeypatch.setattr(F, "softmax", lambda x, dim: own(3 * x, dim=dim))
    check(partial(attend, True), attention(dims), dims)


def test_one_picture_without_an_axis_for_samples() -> None:
    check(F.conv2d, [draw(CLIENTS, 4, 7, 6), draw(CLIENTS, 6, 4, 3, 2)], (0, 0))
    check(lambda x: F.max_pool2d(x, 2), [draw(CLIENTS, 4, 7, 6)], (0,))


POOLS: dict[str, dict[str, Any]] = {
    "2": {"kernel_size": 2},
    "pair": {"kernel_size": (2, 2), "stride": (2, 2)},
    "overlapping": {"kernel_size": 2, "stride": 1},
    "unequal": {"kernel_size": (2, 1)},
    "3": {"kernel_size": 3},
    "padding": {"kernel_size": 2, "padding": 1},
    "dilation": {"kernel_size": 2, "dilation": 2},
    "ceil": {"kernel_size": 2, "ceil_mode": True},
}


@pytest.mark.parametrize("size", [(6, 4), (7, 5), (5, 6), (4, 3)])
@pytest.mark.parametrize("settings", POOLS.values(), ids=POOLS)
def test_pooling(settings: dict[str, Any], size: tuple[int, int]) -> None:
    check(lambda x: F.max_pool2d(x, **settings), [draw(CLIENTS, 2, 3, *size)], (0,))


@pytest.mark.parametrize("settings", POOLS.values(), ids=POOLS)
def test_pooling_of_what_a_convolution_of_all_clients_returns(settings: dict[str, Any]) -> None:
    def both(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out: Tensor = F.max_pool2d(F.conv2d(x, w, b), **settings)
        return out

    shapes = (2, 3, 7, 6), (4, 3, 3, 2), (4,)
    check(both, [draw(CLIENTS, *shape) for shape in shapes], (0, 0, 0))


@pytest.mark.parametrize("dim", range(5))
def test_the_clients_of_a_pooling_may_be_on_any_axis(dim: int) -> None:
    shape = [2, 4, 7, 6]
    shape.insert(dim, CLIENTS)
    check(lambda x: F.max_pool2d(x, 2), [draw(*shape)], (dim,))


def test_of_equal_maxima_the_first_has_the_gradient() -> None:
    """Of whole numbers from 0 to 1, most windows have several maxima; so has every ReLU of 0."""
    x = torch.randint(2, (CLIENTS, 5, 3, 8, 8)).double()
    check(lambda x: F.max_pool2d(x, 2), [x], (0,))


@pytest.mark.parametrize(
    ("convolved", "expected"), [(True, ["GroupedConvolution"]), (False, ["MaxPool2x2"])]
)
def test_the_kernels_are_the_ones_that_run(
    monkeypatch: pytest.MonkeyPatch, convolved: bool, expected: list[str]
) -> None:
    """Torch's own pooling runs where channels are last, as behind a convolution."""
    calls: list[str] = []

    def counted(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(name)
            return apply(*args)

        return run

    for name in ("GroupedConvolution", "MaxPool2x2"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernel, "apply", counted(name, kernel.apply))
    x, w, b = draw(CLIENTS, 2, 1, 6, 6), draw(CLIENTS, 4, 1, 3, 3), draw(CLIENTS, 4)

    def layers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with FastKernels():
            return F.max_pool2d(F.conv2d(x, w, b) if convolved else x, 2)

    torch.vmap(layers)(x, w, b)
    assert calls == expected


def test_means_of_whole_pictures_that_are_channels_last() -> None:
    """As a grouped convolution of many clients returns them, which torch's own can't take."""
    x, w = draw(CLIENTS, 2, 4, 5, 5), draw(CLIENTS, 6, 4, 3, 3)
    check(lambda x, w: F.adaptive_avg_pool2d(F.conv2d(x, w), 1), [x, w], (0, 0))


@pytest.mark.parametrize("size", [(1, 1), (1, 2)])
def test_means_of_parts_of_pictures(size: tuple[int, int]) -> None:
    check(lambda x: F.adaptive_avg_pool2d(x, size), [draw(CLIENTS, 2, 4, 6, 6)], (0,))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_short_numbers_with_statistics_in_single(training: bool) -> None:
    """As in mixed precision: the same as for each client alone, and the statistics it leaves."""
    x = torch.randn(CLIENTS, 8, 3, 4, 4).bfloat16()
    weight, bias = torch.randn(CLIENTS, 3), torch.randn(CLIENTS, 3)

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = torch.zeros(CLIENTS, 3), torch.ones(CLIENTS, 3)
        return function(mean, var, x, weight, bias), mean, var

    def norm(mean: Tensor, var: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, training, 0.3)

    def alone(*args: Tensor) -> Tensor:
        return torch.stack([norm(*(arg[k] for arg in args)) for k in range(CLIENTS)])

    with FastKernels():
        out, mean, var = run(torch.vmap(norm))
    expected, expected_mean, expected_var = run(alone)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2.0**-7, atol=2.0**-7)
    torch.testing.assert_close(mean, expected_mean)
    torch.testing.assert_close(var, expected_var)


def test_classes_out_of_range_are_refused_as_without_vmap() -> None:
    labels = torch.tensor([[1, 2], [4, 0]])
    with FastKernels():
        found = torch.vmap(lambda y: F.one_hot(y, 5))(labels)
        with pytest.raises(RuntimeError, match=r"index 4 is out of bounds .* with size 4"):
            torch.vmap(lambda y: F.one_hot(y, 4))(labels)
    assert torch.equal(found, F.one_hot(labels, 5))


LOSSES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "mean": (F.cross_entropy, {}),
    "sum": (F.cross_entropy, {"reduction": "sum"}),
    "each": (F.cross_entropy, {"reduction": "none"}),
    "an ignored class": (F.cross_entropy, {"ignore_index": 1}),
    "each but a class": (F.cross_entropy, {"ignore_index": 1, "reduction": "none"}),
    "weights": (F.cross_entropy, {"weight": torch.tensor([1.0, 2.0, 0.0, 0.5]).double()}),
    "smooth labels": (F.cross_entropy, {"label_smoothing": 0.1}),
    "logarithms": (F.nll_loss, {}),
    "logarithms but of a class": (F.nll_loss, {"ignore_index": 1, "reduction": "sum"}),
}


@pytest.mark.parametrize(("loss", "settings"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (2, None), (None, 0)])
def test_losses_of_classes(
    loss: Callable[..., Tensor], settings: dict[str, Any], dims: Dims
) -> None:
    """The last client's labels are all of the class that may be ignored: a mean of nothing."""
    shape, labels = [6, 4], torch.tensor([[1, 3, 0, 1, 1, 2], [2, 2, 0, 3, 2, 0], [1] * 6])
    if dims[0] is not None:
        shape.insert(dims[0], CLIENTS)
    labels = labels[0] if dims[1] is None else labels.movedim(0, dims[1])
    check(lambda x, y: loss(x, y, **settings), [draw(*shape), labels], dims)


@pytest.mark.parametrize("several", [False, True])
def test_losses_of_one_sample_and_of_several_values(several: bool) -> None:
    shape, labels = ((2, 4, 3), (2, 3)) if several else ((4,), ())
    check(F.cross_entropy, [draw(CLIENTS, *shape), torch.randint(4, (CLIENTS, *labels))], (0, 0))


def test_losses_of_probabilities() -> None:
    check(F.cross_entropy, [draw(CLIENTS, 6, 4), draw(CLIENTS, 6, 4).softmax(-1)], (0, 0))


def test_losses_of_classes_are_one_operator() -> None:
    """Of all clients' samples, where torch's rule compares, selects and gathers."""
    names: set[str] = set()

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    notes: Any = Notes
    x, y = draw(CLIENTS, 6, 4).requires_grad_(), torch.randint(4, (CLIENTS, 6))
    with notes(), FastKernels():
        torch.vmap(partial(F.cross_entropy, reduction="none"))(x, y).sum().backward()
    assert {name for name in names if "loss" in name} == {"nll_loss_forward", "nll_loss_backward"}
    assert names.isdisjoint({"ne", "where", "gather", "neg", "scatter_add"})


def test_losses_refuse_classes_out_of_range() -> None:
    with FastKernels(), pytest.raises(IndexError, match="Target 4 is out of bounds"):
        torch.vmap(F.cross_entropy)(draw(CLIENTS, 2, 4), torch.full((CLIENTS, 2), 4))
