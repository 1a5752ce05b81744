"""New clients with classes that no other client has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.data.partition.base import (
    Array,
    Partition,
    Parts,
    Positions,
    check_classes,
    check_clients,
)
from lightning_pfl.data.partition.check import require_partition
from lightning_pfl.data.partition.labels import ClassesPerClient
from lightning_pfl.data.partition.sizes import IID


@dataclass(frozen=True)
class HeldOutPlan:
    """Plan of `HeldOutClasses`: the plans of old and of new clients."""

    base: Any
    new: Any


class HeldOutClasses(Partition):
    """A partition that reserves some classes for the last clients; ``base`` splits the others.

    For `NewClientAdaptation`: with the same number in ``FederatedDataModule(new_clients=...)``, no
    client that takes part in a round has the new clients' classes. These are split over the new
    clients at random, in equal numbers.

    Args:
        classes: The labels of the new clients.
        new_clients: Number of new clients, the last ones, at least 1.
        base: Partition of the other classes over the other clients, by labels. ``None``:
            `ClassesPerClient`.

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, Figure 6.

    Example:
        >>> partition = HeldOutClasses([2, 3], new_clients=1)
        >>> parts = partition(np.arange(40) % 4, 3, np.random.default_rng(0))
        >>> [np.unique(part % 4).tolist() for part in parts][-1]
        [2, 3]
    """

    def __init__(
        self, classes: Sequence[int], new_clients: int, base: Partition | None = None
    ) -> None:
        check_types(HeldOutClasses.__init__, {"classes": classes})
        if not classes or len(set(classes)) < len(classes):
            raise ValueError(
                f"Expected `classes` to be different labels, but got {classes=}. Give the classes "
                "of the new clients."
            )
        if isinstance(new_clients, bool) or not isinstance(new_clients, int) or new_clients < 1:
            raise ValueError(
                f"Expected `new_clients` to be a positive int, but got {new_clients=}. Use the "
                "`new_clients` of the data module."
            )
        self.classes = tuple(classes)
        self.new_clients = new_clients
        self.base = ClassesPerClient() if base is None else require_partition("base", base)
        self.rest = IID()

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Split old and new classes over old and new clients."""
        clients = check_clients(len(labels), num_clients)
        known = check_classes(labels, "HeldOutClasses")
        unknown = sorted(set(self.classes) - set(known.tolist()))
        if unknown or len(self.classes) == len(known):
            raise ValueError(
                f"Expected `classes` to be some of the labels {known.tolist()[:20]}, but got "
                f"classes={list(self.classes)}. Leave at least one to the other clients."
            )
        if clients <= self.new_clients:
            raise ValueError(
                f"Expected more clients than the {self.new_clients} new ones, but got "
                f"num_clients={clients}. The number includes the new clients."
            )
        old, new = self._groups(labels)
        old_parts, base = self.base.split(labels[old], clients - self.new_clients, rng)
        new_parts, rest = self.rest.split(labels[new], self.new_clients, rng)
        return _positions(old, old_parts) + _positions(new, new_parts), HeldOutPlan(base, rest)

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Split old and new classes by their plans."""
        old, new = self._groups(labels)
        old_parts = self.base.apply(labels[old], plan.base, rng)
        new_parts = self.rest.apply(labels[new], plan.new, rng)
        return _positions(old, old_parts) + _positions(new, new_parts)

    def _groups(self, labels: Array) -> tuple[Positions, Positions]:
        """Positions of the samples of old classes, and of the held-out ones."""
        held_out = np.isin(labels, self.classes)
        return np.nonzero(~held_out)[0], np.nonzero(held_out)[0]


def _positions(group: Positions, parts: Parts) -> Parts:
    return [group[part] for part in parts]
