"""A picture of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_pfl.data.partition.base import Array, Positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def class_counts(parts: Sequence[Positions], labels: Array) -> tuple[Array, Positions]:
    """Count samples per class and client.

    Returns:
        The classes, ``(classes,)``, and the counts, ``(classes, clients)``.
    """
    classes, codes = np.unique(labels, return_inverse=True)
    counts = [np.bincount(codes[part], minlength=len(classes)) for part in parts]
    return classes, np.stack(counts, axis=1)


NAMED = 40
"""With more clients there is no room for their names."""


def draw(
    parts: Sequence[Positions], labels: Array, ax: Axes | None = None, names: Sequence[str] = ()
) -> Axes:
    """Plot the number of samples of each class at every client.

    Class labels make a map of counts (classes upwards, clients to the right); floating-point
    targets a bar of each client's size.

    Args:
        parts: Positions of each client's samples.
        labels: Labels of all samples, ``(samples,)``.
        ax: Axes to draw on. ``None``: new ones.
        names: The clients' names; shown if they aren't positions, and there is room.

    Returns:
        The axes, for titles and saving (``ax.figure.savefig``).
    """
    from matplotlib.ticker import MaxNLocator

    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    labels = np.asarray(labels)
    ax.set_xlabel("client")
    positions = [str(k) for k in range(len(names))]
    if len(names) <= NAMED and list(names) != positions:
        ax.set_xticks(np.arange(len(names)), names, rotation=90, fontsize=7)
    else:
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    if labels.dtype.kind == "f":
        ax.bar(np.arange(len(parts)), [len(part) for part in parts])
        ax.set_ylabel("samples")
        return ax
    classes, counts = class_counts(parts, labels)
    # Interpolation would smear narrow columns of clients into each other.
    look: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "interpolation": "nearest"}
    image = ax.imshow(counts, aspect="auto", origin="lower", **look)
    if len(classes) <= 30:
        ax.set_yticks(np.arange(len(classes)), [str(label) for label in classes])
    ax.set_ylabel("class")
    ax.figure.colorbar(image, ax=ax, label="samples")
    return ax
