"""Named families of graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from lightning_pfl.core.checks import check_whole, is_number, is_whole
from lightning_pfl.core.randomness import derive

TRIES = 1000
"""Random graphs that are drawn until one is connected."""


class GraphBuilder(ABC):
    """Makes a graph for any number of clients; write one for a family of your own."""

    @abstractmethod
    def __call__(self, num_clients: int, seed: int) -> Any:
        """A networkx graph of the nodes ``0..num_clients-1``, or an adjacency matrix."""

    def __repr__(self) -> str:
        """The class and its settings; of an array its shape."""
        given = ", ".join(
            f"{name}=<{type(value).__name__} {tuple(value.shape)}>"
            if hasattr(value, "shape")
            else f"{name}={value!r}"
            for name, value in vars(self).items()
        )
        return f"{type(self).__name__}({given})"


class Complete(GraphBuilder):
    """All pairs of clients."""

    def __call__(self, num_clients: int, seed: int) -> Any:
        """The complete graph."""
        import networkx

        return networkx.complete_graph(num_clients)


class Ring(GraphBuilder):
    """Every client between two others."""

    def __call__(self, num_clients: int, seed: int) -> Any:
        """The cycle in the order of the ids."""
        import networkx

        # networkx gives a single node an edge to itself.
        return networkx.cycle_graph(num_clients) if num_clients > 1 else networkx.empty_graph(1)


class ErdosRenyi(GraphBuilder):
    """Every pair is an edge with the same probability; drawn again until the graph is connected.

    Args:
        probability: Of an edge, in (0, 1].
    """

    def __init__(self, probability: float = 0.15) -> None:
        if not is_number(probability) or not 0 < probability <= 1:
            raise ValueError(
                f"Expected `probability` to be in (0, 1], but got probability={probability!r}. "
                "Use more than log(n) / n, so that the graph is connected."
            )
        self.probability = probability

    def __call__(self, num_clients: int, seed: int) -> Any:
        """The first connected one of a sequence of draws.

        Raises:
            ValueError: If none of :data:`TRIES` is connected.
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
    """A ring of near neighbours with some edges moved at random (Watts and Strogatz), connected.

    Args:
        neighbours: Neighbours of each client in the ring, an even number of at least 2.
        rewiring: Probability that an edge is moved, in [0, 1].
    """

    def __init__(self, neighbours: int = 4, rewiring: float = 0.1) -> None:
        if not is_whole(neighbours, 2) or neighbours % 2:
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
        """A connected draw.

        Raises:
            ValueError: If there are not more clients than neighbours.
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
    """New clients prefer neighbours that have many (Barabasi and Albert); connected.

    Args:
        attached: Edges of each new client, at least 1.
    """

    def __init__(self, attached: int = 2) -> None:
        check_whole("attached", attached, 1, "Use 2.")
        self.attached = attached

    def __call__(self, num_clients: int, seed: int) -> Any:
        """A draw.

        Raises:
            ValueError: If there are not more clients than edges of a new one.
        """
        import networkx

        if num_clients <= self.attached:
            raise ValueError(
                f"Expected more than attached={self.attached!r} clients, but got {num_clients}. "
                "Use a smaller number."
            )
        drawn = derive(seed, "scale free") % 2**32
        return networkx.barabasi_albert_graph(num_clients, self.attached, seed=drawn)
