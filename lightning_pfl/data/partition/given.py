"""Partitions that come with the data or from another library."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.random import Generator

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.partition.base import Array, Partition, Parts, check_min_size, cut_by_shares
from lightning_pfl.data.partition.draw import class_counts
from lightning_pfl.data.partition.labels import cut_classes


class Natural(Partition):
    """One client per value of a column, such as the writer, the hospital or the device.

    Clients are sorted by value and named by it; nothing is moved between clients.

    Args:
        column: Column of the source with the client of each sample. ``None``: the only one.
        min_size: Clients with fewer samples are left out; counted before the data module cuts
            validation (and, without a test set, test) samples off.
    """

    def __init__(self, column: str | None = None, min_size: int = 1) -> None:
        check_types(Natural.__init__, locals())
        self.column = column
        self.min_size = check_min_size(min_size)

    def keys(self, labels: Array, columns: Mapping[str, Array]) -> Array:
        """Return the column that names the clients."""
        if self.column is None and len(columns) == 1:
            return next(iter(columns.values()))
        if self.column is None or self.column not in columns:
            raise ValueError(
                f"Expected `column` to be one of the source's columns {sorted(columns)}, but got "
                f"column={self.column!r}. Name the client column in the source and here."
            )
        return columns[self.column]

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Group samples by value; the plan is the array of values, one per client.

        Args:
            labels: The client column, ``(samples,)``.
            num_clients: ``None``: all clients that are large enough; otherwise this many of them,
                drawn at random.
            rng: Source of all randomness.
        """
        values, counts = np.unique(labels, return_counts=True)
        values = values[counts >= max(self.min_size, 1)]
        wanted = len(values) if num_clients is None else num_clients
        if len(values) == 0 or not 1 <= wanted <= len(values):
            raise ValueError(
                f"Expected `num_clients` to be between 1 and {len(values)}, the clients with at "
                f"least min_size={self.min_size} samples (of {len(counts)}; the largest has "
                f"{counts.max(initial=0)}), but got num_clients={num_clients!r}. "
                "Lower min_size or num_clients; None takes all of them."
            )
        if wanted < len(values):
            values = values[np.sort(rng.choice(len(values), wanted, replace=False))]
        return self.apply(labels, values, rng), values

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Group samples by the same values; clients without test samples are empty."""
        order = np.argsort(labels, kind="stable")
        start = np.searchsorted(labels, plan, side="left", sorter=order)
        end = np.searchsorted(labels, plan, side="right", sorter=order)
        return [order[a:b].astype(np.int64) for a, b in zip(start, end, strict=True)]

    def names(self, plan: Any) -> tuple[str, ...]:
        """Return the values as names."""
        return tuple(str(value) for value in plan)


class FlowerPartitioner(Partition):
    """A partitioner of flwr-datasets.

    The partitioner sees a table with one row per training sample and one column to split by,
    ``label_column``; its own seed decides the draw. Flower partitioners can't split a second set,
    so the test samples of each class, or of each value of that column, are divided in proportion
    to the clients' training samples.

    Args:
        partitioner: Object with the attributes ``dataset`` (is assigned), ``num_partitions`` and
            ``load_partition(partition_id)``. A copy is used.
        label_column: The column that the partitioner expects (its ``partition_by``): a column of
            the source, such as the client of a table, otherwise the labels.
    """

    def __init__(self, partitioner: Any, label_column: str = "label") -> None:
        if not callable(getattr(partitioner, "load_partition", None)):
            raise TypeError(
                "Expected `partitioner` to be a flwr-datasets partitioner with `load_partition`, "
                f"but got {type(partitioner).__name__}. Pass for example "
                "flwr_datasets.partitioner.IidPartitioner(num_partitions=10)."
            )
        self.partitioner = partitioner
        self.label_column = label_column

    def keys(self, labels: Array, columns: Mapping[str, Array]) -> Array:
        """Return the source's column of that name, or the labels."""
        return columns.get(self.label_column, labels)

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Let the partitioner split the samples; the plan holds counts per class and client."""
        parts = self._load(labels, num_clients)
        if labels.dtype.kind == "f":
            return parts, np.array([len(part) for part in parts])
        classes, counts = class_counts(parts, labels)
        held = {k: v for k, v in zip(classes.tolist(), counts, strict=True) if v.sum() > 0}
        return parts, held

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Divide each class in proportion to the clients' training samples of it.

        Regression targets have no classes: all samples follow the clients' training sizes.
        """
        if isinstance(plan, np.ndarray):
            return cut_by_shares(rng.permutation(len(labels)), plan)
        return cut_classes(labels, plan, rng)

    def _load(self, labels: Array, num_clients: int | None) -> Parts:
        """Load the positions of each of the partitioner's clients."""
        from datasets import Dataset

        # flwr-datasets lets a dataset be assigned only once, hence the copy.
        partitioner = copy.deepcopy(self.partitioner)
        try:
            partitioner.dataset = Dataset.from_dict(
                {self.label_column: labels, "position": np.arange(len(labels))}
            )
            clients = partitioner.num_partitions
            if num_clients in (None, clients):
                return [
                    np.asarray(list(partitioner.load_partition(k)["position"]), dtype=np.int64)
                    for k in range(clients)
                ]
        except Exception as error:  # any exception of another library
            raise ValueError(
                f"Expected `partitioner` to split a table with the columns {self.label_column!r} "
                f"and 'position', but {type(partitioner).__name__} raised: "
                f"{str(error).rstrip('. ')}. Set label_column to its partition_by, or change its "
                "settings."
            ) from error
        raise ValueError(
            f"Expected `num_clients` to be the partitioner's num_partitions={clients}, but got "
            f"{num_clients=}. Leave num_clients out."
        )
