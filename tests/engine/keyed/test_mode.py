"""Keyed randomness: a function of (key, call, element), with the distributions of the functions
that it stands in for.

Bounds of statistical tests: a mean of n draws with standard deviation s is off by more than 5 s /
sqrt(n) once in a million; keys are fixed, so a test that passes keeps passing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.core.draws import mix, uniform
from lightning_pfl.core.randomness import derive
from lightning_pfl.engine.keyed.mode import KeyedRandomness

N = 20_000


def key(client: int = 0, round: int = 0) -> Tensor:
    return torch.tensor(derive(0, "random", round, client))


def draw(function: Callable[[], Tensor], client: int = 0) -> Tensor:
    with KeyedRandomness(key(client)):
        return function()


def splitmix64(x: int) -> int:
    """The finaliser as Steele, Lea and Flood (2014) print it, in Python's unbounded integers."""
    word = (1 << 64) - 1
    x &= word
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    inputs = [0, 1, -1, 2**62, -(2**63), 2**63 - 1, 123456789, derive(0, "x")]
    assert mix(torch.tensor(inputs)).tolist() == [splitmix64(x) for x in inputs]


class TestUniform:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_range_and_type(self, dtype: torch.dtype) -> None:
        u = uniform(key(), 0, (100, 10), dtype)
        assert u.dtype == dtype
        assert u.shape == (100, 10)
        assert u.min() >= 0
        assert u.max() <= 1
        if dtype != torch.bfloat16:  # 8 bits round up to 1
            assert u.max() < 1

    def test_moments(self) -> None:
        u = uniform(key(), 0, (N,), torch.float64)
        assert abs(u.mean() - 0.5) < 5 * (1 / 12) ** 0.5 / N**0.5
        # (u - 1/2)^2 has mean 1/12 and variance 1/80 - 1/144 = 1/180
        assert abs((u - 0.5).square().mean() - 1 / 12) < 5 * (1 / 180) ** 0.5 / N**0.5

    def test_cells_are_filled_equally(self) -> None:
        counts = torch.histc(uniform(key(), 3, (N,), torch.float64), 50, 0, 1)
        chi2 = ((counts - N / 50) ** 2 / (N / 50)).sum()
        assert abs(chi2 - 49) < 5 * (2 * 49) ** 0.5

    @pytest.mark.parametrize(
        "other", [(key(1), 0), (key(0, 1), 0), (key(), 1)], ids=["client", "round", "call"]
    )
    def test_streams_are_uncorrelated(self, other: tuple[Tensor, int]) -> None:
        a, b = uniform(key(), 0, (N,), torch.float64), uniform(*other, (N,), torch.float64)
        assert (a == b).sum() < 3
        correlation = ((a - 0.5) * (b - 0.5)).mean() * 12
        assert abs(correlation) < 5 / N**0.5
        shifted = ((a[1:] - 0.5) * (b[:-1] - 0.5)).mean() * 12
        assert abs(shifted) < 5 / N**0.5

    def test_scalars(self) -> None:
        assert uniform(key(), 0, (), torch.float64).shape == ()


FUNCTIONS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(N), 0.5, 1 / 12),
    "rand of two axes": (lambda: torch.rand(N // 2, 2, dtype=torch.float64), 0.5, 1 / 12),
    "rand of a size": (lambda: torch.rand(torch.Size([N])), 0.5, 1 / 12),
    "rand_like": (lambda: torch.rand_like(torch.empty(N)), 0.5, 1 / 12),
    "randn": (lambda: torch.randn(N), 0.0, 1.0),
    "randn of a tuple": (lambda: torch.randn((N,)), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(torch.empty(N)), 0.0, 1.0),
    "randint": (lambda: torch.randint(3, 7, (N,)).double(), 4.5, 15 / 12),
    "randint from 0": (lambda: torch.randint(6, (N,)).double(), 2.5, 35 / 12),
    "randint by name": (lambda: torch.randint(low=0, high=6, size=(N,)).double(), 2.5, 35 / 12),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), 0.3, 0.21),
    "method bernoulli": (lambda: torch.full((N,), 0.3).bernoulli(), 0.3, 0.21),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), 0.3, 0.21),
    "uniform_": (lambda: torch.empty(N).uniform_(-2, 4), 1.0, 36 / 12),
    "normal_": (lambda: torch.empty(N).normal_(2.0, 3.0), 2.0, 9.0),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1.0, 0.2 / 0.8),
    "torch.dropout": (lambda: torch.dropout(torch.ones(N), 0.2, True), 1.0, 0.2 / 0.8),
    "nn.Dropout": (lambda: nn.Dropout(0.2)(torch.ones(N)), 1.0, 0.2 / 0.8),
    "nn.Dropout in place": (lambda: nn.Dropout(0.2, inplace=True)(torch.ones(N)), 1.0, 0.2 / 0.8),
    "nn.Dropout2d": (lambda: nn.Dropout2d(0.2)(torch.ones(N, 1, 1, 1)), 1.0, 0.2 / 0.8),
}


@pytest.mark.parametrize("name", FUNCTIONS)
class TestFunctions:
    def test_mean_and_variance(self, name: str) -> None:
        function, mean, variance = FUNCTIONS[name]
        values = draw(function).double().flatten()
        assert abs(values.mean() - mean) < 5 * (variance / N) ** 0.5
        # The variance of (x - mean)^2 is at most 8 variance^2 for all distributions above (kurtosis
        # <= 9).
        assert abs((values - mean).square().mean() - variance) < 5 * (8 * variance**2 / N) ** 0.5

    def test_shape_and_type_are_those_of_torch(self, name: str) -> None:
        function = FUNCTIONS[name][0]
        assert draw(function).shape == function().shape
        assert draw(function).dtype == function().dtype

    def test_a_function_of_the_key_alone(self, name: str) -> None:
        function = FUNCTIONS[name][0]
        first = draw(function)
        torch.manual_seed(77)
        assert torch.equal(draw(function), first)
        assert not torch.equal(draw(function, client=1), first)
        before = torch.get_rng_state()
        draw(function)
        assert torch.equal(torch.get_rng_state(), before)


def test_one_call_after_another_draws_new_numbers() -> None:
    with KeyedRandomness(key()) as mode:
        assert not torch.equal(torch.rand(5), torch.rand(5))
        assert mode.calls == 2


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5).eval(),
        nn.Dropout(0.0),
        nn.ReLU(),
        nn.Linear(3, 3),
        nn.MultiheadAttention(3, 1),
    ],
)
def test_deterministic_layers_make_no_calls(layer: nn.Module) -> None:
    x = torch.randn(2, 3)
    with KeyedRandomness(key()) as mode:
        _ = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
    assert mode.calls == 0


def test_randperm_is_a_permutation() -> None:
    order = draw(lambda: torch.randperm(50))
    assert sorted(order.tolist()) == list(range(50))
    assert not torch.equal(order, draw(lambda: torch.randperm(50), client=1))


def test_channel_dropout_drops_whole_channels() -> None:
    out = draw(lambda: F.dropout2d(torch.ones(20, 30, 4, 4), 0.5))
    per_channel = out.flatten(2)
    assert ((per_channel == per_channel[..., :1]).all(2)).all()
    assert {0.0, 2.0} == set(per_channel[..., 0].flatten().tolist())


def test_everything_dropped() -> None:
    assert draw(lambda: F.dropout(torch.ones(5), 1.0)).tolist() == [0.0] * 5


class TestAttention:
    def test_the_arithmetic_is_that_of_torch(self) -> None:
        """A dropout rate so small that nothing is dropped takes the path with dropout, and must
        give plain attention."""
        query, memory, value = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
        bias = torch.randn(6, 6, dtype=torch.float64)
        for causal, mask in ((False, None), (True, None), (False, bias), (False, bias > -1)):

            def attend(causal: bool = causal, mask: Tensor | None = mask) -> Tensor:
                return F.scaled_dot_product_attention(query, memory, value, mask, 1e-12, causal)

            with KeyedRandomness(key()) as mode:
                got = attend()
            assert mode.calls == 1
            torch.testing.assert_close(got, attend(), rtol=1e-9, atol=1e-9)

    def test_grouped_queries(self) -> None:
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64)
        memory, value = torch.randn(2, 2, 2, 6, 8, generator=generator, dtype=torch.float64)

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(
                query, memory, value, dropout_p=1e-12, enable_gqa=True
            )

        torch.testing.assert_close(draw(attend), attend(), rtol=1e-9, atol=1e-9)

    def test_weights_are_dropped_at_the_rate(self) -> None:
        """Uniform attention over one-hot values: an output entry is the weight 1/L, dropped or
        scaled."""
        length, p = 120, 0.25
        query = torch.zeros(1, length, 4, dtype=torch.float64)
        value = torch.eye(length, dtype=torch.float64)[None]
        out = (
            draw(lambda: F.scaled_dot_product_attention(query, query, value, dropout_p=p)) * length
        )
        kept = out > 0
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
        assert abs(kept.double().mean() - (1 - p)) < 5 * (p * (1 - p)) ** 0.5 / length

    def test_multi_head_attention_with_dropout_is_keyed(self) -> None:
        layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        x = torch.randn(3, 5, 8)
        outputs = []
        for client in (0, 0, 1):
            for need_weights in (False, True):
                with KeyedRandomness(key(client)) as mode:
                    outputs.append(layer(x, x, x, need_weights=need_weights)[0])
                assert mode.calls == 1
        assert torch.equal(outputs[0], outputs[2])
        assert torch.equal(outputs[1], outputs[3])
        assert not torch.equal(outputs[0], outputs[4])
        assert F.dropout.__module__ == "torch.nn.functional"
        assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_masks_under_vmap_are_those_of_each_client() -> None:
    keys = torch.stack([key(client) for client in range(3)])

    def drop(one: Tensor) -> Tensor:
        with KeyedRandomness(one):
            return F.dropout(torch.ones(7, 2), 0.4)

    together = torch.vmap(drop)(keys)
    assert torch.equal(together, torch.stack([drop(one) for one in keys]))
