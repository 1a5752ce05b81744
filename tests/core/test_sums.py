"""Sums over rows: means that are rounded once, and bits that no order of the rows changes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.core import sums
from tests.core.exact_sums import of_exact_sums

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True, params=[0, sums.FEW], ids=["tried", "exact where small"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try plain means of however small tensors, or not."""
    monkeypatch.setattr(sums, "FEW", request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [15, 3000])
def test_equal_rows_have_exactly_their_own_mean(dtype: torch.dtype, count: int) -> None:
    row = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    for raw in (torch.ones(count), torch.arange(1.0, count + 1)):
        weights = raw.double() / raw.double().sum()
        mean = sums.mean_of_rows(row.expand(count, 3, 2).clone(), weights)
        assert torch.equal(mean, row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("together", [1, 7, 2**22])
def test_means_are_rounded_once(
    dtype: torch.dtype, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One client has a million times the weight of each other.
    monkeypatch.setattr(sums, "DOUBLED", together)
    rows = (1 + torch.randn(200, 5, generator=torch.Generator().manual_seed(0)) / 9).to(dtype)
    raw = [1e6 if k == 3 else 1.0 for k in range(200)]
    weights = torch.tensor(raw, dtype=torch.float64) / math.fsum(raw)
    mean = sums.mean_of_rows(rows, weights)
    for column in range(5):
        exact = [float(w) * float(row[column]) for w, row in zip(weights, rows, strict=True)]
        assert mean[column] == torch.tensor(math.fsum(exact), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("together", [7, 2**18])
def test_sums_have_the_same_bits_in_any_order_and_grouping(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "DOUBLED", together)
    generator = torch.Generator().manual_seed(1)
    spread = torch.logspace(-200, 200, 40, dtype=torch.float64)
    rows = torch.randn(60, 40, generator=generator, dtype=torch.float64) * spread
    rows[:, 7] = 3.0
    weights = torch.rand(60, generator=generator, dtype=torch.float64)
    weights /= weights.sum()
    low, total = sums.sum_above(rows, weights)
    assert torch.equal(low, rows.amin(0))
    assert total[7] == 0
    for column in range(40):
        terms = [
            float(w) * (float(row[column]) - float(low[column]))
            for w, row in zip(weights, rows, strict=True)
        ]
        largest = float(rows[:, column].amax() - low[column])
        error = abs(math.fsum(terms) - float(total[column]))
        assert error <= 60 * math.ulp(2 * largest)
    order = torch.randperm(60, generator=generator)
    assert torch.equal(sums.sum_above(rows[order], weights[order])[1], total)
    within = (rows.amin(0), rows.amax(0))
    for cut in (1, 17, 59):
        parts = [
            sums.sum_above(rows[at], weights[at], within)[1] for at in (order[:cut], order[cut:])
        ]
        assert torch.equal(parts[1] + parts[0], total)
    mean = sums.mean_of_rows(rows, weights)
    again = sums.mean_of_rows(rows[order], weights[order])
    assert torch.equal(mean, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 10, 300])
def test_means_have_the_bits_of_exact_sums(dtype: torch.dtype, count: int) -> None:
    """Also where a mean is halfway between two numbers, which a plain sum may round either way.

    Exact sums have the same bits in any order and grouping, as the test above shows.
    """
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, 4000, generator=generator).to(dtype)
    rows[:, :1000] *= 1e-6  # next to others that are large
    rows[:, 1000:2000] = rows[:1, 1000:2000]
    if count > 1:
        step = torch.finfo(dtype).eps  # between 1 and 2
        rows[:, 2000:3000] = torch.randint(99, (1, 1000), generator=generator) * step + 1
        rows[::2, 2000:3000] += step
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    for each in (torch.full_like(weights, 1 / count), weights / weights.sum()):
        mean = sums.mean_of_rows(rows, each)
        assert torch.equal(mean, of_exact_sums(rows, each))
        order = torch.randperm(count, generator=generator)
        again = sums.mean_of_rows(rows[order].view(count, 40, 100), each[order])
        assert torch.equal(again.flatten(), mean)


@pytest.mark.parametrize("count", [2, 3, 4, 10])
def test_few_columns_need_exact_sums(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those halfway between two numbers, as every fourth one of four clients."""
    rows = 1 + torch.rand(count, 20000, generator=torch.Generator().manual_seed(0))
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    exact: list[int] = []
    really = sums.sum_above

    def counted(leaf: Tensor, *args: Any) -> Any:
        exact.append(leaf.shape[1])
        return really(leaf, *args)

    monkeypatch.setattr(sums, "sum_above", counted)
    mean = sums.mean_of_rows(rows, weights)
    assert exact == []
    # Nearer to halfway, after it is moved, than a sum in double precision may be off.
    weights[:2] = (weights[0] + weights[1]) * torch.tensor(halves(), dtype=torch.float64)
    beside = torch.ones(count, 20000)
    beside[1, 5], beside[2:, 5] = 1 + 2.0**-23, 0
    weights[2:] = 0
    weights /= weights[0] + weights[1]
    found = sums.mean_of_rows(beside, weights)
    assert exact == [1]
    monkeypatch.undo()
    assert torch.equal(mean, of_exact_sums(rows, torch.full((count,), 1 / count).double()))
    assert torch.equal(found, of_exact_sums(beside, weights))


def halves() -> list[float]:
    """Return weights of 1 and the next number, by whose mean a moved one is halfway."""
    second = ((1 + Fraction(1, 2**24)) / (1 + Fraction(1, 2**36)) - 1) * 2**23
    return [float(1 - second), float(second)]


@pytest.mark.parametrize("count", [2, 4])
def test_halfway_means_round_away_from_zero(count: int) -> None:
    """And others to the nearest number, if they aren't as good as halfway."""
    generator = np.random.default_rng(0)
    first = generator.standard_normal(2000, dtype=np.float32)
    # Some halves of the spacing, and the next number: next to halfway between two numbers.
    second = np.spacing(first) * generator.integers(-3, 4, 2000).astype(np.float32) / 2
    second[::2] = np.nextafter(second[::2], np.float32(1))
    anything = generator.integers(0, 2**32, (2, 4000), dtype=np.uint32).view(np.float32)
    anything[~np.isfinite(anything)] = 3.4e38  # their sum is infinite
    least = np.array([[1e-45, 1e-45, -1e-45, -0.0], [0.0, 3e-45, 0.0, -0.0]], np.float32)
    beside = np.stack([first, second])
    parts = beside, beside - first, anything, np.float32(1e-38) * anything, least
    rows = torch.from_numpy(np.concatenate(parts, 1)).repeat(count // 2, 1)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    mean = sums.mean_of_rows(rows, weights)
    bits = of_exact_sums(rows, weights).view(torch.int32)
    assert torch.equal(mean.view(torch.int32), bits)
    for found, column in zip(mean.numpy(), rows.T.tolist(), strict=True):
        exact = sum(map(Fraction, column), Fraction(0)) / count
        error = Fraction(float(found)) - exact
        beyond = [float(np.nextafter(found, np.float32(end))) for end in (-np.inf, np.inf)]
        others = min(abs(Fraction(x) - exact) for x in beyond if math.isfinite(x))
        as_good_as_halfway = abs(exact) * Fraction(1, 2**35)
        if abs(abs(error) - others) <= as_good_as_halfway:
            assert error * exact >= 0  # away from zero
        else:
            assert abs(error) < others


def test_weights_that_do_not_sum_to_one_make_all_columns_doubtful() -> None:
    """Then a mean isn't a sum of differences, and is the one of before."""
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.3], dtype=torch.float64)
    mean = sums.mean_of_rows(rows, weights)
    assert torch.equal(mean, of_exact_sums(rows, weights))


def test_small_leaves_have_the_bits_that_each_has_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(7, 3, 2), (7,), (7, 20000), (7, 0), (7, 1), (7, 5)]
    leaves = [torch.randn(shape, generator=generator) for shape in shapes]
    leaves += [leaves[0].double(), leaves[1].bfloat16(), leaves[4].double()]
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    means = sums.means_of_rows(leaves, weights)
    for mean, leaf in zip(means, leaves, strict=True):
        assert mean.dtype == leaf.dtype
        assert torch.equal(mean, of_exact_sums(leaf, weights))
    memory = [mean.untyped_storage().data_ptr() for mean in means if mean.numel()]
    assert len(set(memory)) == len(memory)


@pytest.mark.parametrize("count", [2, 3])
def test_leaves_without_entries_have_a_mean_without_entries(count: int) -> None:
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for mean in (
        sums.mean_of_rows(torch.empty(count, 0, 4), weights),
        *sums.means_of_rows([torch.empty(count, 0, 4)], weights),
    ):
        assert mean.shape == (0, 4)


def test_only_a_column_with_nan_or_infinity_has_no_mean() -> None:
    rows = torch.tensor([[1.0, torch.nan, torch.inf], [3.0, 1.0, 1.0]])
    mean = sums.mean_of_rows(rows, torch.tensor([0.5, 0.5]))
    assert mean[0] == 2
    assert not mean[1:].isfinite().any()
