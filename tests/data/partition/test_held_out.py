"""Classes that only the new clients hold."""

from typing import Any

import numpy as np
import pytest

from lightning_pfl.data import (
    ClassesPerClient,
    Digits,
    Dirichlet,
    FederatedDataModule,
    HeldOutClasses,
)

LABELS = np.arange(1000) % 10


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("base", [None, Dirichlet(0.5)], ids=["classes", "dirichlet"])
def test_new_clients_alone_hold_the_classes(base: Any) -> None:
    partition = HeldOutClasses([7, 8, 9], new_clients=2, base=base)
    parts, plan = partition.split(LABELS, 16, rng())
    test = np.arange(200) % 10
    for labels, split in ((LABELS, parts), (test, partition.apply(test, plan, rng(1)))):
        assert sorted(np.concatenate(split)) == list(range(len(labels)))
        assert {int(y) for part in split[:14] for y in labels[part]} == set(range(7))
        for part in split[14:]:
            assert set(labels[part]) == {7, 8, 9}
            assert len(part) == 3 * len(labels) // 10 // 2


def test_the_other_clients_are_split_as_if_alone() -> None:
    """The base partition draws first, so the same seed gives the same rows of classes."""
    partition = HeldOutClasses([0], new_clients=3, base=ClassesPerClient(3))
    _, plan = partition.split(LABELS, 13, rng())
    _, alone = ClassesPerClient(3).split(LABELS[LABELS > 0], 10, rng())
    assert np.array_equal(plan.base, alone)


def test_the_data_module_holds_them_out() -> None:
    partition = HeldOutClasses([3, 4], new_clients=2, base=ClassesPerClient(2))
    data = FederatedDataModule(Digits(), partition, num_clients=10, new_clients=2)
    data.setup()
    for split in (data.train_dataloader(), data.test_dataloader()):
        seen = {int(y) for rows in split.indices for y in split.gather(rows)[1]}
        assert seen == {0, 1, 2, 5, 6, 7, 8, 9}
    new = data.new_clients("train")
    assert {int(y) for rows in new.indices for y in new.gather(rows)[1]} == {3, 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": []}, r"different labels, but got classes=\[\]"),
        ({"classes": [1, 1]}, r"different labels, but got classes=\[1, 1\]"),
        ({"new_clients": 0}, "a positive int, but got new_clients=0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeldOutClasses(**{"classes": [1], "new_clients": 2, **arguments})


@pytest.mark.parametrize("classes", [[10], list(range(10))], ids=["unknown", "all"])
def test_classes_must_be_some_of_the_labels(classes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`classes` to be some of the labels \[0, 1, .*, 9\]"):
        HeldOutClasses(classes, new_clients=1).split(LABELS, 10, rng())


def test_somebody_must_be_left_to_train() -> None:
    with pytest.raises(ValueError, match="more clients than the 3 new ones, but got num_clients=3"):
        HeldOutClasses([1], new_clients=3).split(LABELS, 3, rng())
