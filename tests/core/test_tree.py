"""Trees: the client axis, expanded views, averages, norms."""

from __future__ import annotations

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


def test_flat_entries_come_back_in_their_shapes_and_types() -> None:
    model = {
        "w": torch.randn(3, 2, 4, dtype=torch.float32),
        "b": torch.randn(3, dtype=torch.float64),
        "v": torch.randn(3, 5, dtype=torch.bfloat16),
    }
    vectors = tree.flat(model, ["v", "w", "b"])
    assert vectors.shape == (3, 5 + 2 * 4 + 1)
    assert vectors.dtype == torch.float64  # has the numbers of all
    like = {name: leaf[:1] for name, leaf in model.items()}
    back = tree.unflat(vectors, like, ["v", "w", "b"])
    torch.testing.assert_close(back, model, rtol=0, atol=0)


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

    def test_sums_of_differences_are_zero_where_nothing_moved(self) -> None:
        start = {"w": torch.randn(4).bfloat16(), "b": torch.randn(4)}
        moved = {"w": start["w"].repeat(9, 1), "b": start["b"].repeat(9, 1) + 2}
        weights = torch.full((9,), 1 / 9, dtype=torch.float64)
        change = tree.weighted_sum(moved, weights, start)
        assert torch.equal(change["w"], torch.zeros(4).bfloat16())
        torch.testing.assert_close(change["b"], torch.full((4,), 2.0))
        total = tree.weighted_sum({"b": moved["b"]}, torch.ones(9, dtype=torch.float64))
        torch.testing.assert_close(total["b"], 9 * (start["b"] + 2))
