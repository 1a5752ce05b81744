"""Neighbouring classes in log-normal sizes."""

from typing import Any

import numpy as np
import pytest

from lightning_pfl.data import ConsecutiveClasses

# Ten classes of 4000, as the letters of FedRep's FEMNIST have at most.
LETTERS = np.arange(40_000) % 10


def split(partition: ConsecutiveClasses, labels: Any, clients: int, seed: int = 0) -> Any:
    return partition.split(labels, clients, np.random.default_rng(seed))


def test_sizes_and_classes_of_femnist_letters() -> None:
    parts, _ = split(ConsecutiveClasses(), LETTERS, 150)
    # The same draw by hand: one normal number for each client, before anything else.
    normal = np.random.default_rng(0).standard_normal(150)
    each = np.rint((np.exp(4 + normal) + 100) / 3)
    for client, part in enumerate(parts):
        classes, counts = np.unique(LETTERS[part], return_counts=True)
        assert sorted((client + np.arange(3)) % 10) == classes.tolist()
        assert counts.tolist() == [each[client]] * 3
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held)


def test_a_class_that_is_too_small_is_shared_in_proportion() -> None:
    labels = np.repeat(np.arange(4), [1000, 30, 1000, 1000])
    parts, plan = split(ConsecutiveClasses(2, log_mean=3.0, smallest=50), labels, 8)
    held = np.array([np.bincount(labels[part], minlength=4) for part in parts])
    wanted = np.stack([plan[k] for k in range(4)], axis=1)
    assert held[:, 1].sum() == 30
    # Rounding the cumulated shares moves a client's count by less than one.
    assert (abs(held[:, 1] - 30 * wanted[:, 1] / wanted[:, 1].sum()) < 1).all()
    assert np.array_equal(held[:, [0, 2, 3]], wanted[:, [0, 2, 3]])


def test_a_test_set_follows_the_proportions() -> None:
    partition = ConsecutiveClasses(3)
    parts, plan = split(partition, LETTERS, 20)
    test = np.arange(4_000) % 10
    halves = partition.apply(test, plan, np.random.default_rng(1))
    for label in range(10):
        held = np.array([(LETTERS[part] == label).sum() for part in parts])
        got = np.array([(test[part] == label).sum() for part in halves])
        assert (abs(got - 400 * held / held.sum()) < 1).all()
        assert got.sum() == 400


def test_classes_of_nobody_are_left_out() -> None:
    parts, plan = split(ConsecutiveClasses(1, log_mean=0.0, smallest=0), LETTERS, 3)
    assert sorted(plan) == [0, 1, 2]
    assert [np.unique(LETTERS[part]).tolist() for part in parts] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes_per_client": 2.0}, "a positive int, but got classes_per_client=2.0"),
        ({"log_mean": float("nan")}, "Expected `log_mean` to be a finite number"),
        ({"log_std": 0}, "Expected `log_std` to be a positive finite number"),
        ({"smallest": -1}, "a non-negative int, but got smallest=-1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConsecutiveClasses(**arguments)


@pytest.mark.parametrize("classes", [0, 11])
def test_more_classes_than_there_are_are_refused(classes: int) -> None:
    with pytest.raises(ValueError, match=rf"\(10\), but got classes_per_client={classes}\."):
        split(ConsecutiveClasses(classes), LETTERS, 5)


def test_fewer_samples_than_clients_are_refused() -> None:
    labels = np.repeat(np.arange(2), [50, 3])
    with pytest.raises(ValueError, match="got 3 samples of class 1 for 5 clients"):
        split(ConsecutiveClasses(1), labels, 10)
