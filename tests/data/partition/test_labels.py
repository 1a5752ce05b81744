"""Partitions by class, against their rules."""

import numpy as np
import pytest

from lightning_pfl.data import ClassesPerClient, Dirichlet, LabelSkew

# The layout of CIFAR-10, at a tenth of its size: 500 train and 100 test samples per class.
TRAIN, TEST = np.repeat(np.arange(10), 500), np.repeat(np.arange(10), 100)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestClassesPerClient:
    def test_sizes_of_the_cifar_partition(self) -> None:
        """n = 100, S = 2: s = 20 shards per class, of 25 train and 5 test samples each."""
        parts, plan = ClassesPerClient(2).split(TRAIN, 100, rng())
        test = ClassesPerClient(2).apply(TEST, plan, rng(1))
        assert {len(part) for part in parts} == {2 * 25}
        assert {len(part) for part in test} == {2 * 5}
        assert plan.shape == (100, 2)
        assert np.bincount(plan.ravel()).tolist() == [20] * 10

    def test_a_client_gets_one_shard_per_entry_of_its_row(self) -> None:
        parts, plan = ClassesPerClient(2).split(TRAIN, 100, rng(2))
        test = ClassesPerClient(2).apply(TEST, plan, rng(3))
        for row, part, test_part in zip(plan, parts, test, strict=True):
            times = np.bincount(row, minlength=10)
            assert np.array_equal(np.bincount(TRAIN[part], minlength=10), 25 * times)
            assert np.array_equal(np.bincount(TEST[test_part], minlength=10), 5 * times)

    def test_a_class_can_come_up_twice_as_often_as_chance_says(self) -> None:
        """Two entries of a shuffled list of 200 with 20 per class agree with chance 19 / 199."""
        rows = np.concatenate([ClassesPerClient(2).split(TRAIN, 100, rng(s))[1] for s in range(40)])
        share = np.mean(rows[:, 0] == rows[:, 1])
        assert abs(share - 19 / 199) < 4 * np.sqrt(0.095 * 0.905 / 4000)

    def test_uneven_shards(self) -> None:
        """7 clients with 3 entries over 10 classes: one class has three shards, the rest two."""
        parts, plan = ClassesPerClient(3).split(TRAIN, 7, rng())
        assert sorted(np.bincount(plan.ravel()).tolist()) == [2] * 9 + [3]
        assert all(set(TRAIN[p]) == set(row) for p, row in zip(parts, plan, strict=True))

    def test_every_class_gets_the_extra_shards_equally_often(self) -> None:
        """Of 21 places 10 classes take 2 each and one a third: each class with chance 1/10."""
        draws, times = 1000, np.zeros(10)
        for seed in range(draws):
            plan = ClassesPerClient(3).split(np.arange(10).repeat(3), 7, rng(seed))[1]
            times += np.bincount(plan.ravel()) == 3
        assert times.sum() == draws
        assert np.abs(times / draws - 0.1).max() < 4 * np.sqrt(0.1 * 0.9 / draws)

    def test_string_labels(self) -> None:
        words = np.array(["ant", "bee", "cat", "dog"])[np.arange(80) % 4]
        parts, plan = ClassesPerClient(1).split(words, 8, rng())
        for part, row in zip(parts, plan, strict=True):
            assert set(words[part]) == set(row)
            assert len(part) == 10


class TestDirichlet:
    @pytest.mark.parametrize("alpha", [1e-300, 1e-5, 1e-2, 1.0, 1e5, 1e308])
    @pytest.mark.parametrize("min_size", [0, 1, 20])
    def test_any_alpha_ends_with_an_exact_cover(self, alpha: float, min_size: int) -> None:
        parts = Dirichlet(alpha, min_size)(TRAIN, 200, rng())
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(TRAIN)))
        assert min(len(part) for part in parts) >= min_size

    def test_minimum_that_needs_every_sample(self) -> None:
        parts = Dirichlet(0.01, min_size=25)(TRAIN, 200, rng())
        assert {len(part) for part in parts} == {25}

    def test_large_alpha_is_uniform_and_small_alpha_is_one_client_per_class(self) -> None:
        even = Dirichlet(1e9)(TRAIN, 5, rng())
        for part in even:
            assert np.abs(np.bincount(TRAIN[part]) - 100).max() <= 1
        extreme = Dirichlet(1e-9, min_size=0)(TRAIN, 5, rng())
        owners = [sum(c in TRAIN[part] for part in extreme) for c in range(10)]
        assert owners == [1] * 10

    def test_variance_of_the_proportions(self) -> None:
        """A component of Dir(alpha 1_n) has variance (n - 1) / (n^2 (n alpha + 1))."""
        n, alpha = 5, 0.5
        labels = np.repeat(np.arange(400), 1000)
        parts = Dirichlet(alpha, min_size=0)(labels, n, rng())
        shares = np.stack([np.bincount(labels[p], minlength=400) / 1000 for p in parts])
        want = (n - 1) / (n**2 * (n * alpha + 1))
        assert np.allclose(shares.mean(), 1 / n)
        assert abs(shares.var() / want - 1) < 0.15

    def test_test_split_follows_the_same_proportions(self) -> None:
        partition = Dirichlet(0.5, min_size=0)
        parts, plan = partition.split(TRAIN, 10, rng())
        test = partition.apply(TEST, plan, rng(1))
        for part, test_part in zip(parts, test, strict=True):
            share = np.bincount(TRAIN[part], minlength=10) / 500
            test_share = np.bincount(TEST[test_part], minlength=10) / 100
            assert np.abs(share - test_share).max() <= 0.5 / 500 * 2 + 0.5 / 100 * 2

    @pytest.mark.parametrize(("alpha", "clients", "min_size"), [(0.1, 100, 25), (0.5, 50, 0)])
    def test_nobody_is_tested_on_a_class_that_it_has_no_sample_of(
        self, alpha: float, clients: int, min_size: int
    ) -> None:
        """Also where rounding left a client without, or topping up gave it another class."""
        partition = Dirichlet(alpha, min_size)
        parts, plan = partition.split(TRAIN, clients, rng())
        test = partition.apply(TEST, plan, rng(1))
        held = np.stack([np.bincount(TRAIN[part], minlength=10) for part in parts])
        tested = np.stack([np.bincount(TEST[part], minlength=10) for part in test])
        assert tested.sum() == len(TEST)
        assert not tested[held == 0].any()
        # A fifth of the training samples, up to the rounding of two cumulated sizes.
        assert np.abs(tested - held / 5).max() <= 1

    def test_test_classes_that_train_lacks_are_left_out(self) -> None:
        partition = Dirichlet(0.5)
        _, plan = partition.split(TRAIN, 10, rng())
        test = partition.apply(np.array([0, 11, 3]), plan, rng())
        assert sorted(np.concatenate(test).tolist()) == [0, 2]


class TestLabelSkew:
    def test_shares_and_sizes(self) -> None:
        """Balanced binary data, 10 clients, five with 85 % of label 0, five with 50 %.

        Label 0 is the scarce one: a client of size m needs 5 (0.85 + 0.5) m <= 5000 samples of it
        in all, so m = floor(740.74).
        """
        labels = np.repeat([0, 1], 5000)
        parts = LabelSkew(0, 0.85, 0.5)(labels, 10, rng())
        assert {len(part) for part in parts} == {740}
        share = [np.mean(labels[part] == 0) for part in parts]
        assert np.allclose(share, [0.5] * 5 + [0.85] * 5, atol=1 / 740)
        held = np.concatenate(parts)
        assert len(set(held.tolist())) == len(held)

    def test_nothing_is_left_out_where_the_data_fit(self) -> None:
        """All clients at 85 %, data at 85 %: every sample is used."""
        labels = np.repeat([0, 1], [850, 150])
        parts = LabelSkew(0, 0.85, 1.0)(labels, 10, rng())
        assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
        assert [np.sum(labels[part] == 0) for part in parts] == [85] * 10

    def test_test_split_has_the_same_shares(self) -> None:
        partition = LabelSkew(3, 0.6, 0.3)
        _, plan = partition.split(TRAIN, 10, rng())
        test = partition.apply(TEST, plan, rng())
        share = [np.mean(TEST[part] == 3) for part in test]
        size = len(test[0])
        assert np.allclose(share, [0.1] * 7 + [0.6] * 3, atol=1 / size)

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_extreme_shares(self, share: float) -> None:
        parts = LabelSkew(0, share, 1.0)(TRAIN, 10, rng())
        assert all(np.mean(TRAIN[part] == 0) == share for part in parts)
        assert {len(part) for part in parts} == {500 * (1 if share else 9) // 10}
