"""Clients with consecutive classes and log-normal sizes, as FedRep's FEMNIST letters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator

from lightning_pfl.core.checks import is_integer, is_number
from lightning_pfl.data.partition.base import (
    Array,
    Partition,
    Parts,
    Positions,
    check_classes,
    check_clients,
    check_positive,
    cut_by_shares,
)
from lightning_pfl.data.partition.labels import cut_classes


class ConsecutiveClasses(Partition):
    r"""Client :math:`u` holds the classes :math:`u, u + 1, \dots, u + S - 1` modulo their number.

    A client's size is :math:`e^{\mu + \sigma z} + b` with standard normal :math:`z`; it gets
    :math:`1/S` of it, rounded, from each of its classes, at random. Clients share no samples.
    Where a class is too small, each client gets the same fraction of its demand; where it is too
    large, the rest is left out. A test set is split completely, in the proportions of the training
    set.

    Args:
        classes_per_client: :math:`S`, between 1 and the number of classes.
        log_mean: :math:`\mu`, mean of the logarithm of the random part of a size.
        log_std: :math:`\sigma > 0`, its standard deviation.
        smallest: :math:`b \ge 0`, smallest size in samples.

    Deviation from the paper: FedRep's released code starts again in a class for each client, so
    that many clients have the same images, in training and test sets. Here no two do.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, section 5 and its released code.

    Example:
        >>> labels = np.arange(4000) % 10
        >>> parts = ConsecutiveClasses(3, log_mean=2.0)(labels, 8, np.random.default_rng(0))
        >>> np.unique(labels[parts[7]])
        array([7, 8, 9])
    """

    def __init__(
        self,
        classes_per_client: int = 3,
        log_mean: float = 4.0,
        log_std: float = 1.0,
        smallest: int = 100,
    ) -> None:
        if not is_integer(classes_per_client, 0):
            raise ValueError(
                f"Expected `classes_per_client` to be a positive int, but got {classes_per_client=}"
                ". Use 3 as in the paper."
            )
        if not is_number(log_mean) or not np.isfinite(log_mean):
            raise ValueError(
                f"Expected `log_mean` to be a finite number, but got {log_mean=}. Use 4."
            )
        if not is_integer(smallest, 0):
            raise ValueError(
                f"Expected `smallest` to be a non-negative int, but got {smallest=}. Use 0 for "
                "log-normal sizes."
            )
        self.classes_per_client = classes_per_client
        self.log_mean, self.log_std = float(log_mean), check_positive("log_std", log_std)
        self.smallest = smallest

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Draw the sizes, the plan ``{class: (num_clients,) samples wanted}``, and deal out."""
        clients = check_clients(len(labels), num_clients)
        classes = check_classes(labels, "ConsecutiveClasses")
        if not 1 <= self.classes_per_client <= len(classes):
            raise ValueError(
                "Expected `classes_per_client` to be between 1 and the number of classes "
                f"({len(classes)}), but got classes_per_client={self.classes_per_client}. "
                "Use another number."
            )
        sizes = np.exp(self.log_mean + self.log_std * rng.standard_normal(clients)) + self.smallest
        each = np.maximum(np.rint(sizes / self.classes_per_client), 1).astype(np.int64)
        plan: dict[Any, Positions] = {}
        for number, label in enumerate(classes.tolist()):
            behind = (number - np.arange(clients)) % len(classes)
            wanted = np.where(behind < self.classes_per_client, each, 0)
            if wanted.any():
                plan[label] = wanted
        return self._deal(labels, plan, rng), plan

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Cut every class in the proportions of the plan; classes of no client are left out."""
        return cut_classes(labels, plan, rng)

    def _deal(self, labels: Array, plan: dict[Any, Positions], rng: Generator) -> Parts:
        """Assign samples to every client as demanded, or the same fraction of all demands."""
        pieces: list[list[Positions]] = []
        for label, wanted in plan.items():
            order = rng.permutation(np.nonzero(labels == label)[0])
            owners = int((wanted > 0).sum())
            if len(order) < owners:
                raise ValueError(
                    "Expected every class to have at least one sample per client that holds it, "
                    f"but got {len(order)} samples of class {label!r} for {owners} clients. "
                    "Use fewer clients or fewer classes per client."
                )
            pieces.append(cut_by_shares(order[: wanted.sum()], wanted))
        return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
