"""Natural clients, and partitioners of flwr-datasets through a stand-in with their protocol."""

from typing import Any

import numpy as np

from lightning_pfl.data import FlowerPartitioner, Natural


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class Shards:
    """The protocol of flwr-datasets: `dataset`, set once; `num_partitions`; `load_partition`."""

    num_partitions = 3

    def __init__(self) -> None:
        self._dataset: Any = None

    @property
    def dataset(self) -> Any:
        return self._dataset

    @dataset.setter
    def dataset(self, value: Any) -> None:
        if self._dataset is not None:
            raise Exception("The dataset should be assigned only once to the partitioner.")
        self._dataset = value

    def load_partition(self, partition_id: int) -> Any:
        """Client 0 gets class 0, client 1 half of class 1, client 2 the rest of it."""
        labels = np.asarray(list(self._dataset["label"]))
        ones = np.nonzero(labels == 1)[0]
        rows = [np.nonzero(labels == 0)[0], ones[::2], ones[1::2]][partition_id]
        return self._dataset.select(rows.tolist())


def test_natural_groups_by_value() -> None:
    who = np.array(["b", "a", "b", "c", "a", "b"])
    natural = Natural("who")
    keys = natural.keys(np.zeros(6), {"who": who, "other": who[::-1]})
    parts, plan = natural.split(keys, None, rng())
    assert natural.names(plan) == ("a", "b", "c")
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5], [3]]
    test = natural.apply(np.array(["c", "z", "a", "c"]), plan, rng())
    assert [part.tolist() for part in test] == [[2], [], [0, 3]]


def test_natural_leaves_small_clients_out() -> None:
    who = np.array([7, 7, 3, 5, 5, 5])
    parts, plan = Natural(min_size=2).split(who, None, rng())
    assert plan.tolist() == [5, 7]
    assert [part.tolist() for part in parts] == [[3, 4, 5], [0, 1]]


def test_natural_draws_so_many_clients() -> None:
    who = np.repeat(np.arange(50), 2)
    draws = [Natural().split(who, 10, rng(seed)) for seed in range(3)]
    for parts, plan in draws:
        assert len(parts) == len(plan) == 10
        assert plan.tolist() == sorted(plan.tolist())
        assert all(part.tolist() == [2 * k, 2 * k + 1] for part, k in zip(parts, plan, strict=True))
    assert len({tuple(plan.tolist()) for _, plan in draws}) == 3


def test_flower_partitioner_is_followed_and_test_is_divided_alike() -> None:
    labels = np.array([0, 1, 1, 0, 1, 1, 1, 1])
    partition = FlowerPartitioner(Shards())
    parts, plan = partition.split(labels, None, rng())
    assert [part.tolist() for part in parts] == [[0, 3], [1, 4, 6], [2, 5, 7]]
    test_labels = np.array([1, 1, 0, 1, 1, 0, 0])
    test = partition.apply(test_labels, plan, rng())
    assert sorted(test[0].tolist()) == [2, 5, 6]
    assert len(test[1]) == len(test[2]) == 2
    assert sorted(np.concatenate(test).tolist()) == list(range(7))
    again, _ = partition.split(labels, 3, rng())  # the user's object was not used up
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]


def test_flower_partitioner_with_regression_targets_divides_test_by_size() -> None:
    class Halves(Shards):
        def load_partition(self, partition_id: int) -> Any:
            return self._dataset.select([[0, 1, 2, 3], [4, 5], [6, 7]][partition_id])

    partition = FlowerPartitioner(Halves())
    _, plan = partition.split(np.linspace(0, 1, 8), None, rng())
    test = partition.apply(np.linspace(0, 1, 100), plan, rng())
    assert [len(part) for part in test] == [50, 25, 25]


def test_flower_partitioner_by_a_column_of_the_source_divides_test_by_that_column() -> None:
    """Two hospitals a client, as of GroupedNaturalIdPartitioner: their test samples follow."""

    class Pairs(Shards):
        num_partitions = 2

        def load_partition(self, partition_id: int) -> Any:
            names = self._dataset["hospital"]
            wanted = [("a", "b"), ("c", "d")][partition_id]
            return self._dataset.select([k for k, name in enumerate(names) if name in wanted])

    partition = FlowerPartitioner(Pairs(), label_column="hospital")
    who = {"hospital": np.array(["c", "a", "b", "d", "a"])}
    keys = partition.keys(np.zeros(5, dtype=np.int64), who)
    parts, plan = partition.split(keys, None, rng())
    assert [part.tolist() for part in parts] == [[1, 2, 4], [0, 3]]
    test = partition.apply(np.array(["a", "d", "b", "a", "new", "c"]), plan, rng())
    assert [sorted(part.tolist()) for part in test] == [[0, 2, 3], [1, 5]]


def test_flower_partitioner_gets_the_labels_where_the_source_has_no_such_column() -> None:
    labels = np.array([0, 1, 1, 0])
    who = {"hospital": np.array(["a", "b", "b", "a"])}
    assert FlowerPartitioner(Shards()).keys(labels, who) is labels
