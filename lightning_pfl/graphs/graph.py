"""Graph: the clients' neighbours as padded tensors, for batched programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import networkx

DENSE = 500
"""Largest number of clients whose eigenvalues are computed from the dense matrix."""


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected graph with positive edge weights and without loops.

    A client's neighbours fill its *slots* in ascending order; clients with fewer neighbours than
    the largest number have empty slots at the end.

    Attributes:
        edges: Both ends of each edge, the smaller id first, int64 ``(2, edges)``.
        edge_weights: Weights of the edges, positive, float64 ``(edges,)``.
        neighbours: Client id in each slot, 0 in an empty one, int64 ``(clients, slots)``.
        mask: Which slots hold a neighbour, bool ``(clients, slots)``.
        reverse: The slot of client ``i`` among the slots of its neighbour, int64 ``(clients,
            slots)``.
        slot_weights: Weight of the edge to each neighbour, 0 in an empty slot, float64 ``(clients,
            slots)``.

    Example:
        >>> edges = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 3]])
        >>> graph = Graph.of(4, edges, torch.ones(4))
        >>> graph.neighbours.tolist()
        [[1, 3], [0, 2], [1, 3], [0, 2]]
        >>> graph.reverse.tolist()
        [[0, 0], [0, 0], [1, 1], [1, 1]]
    """

    edges: Tensor
    edge_weights: Tensor
    neighbours: Tensor
    mask: Tensor
    reverse: Tensor
    slot_weights: Tensor

    @classmethod
    def of(cls, clients: int, edges: Tensor, weights: Tensor) -> Graph:
        """Build a graph from valid edges.

        Args:
            clients: Number of clients.
            edges: Distinct pairs of different ids, int64 ``(2, edges)``.
            weights: Weights of the edges, positive, ``(edges,)``.
        """
        edges = edges.sort(0).values
        order = torch.argsort(edges[0] * clients + edges[1])
        edges, weights = edges[:, order], weights.double()[order]
        # Both directions, sorted by the client that owns the slot.
        here, there = torch.cat([edges, edges.flip(0)], 1)
        order = torch.argsort(here * clients + there)
        here, there, both = here[order], there[order], torch.cat([weights, weights])[order]
        counts = torch.bincount(here, minlength=clients)
        slots = int(counts.max()) if clients else 0
        slot = torch.arange(len(here)) - (counts.cumsum(0) - counts)[here]
        neighbours = torch.zeros(clients, slots, dtype=torch.int64)
        mask = torch.zeros(clients, slots, dtype=torch.bool)
        reverse, slot_weights = torch.zeros_like(neighbours), torch.zeros(clients, slots).double()
        neighbours[here, slot], mask[here, slot], slot_weights[here, slot] = there, True, both
        # The opposite of the k-th pair (i, j) is the position of (j, i) in sorted order.
        opposite = torch.searchsorted(here * clients + there, there * clients + here)
        reverse[here, slot] = slot[opposite]
        return cls(edges, weights, neighbours, mask, reverse, slot_weights)

    def __len__(self) -> int:
        return len(self.neighbours)

    @property
    def degree(self) -> Tensor:
        """Sum each client's edge weights, float64 ``(clients,)``."""
        return self.slot_weights.sum(1)

    @property
    def rows(self) -> Tensor:
        """Both ends and the weight of each edge as rows, float64 ``(edges, 3)``."""
        return torch.cat([self.edges.double(), self.edge_weights.unsqueeze(0)]).T

    def adjacency(self) -> Tensor:
        """Build the symmetric sparse weight matrix, float64 ``(clients, clients)``."""
        both = torch.cat([self.edges, self.edges.flip(0)], 1)
        weights = torch.cat([self.edge_weights, self.edge_weights])
        return sparse_square(both, weights, len(self))

    def laplacian(self) -> Tensor:
        """Build the sparse Laplacian, degrees minus weights, positive semidefinite, float64."""
        ids = torch.arange(len(self)).expand(2, -1)
        return (sparse_square(ids, self.degree, len(self)) - self.adjacency()).coalesce()

    @cached_property
    def largest_eigenvalue(self) -> float:
        """Largest eigenvalue of the Laplacian, which bounds stable step sizes over the graph.

        Of more than :data:`DENSE` clients to about five digits, from below.
        """
        from scipy.sparse import coo_matrix
        from scipy.sparse.linalg import eigsh

        matrix = self.laplacian()
        if len(self) <= DENSE:
            return float(torch.linalg.eigvalsh(matrix.to_dense())[-1]) if len(self) else 0.0
        index, shape = matrix.indices().numpy(), tuple(matrix.shape)
        sparse = coo_matrix((matrix.values().numpy(), (index[0], index[1])), shape=shape)
        start = np.ones(len(self)) + np.arange(len(self)) / len(self)  # the same in every run
        # Exact, it would take a number of products that grows with the clients, where the largest
        # eigenvalues lie close together, as on a ring.
        found = eigsh(sparse.tocsr(), k=1, v0=start, return_eigenvectors=False, tol=1e-4)
        return float(found[0])

    @cached_property
    def components(self) -> int:
        """Number of connected components."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        ends = self.edges.numpy()
        matrix = coo_matrix((np.ones(ends.shape[1]), (ends[0], ends[1])), (len(self), len(self)))
        return int(connected_components(matrix, directed=False, return_labels=False))

    def to_networkx(self) -> networkx.Graph:
        """Convert to a networkx graph with the edge attribute ``weight``."""
        import networkx

        graph = networkx.Graph()
        graph.add_nodes_from(range(len(self)))
        ends = self.edges.T.tolist()
        for (i, j), weight in zip(ends, self.edge_weights.tolist(), strict=True):
            graph.add_edge(i, j, weight=weight)
        return graph


def sparse_square(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Build a coalesced sparse matrix ``(size, size)``; duplicate entries are summed.

    Args:
        index: Rows and columns, int64 ``(2, entries)``.
        values: Values of the entries, ``(entries,)``.
        size: Number of rows and of columns.
    """
    # The entries are valid; without the argument torch warns that the check is undecided.
    matrix = torch.sparse_coo_tensor(index, values, (size, size), check_invariants=False)
    return matrix.coalesce()
