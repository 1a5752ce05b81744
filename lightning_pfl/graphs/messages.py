"""Messages between neighbours over the edges of a graph, without a server.

A method whose clients send messages to neighbours has a ``graph``, set in ``bind``, and lists a
round's exchanges in ``exchanges(round)``, in temporal order, before or after local
training. For each, ``send`` returns the messages and ``receive`` the new client state; both are
pure functions on a leading client axis. By the exchange's ``to``:

- ``"each"``: ``send`` returns ``(clients, slots, ...)``, a message of its own for each neighbour;
  the inbox has that shape, zeros where a neighbour doesn't take part.
- ``"all"``: ``send`` returns ``(clients, ...)``, the same for all neighbours; the inbox has
  ``(clients, slots, ...)``.
- ``"sum"``: ``send`` returns ``(clients, ...)``, and the inbox has the sums weighted by the edges,
  float64 ``(clients, ...)``, from one sparse matrix product: the difference to a client's own model
  is small, and would be lost in the rounding of the sums.

Slot ``s`` of client ``i`` belongs to the neighbour ``graph.neighbours[i, s]``. Only clients of the
cohort whose uploads were accepted send and receive. What travels is exactly what ``send`` returns,
once for each neighbour that takes part; where messages are padded to a common shape,
``message_nbytes`` returns their real sizes.

State of edges (maps, dual variables) has leaves ``(clients, slots, ...)`` and is named in
``edge_state``: only ``send`` and ``receive`` see it, so that engines and evaluation never copy what
may be the largest part of a client's state. State that differs between clients from the start comes
from ``init_client_state_rows``. Messages must have one shape in all architectures, which is checked
before the first round; ``model_sizes`` has the trainable scalars of each client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Tree, leaves, rows, tmap
from lightning_pfl.graphs import Graph
from lightning_pfl.graphs.graph import sparse_square


@dataclass(frozen=True)
class Exchange:
    """An exchange of messages between the clients of a cohort and their neighbours.

    Args:
        name: Name of the exchange, an argument of ``send`` and ``receive``.
        to: ``"each"``: a different message for each neighbour; ``"all"``: one message for all of
            them; ``"sum"``: one message for all, of which a receiver only needs the sum weighted
            by the edges.
        when: ``"before"`` or ``"after"`` local training.
    """

    name: str
    to: Literal["each", "all", "sum"] = "each"
    when: Literal["before", "after"] = "after"


@dataclass
class ReceivedMessages:
    """The messages that a cohort's clients received from their neighbours.

    Attributes:
        messages: For ``"each"`` and ``"all"`` ``(clients, slots, ...)``: slot ``s`` of client ``i``
            has the message of ``graph.neighbours[i, s]``, or zeros where that client doesn't
            participate; for ``"sum"`` ``(clients, ...)``.
        weights: Weights of the edges to participating neighbours, float64 ``(clients, slots)``; 0
            elsewhere.
        sent: The clients' own messages, as ``send`` returned them.
    """

    messages: Tree
    weights: Tensor
    sent: Tree = field(default_factory=dict)

    def rows(self, index: slice | Tensor) -> ReceivedMessages:
        """Select some of the clients."""
        trees = {"messages": self.messages, "weights": {"": self.weights}, "sent": self.sent}
        found = rows(trees, index)
        return ReceivedMessages(found["messages"], found["weights"][""], found["sent"])


class PeerExchange:
    """Delivery of messages within a cohort.

    Args:
        graph: The graph of all clients.
        clients: Ids of the cohort, int64 ``(clients,)``.
        device: Device of the messages.
    """

    def __init__(self, graph: Graph, clients: Tensor, device: torch.device | str) -> None:
        neighbours = graph.neighbours[clients]
        position = torch.full((len(graph.neighbours),), -1, dtype=torch.int64)
        position[clients] = torch.arange(len(clients))
        sender = position[neighbours]
        self.present = send(graph.mask[clients] & (sender >= 0), device)
        self.sender = send(sender.clamp_min(0), device)
        self.reverse = send(graph.reverse[clients], device)
        weights = send(graph.slot_weights[clients], device)
        self.weights = torch.where(self.present, weights, 0.0)

    def deliver(self, exchange: Exchange, sent: Tree) -> ReceivedMessages:
        """Deliver the messages to the neighbours.

        Args:
            exchange: The exchange.
            sent: ``(clients, slots, ...)`` for ``"each"``, else ``(clients, ...)``.
        """
        bring = {"each": self._each, "all": self._all, "sum": self._sum}[exchange.to]
        return ReceivedMessages(tmap(bring, sent), self.weights, sent)

    def nbytes(self, exchange: Exchange, sent: Tree, sizes: Tensor | None) -> int:
        """Count the bytes of all delivered messages.

        Args:
            exchange: The exchange.
            sent: As for :meth:`deliver`.
            sizes: Bytes of the message in each slot, int64 ``(clients, slots)``, where sizes
                differ; None for the size of the tensors in ``sent``.
        """
        if sizes is not None:
            return int((send(sizes, self.present.device) * self.present).sum())
        axes = 2 if exchange.to == "each" else 1
        size = sum(leaf.shape[axes:].numel() * leaf.element_size() for leaf in leaves(sent))
        return int(self.present.sum()) * size

    def _each(self, leaf: Tensor) -> Tensor:
        slots = leaf.shape[1]
        found = leaf.flatten(0, 1).index_select(0, (self.sender * slots + self.reverse).flatten())
        return self._masked(found.view(*self.sender.shape, *leaf.shape[2:]))

    def _all(self, leaf: Tensor) -> Tensor:
        found = leaf.index_select(0, self.sender.flatten())
        return self._masked(found.view(*self.sender.shape, *leaf.shape[1:]))

    def _sum(self, leaf: Tensor) -> Tensor:
        """Sum by one sparse matrix product for all clients and edges."""
        flat = leaf.reshape(len(leaf), -1).double()
        mixed: Tensor = torch.sparse.mm(self.mixing, flat)
        return mixed.view(leaf.shape)

    @cached_property
    def mixing(self) -> Tensor:
        """Weights of senders (columns) for receivers (rows), sparse ``(clients, clients)``."""
        who, slot = self.present.nonzero(as_tuple=True)
        place = torch.stack([who, self.sender[who, slot]])
        return sparse_square(place, self.weights[who, slot], len(self.present))

    def _masked(self, found: Tensor) -> Tensor:
        shape = (*self.present.shape, *[1] * (found.ndim - 2))
        return torch.where(self.present.view(shape), found, torch.zeros_like(found))
