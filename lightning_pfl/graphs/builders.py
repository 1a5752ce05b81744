"""Builders of named families of graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from lightning_pfl.core.checks import check_integer, is_integer, is_number
from lightning_pfl.core.randomness import derive

TRIES = 1000
"""Number of draws in search of a connected graph."""


class GraphBuilder(ABC):
    """A family of graphs for any number of clients; subclass it for a family of your own."""

    @abstractmethod
    def __call__(self, num_clients: int, seed: int) -> Any:
        """Build a networkx graph with the nodes ``0..num_clients-1``, or an adjacency matrix."""

    def __repr__(self) -> str:
        """Return the call that makes the builder, with the shapes of its arrays."""
        given = ", ".join(
            f"{name}=<{type(value).__name__} {tuple(value.shape)}>"
            if hasattr(value, "shape")
            else f"{name}={value!r}"
            for name, value in vars(self).items()
        )
        return f"{type(self).__name__}({given})"


class Complete(GraphBuilder):
    """The graph of all pairs of clients."""

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Build the complete graph."""
        import networkx

        return networkx.complete_graph(num_clients)


class Ring(GraphBuilder):
    """A ring in the order of the client ids."""

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Build the cycle."""
        import networkx

        # networkx gives a single node an edge to itself.
        return networkx.cycle_graph(num_clients) if num_clients > 1 else networkx.empty_graph(1)


class ErdosRenyi(GraphBuilder):
    """A random graph with independent edges (Erdős and Rényi), drawn until it is connected.

    Args:
        probability: Probability of an edge, in (0, 1].
    """

    def __init__(self, probability: float = 0.15) -> None:
        if not is_number(probability) or not 0 < probability <= 1:
            raise ValueError(
                f"Expected `probability` to be in (0, 1], but got probability={probability!r}. "
                "Use more than log(n) / n, so that the graph is connected."
            )
        self.probability = probability

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Draw until the graph is connected.

        Raises:
            ValueError: If none of :data:`TRIES` draws is connected.
        """
        import networkx

        for attempt in range(TRIES):
            drawn = derive(seed, "erdos renyi", attempt) % 2**32
            graph = networkx.erdos_renyi_graph(num_clients, self.probability, seed=drawn)
            if num_clients == 0 or networkx.is_connected(graph):
                return graph
        raise ValueError(
            f"Expected a connected graph of {num_clients} clients, but none of {TRIES} draws with "
            f"probability={self.probability!r} is. Use more than log(n) / n = "
            f"{np.log(num_clients) / num_clients:.2g}."
        )


class SmallWorld(GraphBuilder):
    """A connected small-world graph (Watts and Strogatz): a ring with rewired edges.

    Args:
        neighbours: Neighbours of each client in the ring, an even integer >= 2.
        rewiring: Probability that an edge is rewired, in [0, 1].
    """

    def __init__(self, neighbours: int = 4, rewiring: float = 0.1) -> None:
        if not is_integer(neighbours, 2) or neighbours % 2:
            raise ValueError(
                f"Expected `neighbours` to be an even number of at least 2, but got {neighbours=}. "
                "Use 4, two on each side."
            )
        if not is_number(rewiring) or not 0 <= rewiring <= 1:
            raise ValueError(
                f"Expected `rewiring` to be in [0, 1], but got rewiring={rewiring!r}. Use 0.1."
            )
        self.neighbours, self.rewiring = neighbours, rewiring

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Draw a connected graph.

        Raises:
            ValueError: If there are at most ``neighbours`` clients.
        """
        import networkx

        if num_clients <= self.neighbours:
            raise ValueError(
                f"Expected more clients than neighbours={self.neighbours!r}, but got "
                f"{num_clients} clients. Use a smaller even number, or the complete graph."
            )
        drawn = derive(seed, "small world") % 2**32
        return networkx.connected_watts_strogatz_graph(
            num_clients, self.neighbours, self.rewiring, tries=TRIES, seed=drawn
        )


class ScaleFree(GraphBuilder):
    """A connected scale-free graph by preferential attachment (Barabási and Albert).

    Args:
        attached: Edges from each new node to the nodes before it, at least 1.
    """

    def __init__(self, attached: int = 2) -> None:
        check_integer("attached", attached, 1, "Use 2.")
        self.attached = attached

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Draw a graph.

        Raises:
            ValueError: If there are at most ``attached`` clients.
        """
        import networkx

        if num_clients <= self.attached:
            raise ValueError(
                f"Expected more than attached={self.attached!r} clients, but got {num_clients}. "
                "Use a smaller number."
            )
        drawn = derive(seed, "scale free") % 2**32
        return networkx.barabasi_albert_graph(num_clients, self.attached, seed=drawn)


class Metropolis(GraphBuilder):
    r"""A graph with the weights of Metropolis and Hastings, for gossip averaging.

    An edge has the weight :math:`W_{kl} = 1 / (1 + \max(d_k, d_l))`, with the numbers of neighbours
    :math:`d`. With :math:`W_{kk} = 1 - \sum_l W_{kl} > 0` a step :math:`w_k \leftarrow
    \sum_l W_{kl} w_l` keeps the mean. It is that of ``FedU(Metropolis(graph),
    decentralized=True)`` where ``regularization`` is one over the learning rate times the local
    epochs.

    Args:
        graph: The family of graphs, whose own weights aren't used.

    References:
        Xiao, Boyd. Fast linear iterations for distributed averaging. Systems and Control Letters
        53, 2004, section 4.
    """

    def __init__(self, graph: GraphBuilder) -> None:
        if not isinstance(graph, GraphBuilder):
            raise TypeError(
                f"Expected `graph` to be a builder of graphs, but got {graph=}. Use Ring() or "
                "Complete(), for example."
            )
        self.graph = graph

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Build the graph and its weights, a sparse matrix ``(num_clients, num_clients)``."""
        import networkx
        from scipy.sparse import coo_array

        built = self.graph(num_clients, seed)
        if isinstance(built, networkx.Graph):
            built = networkx.to_scipy_sparse_array(built, nodelist=range(num_clients))
        edges = coo_array(built)
        edges.eliminate_zeros()
        degrees = np.bincount(edges.row, minlength=num_clients)
        weights = 1 / (1 + np.maximum(degrees[edges.row], degrees[edges.col]))
        return coo_array((weights, (edges.row, edges.col)), edges.shape)
