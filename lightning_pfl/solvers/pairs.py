"""The pairs of clients that a penalty couples: all pairs, or the edges of a graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send
from lightning_pfl.graphs import Graph


@dataclass(frozen=True)
class Pairs:
    """Ordered pairs (i, j): slot ``s`` of client ``i`` is the pair with ``neighbours[i, s]``.

    Variables of pairs are tensors ``(clients, slots, dim)``, zero where ``mask`` is False.

    Attributes:
        neighbours: Ids, int64 ``(clients, slots)``.
        mask: Which slots are pairs, bool ``(clients, slots)``.
        reverse: Slot of the pair (j, i) in the row of ``j``, int64 ``(clients, slots)``.
        weights: Factor of each pair's penalty, float64 ``(clients, slots)``, 0 without a pair.
    """

    neighbours: Tensor
    mask: Tensor
    reverse: Tensor
    weights: Tensor

    @classmethod
    def complete(cls, clients: int) -> Pairs:
        """Make all pairs with weight 1; slot ``j`` of every client is client ``j``.

        Example:
            >>> Pairs.complete(3).count
            6
        """
        ids = torch.arange(clients)
        mask = ~torch.eye(clients, dtype=torch.bool)
        square = (clients, clients)
        return cls(ids.expand(square), mask, ids.unsqueeze(1).expand(square), mask.double())

    @classmethod
    def of_graph(cls, graph: Graph) -> Pairs:
        """Take the edges of a graph, in both directions."""
        return cls(graph.neighbours, graph.mask, graph.reverse, graph.slot_weights)

    @classmethod
    def weighted(cls, adjacency: Tensor) -> Pairs:
        """Make all pairs with a nonzero weight in a symmetric matrix ``(clients, clients)``.

        The diagonal is ignored.
        """
        pairs = cls.complete(len(adjacency))
        mask = pairs.mask & (adjacency != 0)
        return replace(pairs, mask=mask, weights=torch.where(mask, adjacency.double(), 0.0))

    def among(self, members: Tensor) -> Pairs:
        """Keep the pairs of two members, bool ``(clients,)``."""
        mask = self.mask & members.unsqueeze(1) & members[self.neighbours]
        return replace(self, mask=mask, weights=torch.where(mask, self.weights, 0.0))

    def to(self, device: torch.device | str) -> Pairs:
        """Move the tensors to another device."""
        return Pairs(*(send(getattr(self, name), device) for name in self.__dataclass_fields__))

    def rows(self, clients: Tensor) -> Pairs:
        """Select the pairs (i, j) of some clients i."""
        return Pairs(*(getattr(self, name)[clients] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.neighbours)

    @property
    def slots(self) -> int:
        """Number of slots of a client."""
        return self.neighbours.shape[1]

    @property
    def degree(self) -> Tensor:
        """Count the pairs (i, j) of each client i, int64 ``(clients,)``."""
        return self.mask.sum(1)

    @property
    def count(self) -> int:
        """Count all ordered pairs."""
        return int(self.mask.sum())

    def opposite(self, values: Tensor) -> Tensor:
        """Map values of (j, i) to (i, j), ``(clients, slots, dim)``; zero without a pair."""
        found = values[self.neighbours, self.reverse]
        return torch.where(self.mask.unsqueeze(2), found, 0.0)

    def incoming(self, values: Tensor) -> Tensor:
        """Sum the values of (j, i) over j at each i, ``(clients, dim)``."""
        if self.slots == len(self):
            # Slots are clients: saves a second tensor of the size of all pairs.
            return values.sum(0)
        return self.opposite(values).sum(1)
