"""The pairs of clients that a penalty couples: all of them, or the edges of a sparse graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_pfl.graphs import Graph


@dataclass(frozen=True)
class Pairs:
    """Ordered pairs (i, j): slot ``s`` of client ``i`` is the pair with ``neighbours[i, s]``.

    Variables of pairs are tensors ``(clients, slots, dim)``, zero where ``mask`` is False.

    Attributes:
        neighbours: Ids, int64 ``(clients, slots)``.
        mask: Which slots are pairs, bool ``(clients, slots)``.
        reverse: The slot of the pair (j, i) in the row of ``j``, int64 ``(clients, slots)``.
        weights: Factor of each pair's penalty, float64 ``(clients, slots)``, 0 where there is none.
    """

    neighbours: Tensor
    mask: Tensor
    reverse: Tensor
    weights: Tensor

    @classmethod
    def complete(cls, clients: int) -> Pairs:
        """All pairs with weight 1; slot ``j`` of every client is client ``j``.

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
        """The edges of a graph, in both directions."""
        return cls(graph.neighbours, graph.mask, graph.reverse, graph.slot_weights)

    @classmethod
    def weighted(cls, adjacency: Tensor) -> Pairs:
        """All pairs with the weights of a symmetric matrix ``(clients, clients)``.

        Pairs of weight 0 are none; the diagonal doesn't count.
        """
        pairs = cls.complete(len(adjacency))
        mask = pairs.mask & (adjacency != 0)
        return replace(pairs, mask=mask, weights=torch.where(mask, adjacency.double(), 0.0))

    def among(self, members: Tensor) -> Pairs:
        """Only the pairs of which both are members, bool ``(clients,)``."""
        mask = self.mask & members.unsqueeze(1) & members[self.neighbours]
        return replace(self, mask=mask, weights=torch.where(mask, self.weights, 0.0))

    def to(self, device: torch.device | str) -> Pairs:
        """The same on another device."""
        return Pairs(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def rows(self, clients: Tensor) -> Pairs:
        """The pairs (i, j) of some clients i."""
        return Pairs(*(getattr(self, name)[clients] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.neighbours)

    @property
    def slots(self) -> int:
        """Slots of a client."""
        return self.neighbours.shape[1]

    @property
    def degree(self) -> Tensor:
        """Pairs (i, j) of each client i, int64 ``(clients,)``."""
        return self.mask.sum(1)

    @property
    def count(self) -> int:
        """Ordered pairs altogether."""
        return int(self.mask.sum())

    def opposite(self, values: Tensor) -> Tensor:
        """At (i, j) the value of (j, i), ``(clients, slots, dim)``; zero where there is no pair."""
        found = values[self.neighbours, self.reverse]
        return torch.where(self.mask.unsqueeze(2), found, 0.0)

    def incoming(self, values: Tensor) -> Tensor:
        """At i the sum of the values of (j, i) over j, ``(clients, dim)``."""
        if self.slots == len(self):
            # Slots are clients: no second tensor of the size of all pairs.
            return values.sum(0)
        return self.opposite(values).sum(1)
