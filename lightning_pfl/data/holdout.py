"""Cuts of validation and test samples out of each client's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_pfl.data.partition import Parts


def cut(
    parts: Parts, labels: npt.NDArray[Any], fraction: float, rng: np.random.Generator
) -> tuple[Parts, Parts]:
    r"""Cut a stratified share off every client's samples.

    Of :math:`N \ge 2` samples ``round(fraction * N)`` are cut, at least one and at most
    :math:`N - 1`; of one sample none. The samples are sorted by label (at random within a label)
    and cut at even distances from a random start, so every class, or every range of a regression
    target, is represented up to one sample.

    Args:
        parts: Positions of each client's samples.
        labels: Labels of all samples, ``(samples,)``.
        fraction: Share to cut off, in [0, 1); 0 cuts nothing.
        rng: Source of all randomness.

    Returns:
        The positions that stay and those that are cut off, each per client.
    """
    stay, off = [], []
    for part in parts:
        taken = _systematic(labels[part], fraction, rng)
        stay.append(part[~taken])
        off.append(part[taken])
    return stay, off


def _systematic(
    labels: npt.NDArray[Any], fraction: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Choose samples at even distances along the sorted labels, as a mask."""
    count = len(labels)
    mask = np.zeros(count, dtype=bool)
    if fraction == 0 or count < 2:
        return mask
    wanted = min(max(1, round(fraction * count)), count - 1)
    shuffled = rng.permutation(count)
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    places = (np.arange(wanted) + rng.random()) * (count / wanted)
    # Steps are longer than 1, so positions differ; rounding could lift the last one to `count`.
    mask[order[np.minimum(places.astype(np.int64), count - 1)]] = True
    return mask
