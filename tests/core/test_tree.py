"""Trees: the client axis, expanded views, averages, norms."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.core import tree

pytestmark = pytest.mark.quick


def sample(clients: int = 3) -> tree.Tree:
    generator = torch.Generator().manual_seed(0)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return {
        "model": {"w": torch.randn(clients, 2, 4, **draw), "b": torch.randn(clients, 4, **draw)},
        "mixing": torch.rand(clients, **draw),
    }


def flat(some: tree.Tree) -> np.ndarray:
    """Every client's numbers side by side, ``(clients, numbers)``."""
    return np.concatenate([leaf.reshape(len(leaf), -1).numpy() for leaf in tree.leaves(some)], 1)


def test_tmap_goes_by_the_names_of_the_first_tree() -> None:
    a, b = {"x": torch.tensor(1.0)}, {"y": torch.tensor(5.0), "x": torch.tensor(2.0)}
    assert tree.tmap(torch.add, a, b) == {"x": torch.tensor(3.0)}
    with pytest.raises(KeyError, match="y"):
        tree.tmap(torch.add, b, a)


def test_leaves_select_and_floats_keep_the_order_of_the_tree() -> None:
    model = {"w": torch.ones(2), "count": torch.tensor(3), "b": torch.zeros(1)}
    assert list(tree.select(model, {"b", "w"})) == ["w", "b"]
    assert list(tree.floats(model)) == ["w", "b"]
    assert [leaf.numel() for leaf in tree.leaves({"m": model, "s": torch.ones(7)})] == [2, 1, 1, 7]


def test_separated_trees_share_no_memory() -> None:
    received = {"w": torch.zeros(2, 3)}
    twice = torch.ones(2, 3)
    alone = torch.ones(2)
    shared = {"model": {"w": received["w"]}, "a": twice, "b": twice.view(3, 2), "c": alone}
    state = tree.separated(shared, received)
    for leaf in tree.leaves(state):
        leaf.add_(1.0)
    assert received["w"].eq(0).all()
    assert all(
        leaf.eq(value).all() for leaf, value in zip(tree.leaves(state), (1, 2, 2, 2), strict=True)
    )
    assert state["c"] is alone


class TestClientAxis:
    @pytest.mark.parametrize("clients", [1, 2, 5])
    def test_expanded_leaves_have_stride_zero_and_share_memory(self, clients: int) -> None:
        leaf = torch.randn(3, 2).T
        wide = tree.expand({"w": leaf}, clients)["w"]
        assert wide.shape == (clients, 2, 3)
        assert wide.stride(0) == 0
        assert tree.is_expanded(wide)
        assert wide.data_ptr() == leaf.data_ptr()
        assert all(torch.equal(row, leaf) for row in wide)

    @pytest.mark.parametrize("clients", [1, 4])
    def test_a_tensor_with_memory_for_every_client_is_not_expanded(self, clients: int) -> None:
        assert not tree.is_expanded(torch.zeros(clients, 3))
        assert not tree.is_expanded(torch.zeros(clients, 3).clone())

    def test_scalars_and_counters_can_be_expanded(self) -> None:
        wide = tree.expand({"n": torch.tensor(4), "s": torch.tensor(0.5)}, 3)
        assert wide["n"].tolist() == [4, 4, 4]
        assert wide["s"].tolist() == [0.5, 0.5, 0.5]

    @pytest.mark.parametrize(
        "index", [slice(1, 2), slice(0, 2), torch.tensor([2, 0]), torch.tensor([1])]
    )
    def test_rows_keep_expansion_and_values(self, index: slice | Tensor) -> None:
        shared, varying = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
        part = tree.rows({**tree.expand({"s": shared}, 3), "o": varying}, index)
        assert tree.is_expanded(part["s"])
        assert part["s"].data_ptr() == shared.data_ptr()
        assert torch.equal(part["o"], varying[index])
        assert len(part["s"]) == len(part["o"])
        assert all(torch.equal(row, shared) for row in part["s"])

    def test_rows_by_position_are_copies(self) -> None:
        varying = torch.zeros(3, 2)
        tree.rows({"o": varying}, torch.tensor([0, 1]))["o"].fill_(1.0)
        assert torch.equal(varying, torch.zeros(3, 2))

    def test_stack_undoes_rows(self) -> None:
        whole = sample(5)
        parts = [tree.rows(whole, slice(0, 2)), tree.rows(whole, slice(2, 5))]
        assert np.array_equal(flat(tree.stack(parts)), flat(whole))

    def test_stack_keeps_what_all_share_expanded(self) -> None:
        shared = torch.randn(2)
        joined = tree.stack([tree.expand({"s": shared}, 2), tree.expand({"s": shared}, 1)])["s"]
        assert tree.is_expanded(joined)
        assert joined.shape == (3, 2)

    def test_stack_of_different_shared_tensors_tells_them_apart(self) -> None:
        a, b = torch.zeros(2), torch.ones(2)
        joined = tree.stack([tree.expand({"s": a}, 1), tree.expand({"s": b}, 2)])["s"]
        assert joined.tolist() == [[0, 0], [1, 1], [1, 1]]


class TestArithmetic:
    def test_scale_by_a_number_and_by_one_number_per_client(self) -> None:
        some, factors = sample(), torch.tensor([0.5, -2.0, 0.0])
        np.testing.assert_array_equal(flat(tree.scale(some, 3.0)), 3.0 * flat(some))
        expected = factors.double().numpy()[:, None] * flat(some)
        np.testing.assert_array_equal(flat(tree.scale(some, factors)), expected)

    def test_add_and_sub(self) -> None:
        a, b = sample(), tree.scale(sample(), 0.3)
        np.testing.assert_array_equal(flat(tree.add(a, b)), flat(a) + flat(b))
        np.testing.assert_array_equal(flat(tree.sub(a, b)), flat(a) - flat(b))

    def test_dot_and_sqnorm_are_per_client(self) -> None:
        a, b = sample(), tree.tmap(torch.cos, sample())
        np.testing.assert_allclose(tree.dot(a, b), (flat(a) * flat(b)).sum(1), rtol=1e-14)
        np.testing.assert_allclose(tree.sqnorm(a), (flat(a) ** 2).sum(1), rtol=1e-14)

    def test_dot_goes_by_the_names_of_the_first_tree(self) -> None:
        a = {"w": torch.ones(2, 3)}
        b = {"w": torch.full((2, 3), 2.0), "extra": torch.ones(2, 9)}
        assert tree.dot(a, b).tolist() == [6.0, 6.0]

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_finite_finds_the_client_with_a_bad_number(self, bad: float) -> None:
        some = {"w": torch.zeros(3, 2), "n": torch.zeros(3, dtype=torch.int64)}
        assert tree.finite(some).tolist() == [True, True, True]
        some["w"][1, 0] = bad
        assert tree.finite(some).tolist() == [True, False, True]
        assert tree.finite({"n": torch.zeros(3, dtype=torch.int64)}).all()

    @pytest.mark.parametrize("leaf", ["first", "second"])
    def test_one_bad_leaf_of_several_is_enough(self, leaf: str) -> None:
        some = {"first": torch.zeros(3, 2), "model": {"second": torch.zeros(3)}}
        (some if leaf == "first" else some["model"])[leaf][2] = torch.nan  # type: ignore[index]
        assert tree.finite(some).tolist() == [True, True, False]

    def test_bytes_are_those_of_one_client(self) -> None:
        some = {
            "w": torch.zeros(3, 2, 5),
            "n": torch.zeros(3, dtype=torch.int64),
            "h": torch.zeros(3, 4).half(),
        }
        assert tree.nbytes(some) == 2 * 5 * 4 + 8 + 4 * 2
        assert tree.nbytes(tree.expand({"w": torch.zeros(2, 5)}, 100)) == 40


class TestWeightedMean:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_floats_are_averaged_with_the_weights(self, dtype: torch.dtype) -> None:
        weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
        some = tree.tmap(lambda leaf: leaf.to(dtype), sample())
        mean = tree.weighted_mean(some, weights)
        for result, leaf in zip(tree.leaves(mean), tree.leaves(some), strict=True):
            assert result.dtype == dtype
            assert result.shape == leaf.shape[1:]
            expected = np.average(leaf.double().numpy(), axis=0, weights=weights.numpy())
            np.testing.assert_allclose(
                result, expected, rtol=1e-6 if dtype == torch.float32 else 1e-14
            )

    def test_counters_and_masks_take_the_maximum(self) -> None:
        some = {
            "n": torch.tensor([3, 11, 7]),
            "m": torch.tensor([[True, False], [False, False], [True, False]]),
        }
        mean = tree.weighted_mean(some, torch.full((3,), 1 / 3))
        assert mean["n"].dtype == torch.int64
        assert mean["n"].item() == 11
        assert mean["m"].tolist() == [True, False]

    def test_one_client_with_weight_one_is_returned_bit_for_bit(self) -> None:
        some = sample(1)
        mean = tree.weighted_mean(some, torch.ones(1, dtype=torch.float64))
        assert torch.equal(mean["model"]["w"], some["model"]["w"][0])

    def test_shared_views_are_averaged_as_well(self) -> None:
        leaf = torch.randn(4, dtype=torch.float64)
        mean = tree.weighted_mean(tree.expand({"w": leaf}, 3), torch.tensor([0.25, 0.25, 0.5]))
        torch.testing.assert_close(mean["w"], leaf, rtol=1e-15, atol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("count", [15, 3000])
    def test_equal_rows_have_exactly_their_own_mean(self, dtype: torch.dtype, count: int) -> None:
        row = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
        for raw in (torch.ones(count), torch.arange(1.0, count + 1)):
            weights = raw.double() / raw.double().sum()
            mean = tree.weighted_mean({"w": row.expand(count, 3, 2).clone()}, weights)
            assert torch.equal(mean["w"], row)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("together", [1, 7, 2**22])
    def test_means_are_rounded_once(
        self, dtype: torch.dtype, together: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # One client has a million times the weight of each other.
        monkeypatch.setattr(tree, "DOUBLED", together)
        rows = (1 + torch.randn(200, 5, generator=torch.Generator().manual_seed(0)) / 9).to(dtype)
        raw = [1e6 if k == 3 else 1.0 for k in range(200)]
        weights = torch.tensor(raw, dtype=torch.float64) / math.fsum(raw)
        mean = tree.weighted_mean({"w": rows}, weights)["w"]
        for column in range(5):
            exact = [float(w) * float(row[column]) for w, row in zip(weights, rows, strict=True)]
            assert mean[column] == torch.tensor(math.fsum(exact), dtype=torch.float64).to(dtype)

    @pytest.mark.parametrize("together", [7, 2**18])
    def test_sums_have_the_same_bits_in_any_order_and_grouping(
        self, together: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tree, "DOUBLED", together)
        generator = torch.Generator().manual_seed(1)
        spread = torch.logspace(-200, 200, 40, dtype=torch.float64)
        rows = torch.randn(60, 40, generator=generator, dtype=torch.float64) * spread
        rows[:, 7] = 3.0
        weights = torch.rand(60, generator=generator, dtype=torch.float64)
        weights /= weights.sum()
        low, total = tree.sum_above(rows, weights)
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
        assert torch.equal(tree.sum_above(rows[order], weights[order])[1], total)
        within = (rows.amin(0), rows.amax(0))
        for cut in (1, 17, 59):
            parts = [
                tree.sum_above(rows[at], weights[at], within)[1]
                for at in (order[:cut], order[cut:])
            ]
            assert torch.equal(parts[1] + parts[0], total)
        mean = tree.weighted_mean({"w": rows}, weights)["w"]
        again = tree.weighted_mean({"w": rows[order]}, weights[order])["w"]
        assert torch.equal(mean, again)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("count", [1, 2, 10, 300])
    def test_means_have_the_bits_of_exact_sums(self, dtype: torch.dtype, count: int) -> None:
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
            low, total = tree.sum_above(rows, each)
            mean = tree.weighted_mean({"w": rows}, each)["w"]
            assert torch.equal(mean, (low.double() + total).to(dtype))
            order = torch.randperm(count, generator=generator)
            again = tree.weighted_mean({"w": rows[order].view(count, 40, 100)}, each[order])["w"]
            assert torch.equal(again.flatten(), mean)

    @pytest.mark.parametrize(
        ("weights", "most"), [(torch.linspace(1.0, 9.0, 10), 20), (torch.ones(3), 2000)]
    )
    def test_few_columns_need_exact_sums(
        self, weights: Tensor, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But those whose mean is halfway between two numbers, as every fourth one of a quarter, a
        quarter and half. Of these only the columns of the first part are tried.
        """
        rows = 1 + torch.rand(len(weights), 20000, generator=torch.Generator().manual_seed(0))
        rows[:, 5] = 1.0
        rows[-1, 5] = 1 + 2 * 1.5 * 2**-23  # of weight 1/2: 3/2 of the spacing above 1
        weights = weights.double()
        weights /= 2 * weights[:-1].sum()
        weights[-1] = 0.5
        monkeypatch.setattr(tree, "DOUBLED", len(rows) * 2000)
        exact: list[int] = []
        really = tree.sum_above

        def counted(leaf: Tensor, *args: Any) -> Any:
            exact.append(leaf.shape[1])
            return really(leaf, *args)

        monkeypatch.setattr(tree, "sum_above", counted)
        mean = tree.weighted_mean({"w": rows}, weights)["w"]
        monkeypatch.undo()
        low, total = tree.sum_above(rows, weights)
        assert torch.equal(mean, (low.double() + total).float())
        assert 0 < exact[-1] < most
        assert exact[:-1] == ([] if most == 20 else [2000] * 9)

    def test_two_clients_of_equal_weight_are_averaged_exactly(self) -> None:
        """By one sum in single precision, with the bits of exact sums: means are rounded once."""
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
        rows = torch.from_numpy(np.concatenate(parts, 1))
        weights = torch.full((2,), 0.5, dtype=torch.float64)
        mean = tree.weighted_mean({"w": rows}, weights)["w"]
        low, total = tree.sum_above(rows, weights)
        exact_sums = (low.double() + total).float()
        assert torch.equal(mean.view(torch.int32), exact_sums.view(torch.int32))
        for found, column in zip(mean.numpy(), rows.T.tolist(), strict=True):
            exact = sum(map(Fraction, column), Fraction(0)) / 2
            error = abs(Fraction(float(found)) - exact)
            beyond = [float(np.nextafter(found, np.float32(end))) for end in (-np.inf, np.inf)]
            others = min(abs(Fraction(x) - exact) for x in beyond if math.isfinite(x))
            even = found.view(np.uint32) % 2 == 0
            assert error < others or (error == others and even)

    def test_weights_that_do_not_sum_to_one_make_all_columns_doubtful(self) -> None:
        """Then a mean isn't a sum of differences, and is the one of before."""
        rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
        weights = torch.tensor([0.1, 0.2, 0.3, 0.3], dtype=torch.float64)
        low, total = tree.sum_above(rows, weights)
        mean = tree.weighted_mean({"w": rows}, weights)["w"]
        assert torch.equal(mean, (low.double() + total).float())

    def test_only_a_column_with_nan_or_infinity_has_no_mean(self) -> None:
        rows = torch.tensor([[1.0, torch.nan, torch.inf], [3.0, 1.0, 1.0]])
        mean = tree.weighted_mean({"w": rows}, torch.tensor([0.5, 0.5]))["w"]
        assert mean[0] == 2
        assert not mean[1:].isfinite().any()

    def test_sums_of_differences_are_zero_where_nothing_moved(self) -> None:
        start = {"w": torch.randn(4).bfloat16(), "b": torch.randn(4)}
        moved = {"w": start["w"].repeat(9, 1), "b": start["b"].repeat(9, 1) + 2}
        weights = torch.full((9,), 1 / 9, dtype=torch.float64)
        change = tree.weighted_sum(moved, weights, start)
        assert torch.equal(change["w"], torch.zeros(4).bfloat16())
        torch.testing.assert_close(change["b"], torch.full((4,), 2.0))
        total = tree.weighted_sum({"b": moved["b"]}, torch.ones(9, dtype=torch.float64))
        torch.testing.assert_close(total["b"], 9 * (start["b"] + 2))
