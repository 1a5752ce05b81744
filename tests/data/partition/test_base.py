"""Every partition: covers the samples as its rule says, follows its seed, always ends."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lightning_pfl.data import (
    IID,
    ClassesPerClient,
    Dirichlet,
    FeatureSkew,
    LabelSkew,
    LogNormalSizes,
    Partition,
    QuantitySkew,
    draw,
)
from lightning_pfl.data.partition.base import cut_by_shares, top_up

LABELS = np.random.default_rng(0).integers(0, 10, 1000)
COVERING: dict[str, Callable[[], Partition]] = {
    "IID": IID,
    "ClassesPerClient": lambda: ClassesPerClient(2),
    "ClassesPerClient, uneven shards": lambda: ClassesPerClient(3),
    "Dirichlet": lambda: Dirichlet(0.3),
    "LogNormalSizes": lambda: LogNormalSizes(1.0),
    "QuantitySkew": QuantitySkew,
    "FeatureSkew": FeatureSkew,
}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_cover(parts: list[npt.NDArray[np.int64]], count: int) -> None:
    """No sample twice, none lost."""
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))


@pytest.mark.parametrize("case", COVERING)
@pytest.mark.parametrize("clients", [5, 7, 25])
def test_exact_cover_of_train_and_test(case: str, clients: int) -> None:
    partition = COVERING[case]()
    parts, plan = partition.split(LABELS, clients, rng())
    assert len(parts) == clients
    assert_cover(parts, 1000)
    assert min(len(part) for part in parts) >= 1
    test_labels = rng(5).integers(0, 10, 333)
    test = partition(test_labels, clients, rng(), plan)
    assert len(test) == clients
    assert_cover(test, 333)


@pytest.mark.parametrize("case", [*COVERING, "LabelSkew"])
def test_the_seed_decides(case: str) -> None:
    partition = LabelSkew() if case == "LabelSkew" else COVERING[case]()
    runs = [[part.tolist() for part in partition(LABELS, 25, rng(seed))] for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_iid_sizes_differ_by_one_at_most() -> None:
    for samples, clients in ((10, 3), (1000, 7), (16, 16), (35, 10)):
        sizes = {len(part) for part in IID()(np.zeros(samples), clients, rng())}
        assert sizes <= {samples // clients, -(-samples // clients)}


def test_quantity_skew_gives_fedmaps_sizes() -> None:
    """FedMAP: clients 1-5 have 2000 samples, 6-10 have 500, 12500 in all."""
    parts = QuantitySkew(ratio=4, small_fraction=0.5)(np.zeros(12500), 10, rng())
    assert [len(part) for part in parts] == [2000] * 5 + [500] * 5


def test_log_normal_sizes_are_log_normal() -> None:
    """Logs of the sizes have standard deviation sigma (2000 clients: standard error 0.008)."""
    parts = LogNormalSizes(0.5)(np.zeros(2_000_000), 2000, rng())
    logs = np.log([len(part) for part in parts])
    assert abs(logs.std() - 0.5) < 0.04
    assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.2  # symmetric in the log


def test_log_normal_sizes_with_huge_sigma_are_topped_up() -> None:
    parts = LogNormalSizes(1e6, min_size=3)(np.zeros(300), 50, rng())
    assert_cover(parts, 300)
    assert min(len(part) for part in parts) == 3


def test_cut_by_shares_rounds_cumulated_sizes() -> None:
    order = np.arange(10)
    assert [len(p) for p in cut_by_shares(order, np.array([1, 2, 1]))] == [3, 5, 2]
    assert [len(p) for p in cut_by_shares(order, np.array([0, 1, 0]))] == [0, 10, 0]
    assert np.array_equal(np.concatenate(cut_by_shares(order, np.array([0.3, 0.1]))), order)


def test_top_up_takes_from_the_largest_and_moves_no_more_than_needed() -> None:
    """Sizes (9, 4, 0, 1) with minimum 3: two donors' surplus is 6 + 1, the shortage is 3 + 2.

    The largest gives until it is as small as the next one: 9 -> 4, and 4 stays.
    """
    parts = np.split(np.arange(14), [9, 13, 13])
    after = top_up(parts, 3, rng())
    assert [len(part) for part in after] == [4, 4, 3, 3]
    assert_cover(after, 14)
    assert set(parts[3]) <= set(after[3].tolist())
    assert set(after[0].tolist()) <= set(parts[0].tolist())
    assert np.array_equal(after[1], parts[1])


@pytest.mark.parametrize("labels", [LABELS, LABELS.astype(np.float64)])
def test_draw_shows_counts(labels: npt.NDArray[Any]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    parts = ClassesPerClient(2)(LABELS, 20, rng())
    _, ax = plt.subplots()
    assert draw(parts, labels, ax) is ax
    assert all(tick.is_integer() for tick in ax.get_xticks())  # clients are counted
    if labels.dtype.kind == "f":
        heights = [patch.get_height() for patch in ax.patches]  # type: ignore[attr-defined]
        assert heights == [len(part) for part in parts]
    else:
        shown = np.asarray(ax.images[0].get_array())
        expected = [[np.sum(LABELS[part] == c) for part in parts] for c in range(10)]
        assert np.array_equal(shown, expected)
    plt.close("all")
