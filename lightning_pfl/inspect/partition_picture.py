"""PartitionPicture: the distribution of samples over clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning as L
import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.core.checks import check_choice
from lightning_pfl.data.datasets import (
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
    label_counts,
)
from lightning_pfl.data.partition.draw import draw
from lightning_pfl.inspect.board import (
    PictureCallback,
    new_figure,
    show,
    takes_pictures,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Split = Literal["train", "val", "test"]


class PartitionPicture(PictureCallback):
    """Draws each client's samples by class at the start of a fit.

    A map of classes and clients for class labels, else the clients' sizes, under
    ``partition/<split>`` in TensorBoard. A :class:`~lightning_pfl.FederatedDataModule` has labels,
    and its new clients are at the right. Of other resident data the second field is the label.
    DataLoaders only have sizes.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``; the last two need a FederatedDataModule.
        labels: A function from the fields of a :class:`~lightning_pfl.data.FederatedTensorDataset`
            to labels, ``(samples,)``; None for the second field.

    Raises:
        ValueError: If ``split`` is unknown, or the run's data don't have it.
        MisconfigurationException: At the start of a run without a logger.

    Example:
        >>> PartitionPicture("test").split
        'test'
    """

    def __init__(
        self, split: Split = "train", labels: Callable[[Any], Tensor] | None = None
    ) -> None:
        check_choice("split", split, get_args(Split), "Choose one of the three.")
        self.split, self.labels = split, labels

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the partition."""
        if not takes_pictures(trainer):
            return
        figure, axes = new_figure()
        loop: Any = trainer.fit_loop
        source: Any = getattr(trainer, "datamodule", None)
        if self.labels is None and hasattr(source, "draw"):
            source.draw(self.split, axes)
        elif self.split == "train":
            draw_dataset(loop.require_data(), axes, self.labels)
        else:
            raise ValueError(
                f"Expected split='train' without a FederatedDataModule, but got "
                f"split={self.split!r}. Use 'train', or a FederatedDataModule."
            )
        axes.set_title(f"who holds what ({self.split})")
        show(trainer, f"partition/{self.split}", figure, 0)


def draw_dataset(
    data: FederatedDataset, axes: Axes, labels: Callable[[Any], Tensor] | None = None
) -> None:
    """Draw the samples of a federated dataset's clients.

    Args:
        data: The split.
        axes: Axes to draw on.
        labels: From fields to labels; None for the second field, if there is one per sample.
    """
    if isinstance(data, FederatedLoaders):
        sizes = data.num_samples.tolist()
        # One floating-point label makes `draw` show sizes.
        draw([np.zeros(size, dtype=np.int64) for size in sizes], np.zeros(1), axes, data.names)
        return
    if data.held is not None:
        _draw_counts(data, axes, labels)
        return
    parts = [positions.cpu().numpy() for positions in data.indices]
    found = labels(data.fields) if labels is not None else _second(data.fields)
    shown = np.zeros(data.pool_size) if found is None else found.cpu().numpy()
    draw(parts, shown, axes, data.names)


def _draw_counts(
    data: FederatedTensorDataset, axes: Axes, labels: Callable[[Any], Tensor] | None
) -> None:
    """Draw clients whose samples are in several processes, from their numbers."""
    if labels is not None:
        raise MisconfigurationException(
            "Expected PartitionPicture without `labels` where each process has the samples of its "
            "own clients alone, but got a function. Leave it out, or use split_data=False."
        )
    counts = label_counts(data)
    if counts is None:  # sizes; one floating-point label makes `draw` show them
        sizes = [np.zeros(size, dtype=np.int64) for size in data.num_samples]
        draw(sizes, np.zeros(1), axes, data.names)
        return
    classes = np.arange(counts.shape[1])
    draw([np.repeat(classes, row) for row in counts.numpy()], classes, axes, data.names)


def _second(fields: Any) -> Tensor | None:
    """Return the second field if it can be a label."""
    if isinstance(fields, (tuple, list)) and len(fields) > 1 and isinstance(fields[1], Tensor):
        return fields[1] if fields[1].ndim == 1 else None
    return None
