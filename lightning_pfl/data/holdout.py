"""Cuts of validation and test samples out of each client's samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.partition import Parts
from lightning_pfl.data.partition.base import Array, Positions

Columns = Mapping[str, Array]


class Cut(ABC):
    """A choice of the samples of a client that are held out for the test or the validation."""

    @abstractmethod
    def choose(
        self, part: Positions, labels: Array, columns: Columns, wanted: int, rng: Generator
    ) -> npt.NDArray[np.bool_]:
        """Choose about ``wanted`` of a client's samples, as a mask ``(samples,)``.

        Args:
            part: Positions of the client's samples, ``(samples,)``, at least two.
            labels: Labels of all samples of the source.
            columns: Further columns of all samples.
            wanted: How many samples to choose, at least one and fewer than all.
            rng: Source of all randomness.
        """


class Stratified(Cut):
    """Random samples of every class, or of every range of a regression target.

    The samples are sorted by label (at random within a label) and cut at even distances from a
    random start, so that every class is represented up to one sample.
    """

    def choose(
        self, part: Positions, labels: Array, columns: Columns, wanted: int, rng: Generator
    ) -> npt.NDArray[np.bool_]:
        """Choose samples at even distances along the sorted labels."""
        count = len(part)
        shuffled = rng.permutation(count)
        order = shuffled[np.argsort(labels[part][shuffled], kind="stable")]
        places = (np.arange(wanted) + rng.random()) * (count / wanted)
        # Steps are longer than 1, so positions differ; rounding could lift the last one to `count`.
        return _mask(order[np.minimum(places.astype(np.int64), count - 1)], count)


class LastSamples(Cut):
    """The last samples of each client, for series: no held-out window lies between training ones.

    The test is cut off first, then the validation off what is left: training samples come before
    validation samples, and these before test samples.

    Args:
        column: Column of the source to sort by, such as a time; equal values keep the order of the
            source. ``None``: the order of the source.
    """

    def __init__(self, column: str | None = None) -> None:
        check_types(LastSamples.__init__, locals())
        self.column = column

    def choose(
        self, part: Positions, labels: Array, columns: Columns, wanted: int, rng: Generator
    ) -> npt.NDArray[np.bool_]:
        """Choose the last ``wanted`` samples."""
        order = np.argsort(part, kind="stable")
        if self.column is not None:
            times = _column(columns, self.column)[part]
            order = order[np.argsort(times[order], kind="stable")]
        return _mask(order[-wanted:], len(part))


class WholeGroups(Cut):
    """Random groups of samples, each as a whole: what belongs together is on one side of the cut.

    The number of groups is the one whose samples are nearest to the share asked for. A client with
    one group keeps it.

    Args:
        column: Column of the source that names the group of each sample, such as a patient or a
            recording.
    """

    def __init__(self, column: str) -> None:
        check_types(WholeGroups.__init__, locals())
        self.column = column

    def choose(
        self, part: Positions, labels: Array, columns: Columns, wanted: int, rng: Generator
    ) -> npt.NDArray[np.bool_]:
        """Choose whole groups with about ``wanted`` samples, and leave at least one."""
        groups, codes, counts = np.unique(
            _column(columns, self.column)[part], return_inverse=True, return_counts=True
        )
        order = rng.permutation(len(groups))[:-1]
        if not len(order):
            return np.zeros(len(part), dtype=bool)
        number = int(np.abs(np.cumsum(counts[order]) - wanted).argmin()) + 1
        return np.isin(codes, order[:number])


def require_cut(value: Any) -> Cut:
    """Return ``value`` if it is a cut.

    Raises:
        TypeError: It is something else, such as a name or a class.
    """
    if not isinstance(value, Cut):
        raise TypeError(
            f"Expected `cut` to be a Cut, but got cut={value!r}. Use Stratified(), LastSamples() "
            "or WholeGroups(column) of lightning_pfl.data."
        )
    return value


def cut(
    parts: Parts,
    labels: Array,
    fraction: float,
    rng: Generator,
    how: Cut | None = None,
    columns: Columns | None = None,
) -> tuple[Parts, Parts]:
    r"""Cut a share off every client's samples.

    Of :math:`N \ge 2` samples ``round(fraction * N)`` are cut, at least one and at most
    :math:`N - 1` (whole groups: the nearest number); of one sample none.

    Args:
        parts: Positions of each client's samples.
        labels: Labels of all samples, ``(samples,)``.
        fraction: Share to cut off, in [0, 1); 0 cuts nothing.
        rng: Source of all randomness.
        how: Choice of the samples; ``None``: `Stratified`.
        columns: Further columns of all samples.

    Returns:
        The positions that stay and those that are cut off, each per client.
    """
    how = Stratified() if how is None else how
    stay, off = [], []
    for part in parts:
        count = len(part)
        taken = np.zeros(count, dtype=bool)
        if fraction > 0 and count >= 2:
            wanted = min(max(1, round(fraction * count)), count - 1)
            taken = how.choose(part, labels, columns or {}, wanted, rng)
        stay.append(part[~taken])
        off.append(part[taken])
    return stay, off


def _mask(chosen: Positions, count: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(count, dtype=bool)
    mask[chosen] = True
    return mask


def _column(columns: Columns, name: str) -> Array:
    if name not in columns:
        raise ValueError(
            f"Expected `column` to be one of the source's columns {sorted(columns)}, but got "
            f"column={name!r}. Name the column in the source and in the cut."
        )
    return columns[name]
