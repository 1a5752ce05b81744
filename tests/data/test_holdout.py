"""Which samples are held out: the last ones, or whole groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data import (
    FederatedDataModule,
    LastSamples,
    Natural,
    Source,
    SourceData,
    WholeGroups,
)
from lightning_pfl.data.holdout import cut

METERS, WINDOWS, PATIENTS = 4, 50, 7


class Series(Source):
    """The windows of some meters, in turn; the times run backwards through the file."""

    def load(self) -> SourceData:
        number = np.arange(METERS * WINDOWS)
        values = torch.from_numpy(number).float()
        columns = {
            "meter": number % METERS,
            "time": -number,
            "patient": number // METERS % PATIENTS,
        }
        return SourceData((values.unsqueeze(1), values), values.numpy(), columns=columns)


def splits(cut: Any, **settings: Any) -> list[list[list[int]]]:
    """The samples of each client in train, val and test, by their places in the file."""
    given = {"val_fraction": 0.25, **settings}
    data = FederatedDataModule(Series(), Natural("meter"), cut=cut, **given)
    data.setup()
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    return [[sorted(index.tolist()) for index in loader.indices] for loader in loaders]


@pytest.mark.parametrize(("column", "sign"), [(None, 1), ("time", -1)])
def test_the_last_samples_are_the_test_and_those_before_the_validation(
    column: str | None, sign: int
) -> None:
    for train, val, test in zip(*splits(LastSamples(column)), strict=True):
        # A fifth of 50, and a fourth of the 40 that are left.
        assert (len(train), len(val), len(test)) == (30, 10, 10)
        ordered = [sorted(sign * number for number in part) for part in (train, val, test)]
        assert ordered[0][-1] < ordered[1][0]
        assert ordered[1][-1] < ordered[2][0]


def test_no_group_is_on_two_sides() -> None:
    for parts in zip(*splits(WholeGroups("patient"), val_fraction=0.2), strict=True):
        patients = [{number // METERS % PATIENTS for number in part} for part in parts]
        assert sum(map(len, patients)) == PATIENTS
        assert set.union(*patients) == set(range(PATIENTS))
        # 7 or 8 windows a patient: 10, and then 8 or 9, are nearest to one patient each.
        assert [len(found) for found in patients] == [5, 1, 1]


def test_a_client_with_one_group_keeps_it() -> None:
    train, val, test = splits(WholeGroups("meter"))
    assert [len(part) for part in train] == [WINDOWS] * METERS
    assert not any(val + test)


def test_the_seed_decides_which_groups() -> None:
    assert splits(WholeGroups("patient")) == splits(WholeGroups("patient"))
    assert splits(WholeGroups("patient")) != splits(WholeGroups("patient"), seed=1)


@pytest.mark.parametrize("cut", [LastSamples("hour"), WholeGroups("hour")])
def test_a_column_that_the_source_lacks_is_refused(cut: Any) -> None:
    with pytest.raises(
        ValueError, match=r"one of the source's columns \['meter', .*column='hour'. Name the column"
    ):
        splits(cut)


def test_what_is_no_cut_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`cut` to be a Cut, but got cut='last'\. Use Stratified"):
        splits("last")


@pytest.mark.parametrize(
    ("count", "fraction", "wanted"),
    [(9, 0.3, 3), (7, 0.2, 1), (8, 0.2, 2), (3, 0.9, 2), (2, 0.1, 1), (40, 0.01, 1)],
)
def test_the_share_is_rounded_to_the_nearest_number(
    count: int, fraction: float, wanted: int
) -> None:
    """2.7 is 3, 1.4 is 1, 1.6 is 2; at least one sample is cut, and one is left."""
    labels = np.zeros(count, dtype=np.int64)
    stay, off = cut([np.arange(count)], labels, fraction, np.random.default_rng(0))
    assert (len(stay[0]), len(off[0])) == (count - wanted, wanted)


def test_equal_times_keep_the_order_of_the_source() -> None:
    """Of four samples at one time the last two are cut off, in whatever order a client has them."""
    labels, times = np.zeros(5, dtype=np.int64), {"day": np.array([9, 4, 4, 4, 4])}
    part, rng = np.array([4, 1, 3, 2]), np.random.default_rng(0)
    stay, off = cut([part], labels, 0.5, rng, LastSamples("day"), times)
    assert (sorted(stay[0]), sorted(off[0])) == ([1, 2], [3, 4])
