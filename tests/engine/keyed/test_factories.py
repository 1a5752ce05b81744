"""Under a key, torch's random functions take the arguments that torch takes and mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pfl.core.randomness import derive
from lightning_pfl.engine.keyed.mode import KeyedRandomness

N = 20_000


def draw(function: Callable[[], Any], client: int = 0) -> Any:
    with KeyedRandomness(torch.tensor(derive(0, "random", client))):
        return function()


FORMS: dict[str, Callable[[], Tensor]] = {
    "rand size": lambda: torch.rand(size=(40, 50)),
    "rand list": lambda: torch.rand([40, 50], dtype=torch.float64),
    "rand numpy": lambda: torch.rand(np.int64(40), np.int32(50)),
    "rand grad": lambda: torch.rand(40, requires_grad=True),
    "rand scalar": lambda: torch.rand(()),
    "rand generator": lambda: torch.rand((40,), generator=torch.Generator()),
    "randn size": lambda: torch.randn(size=torch.Size([40, 50]), dtype=torch.float16),
    "randn complex": lambda: torch.randn(40, dtype=torch.complex64),
    "rand_like": lambda: torch.rand_like(torch.ones(4), dtype=torch.float64, requires_grad=True),
    "randn_like": lambda: torch.randn_like(torch.ones(4), memory_format=torch.preserve_format),
    "randint": lambda: torch.randint(5, high=9, size=(40,)),
    "randint size": lambda: torch.randint(9, size=(40, 2), dtype=torch.int32),
    "randint numpy": lambda: torch.randint(np.int64(5), (3,)),
    "randint tensor": lambda: torch.randint(0, torch.tensor(5), (3,)),  # type: ignore[call-overload]
    "randint float": lambda: torch.randint(2, 5, (3,), dtype=torch.float32, requires_grad=True),
    "randperm": lambda: torch.randperm(int(torch.tensor(9)), dtype=torch.int32),
    "randperm numpy": lambda: torch.randperm(np.int64(9)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_shape_type_and_gradient_are_those_of_torch(form: Callable[[], Tensor]) -> None:
    got, native = draw(form), form()
    assert (got.shape, got.dtype) == (native.shape, native.dtype)
    assert got.requires_grad == native.requires_grad
    if got.numel() > 20:
        assert not torch.equal(got, draw(form, client=1))


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda: torch.randint(5, high=9, size=(1000,)), range(5, 9)),
        (lambda: torch.randint(low=5, high=9, size=(1000,)), range(5, 9)),
        (lambda: torch.randint(-3, 1, size=(1000,)), range(-3, 1)),
        (lambda: torch.randint(high=3, size=(1000,)), range(3)),
        (lambda: torch.randint(2**60, 2**60 + 2, (1000,)), range(2**60, 2**60 + 2)),
    ],
)
def test_randint_draws_from_low_to_below_high(function: Any, values: range) -> None:
    assert set(draw(function).tolist()) == set(values)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: torch.rand(),
        lambda: torch.rand(2.5),  # type: ignore[call-overload]
        lambda: torch.rand(-1),
        lambda: torch.randn(3, dtype=torch.int64),
        lambda: torch.randint(3, 3, (1,)),
        lambda: F.dropout(torch.ones(3), 2.0),
        lambda: F.dropout(torch.ones(3), -0.5, training=False),
        lambda: F.dropout2d(torch.ones(1, 3, 2, 2), 1.5),
    ],
)
def test_what_torch_refuses_is_refused(wrong: Callable[[], Tensor]) -> None:
    errors = (TypeError, RuntimeError, ValueError)
    with pytest.raises(errors):
        wrong()
    with pytest.raises(errors):
        draw(wrong)


def test_wrong_ranges_are_named() -> None:
    with pytest.raises(ValueError, match=r"Expected `low` of torch.randint to be below `high`"):
        draw(lambda: torch.randint(4, 3, (1,)))
    with pytest.raises(ValueError, match=r"`p` to be between 0 and 1, but got p=2.0"):
        draw(lambda: F.dropout(torch.ones(3), 2.0))


@pytest.mark.parametrize(
    "fill",
    [
        lambda out: torch.rand(7, out=out),
        lambda out: torch.randn(size=(7,), out=out),
        lambda out: torch.randint(1, 9, (7,), out=out),
        lambda out: torch.randperm(7, out=out),
        lambda out: torch.bernoulli(torch.full((7,), 0.5), out=out),
    ],
)
@pytest.mark.parametrize("size", [7, 0])
def test_a_given_tensor_is_filled(fill: Callable[[Tensor], Tensor], size: int) -> None:
    out = torch.full((size,), -99.0, dtype=torch.float64)
    result = draw(lambda: fill(out))
    assert result is out
    assert out.shape == (7,)
    assert -99.0 not in out.tolist()


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float16, 11), (torch.bfloat16, 8), (torch.float32, 24)]
)
def test_one_is_never_drawn(dtype: torch.dtype, digits: int) -> None:
    """200,000 numbers of 11 bits that round to nearest would give 1 some fifty times."""
    u = draw(lambda: torch.rand(200_000, dtype=dtype)).double()
    assert u.max() < 1
    scaled = u * 2**digits
    assert torch.equal(scaled, scaled.round())
    assert abs(u.mean() - (0.5 - 2.0 ** -(digits + 1))) < 5 * (1 / 12 / 200_000) ** 0.5


def test_a_rate_is_not_rounded_to_the_type() -> None:
    """Of 8 bits, 0.1 could only become 26/256 = 0.1016, seven standard deviations away."""
    n, p = 1_000_000, 0.1
    kept = draw(lambda: F.dropout(torch.ones(n, dtype=torch.bfloat16), p)) != 0
    assert abs(kept.double().mean() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5


def test_complex_numbers_have_variance_one() -> None:
    z = draw(lambda: torch.randn(N, dtype=torch.complex128))
    # |z|^2 is exponential: mean 1, variance 1.
    assert abs(z.abs().square().mean() - 1) < 5 / N**0.5
    assert abs((z.real * z.imag).mean()) < 5 * 0.5 / N**0.5
    u = draw(lambda: torch.rand(N, dtype=torch.complex128))
    assert abs(u.imag.mean() - 0.5) < 5 * (1 / 12 / N) ** 0.5


@pytest.mark.parametrize(
    "drop", [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d], ids=["0d", "1d", "2d", "3d"]
)
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropout_in_place_changes_its_input(drop: Callable[..., Tensor], p: float) -> None:
    x = torch.arange(1.0, 1 + 8 * 6 * 4).view(8, 6, 4)
    x = x[..., None, None] if drop is F.dropout3d else x
    expected = draw(lambda: drop(x, p))
    given = x.clone()
    assert draw(lambda: drop(given, p, inplace=True)) is given
    assert torch.equal(given, expected)
    assert not torch.equal(given, x)


@pytest.mark.filterwarnings("ignore:dropout2d")
def test_three_axes_in_dropout2d_are_samples_channels_and_length() -> None:
    """As torch says in its warning: each (sample, channel) is dropped on its own."""
    out = draw(lambda: F.dropout2d(torch.ones(20, 30, 4), 0.5))
    assert (out == out[..., :1]).all()
    assert {tuple(row) for row in out[:, :, 0].tolist()} != {(0.0,) * 30, (2.0,) * 30}
    assert abs((out[..., 0] > 0).double().mean() - 0.5) < 5 * 0.5 / 600**0.5
    assert (out[:, :, 0] != out[:, :1, 0]).any()
