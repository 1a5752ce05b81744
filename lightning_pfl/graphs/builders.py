"""Named families of graphs, and similarity between clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.errors import check_whole, is_number, is_whole
from lightning_pfl.randomness import derive
from lightning_pfl.tree import shapes

if TYPE_CHECKING:
    from lightning_pfl.data.clients import FederatedTensorDataset

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


class MatrixFile(GraphBuilder):
    """An adjacency matrix from a file, such as a graph made in Python for a run from a recipe.

    Args:
        path: A ``.npy`` file with a symmetric matrix ``(clients, clients)``, or the ``.npz`` file
            of a sparse one by ``scipy.sparse.save_npz``.
    """

    def __init__(self, path: str) -> None:
        if not str(path).endswith((".npy", ".npz")):
            raise ValueError(
                f"Expected `path` to be a .npy or .npz file, but got {path=}. Save the matrix by "
                "numpy.save or scipy.sparse.save_npz."
            )
        self.path = str(path)

    def __call__(self, num_clients: int, seed: int) -> Any:
        """The matrix; an error if there is no such file."""
        if not Path(self.path).is_file():
            raise FileNotFoundError(
                f"Expected `path` of MatrixFile to be a file, but got path={self.path!r}, which "
                f"isn't there, seen from {Path.cwd()}. Give a path from there, or an absolute one."
            )
        if self.path.endswith(".npy"):
            return np.load(self.path)
        from scipy.sparse import load_npz

        return load_npz(self.path)


class KNearest(GraphBuilder):
    """Clients that are similar: an edge where one is among the other's nearest.

    Args:
        features: What is compared by Euclidean distance, an array ``(clients, features)`` or the
            path of a ``.npy`` file with one: :func:`label_histograms`, which clients have to
            disclose for it, or :func:`model_features`.
        neighbours: How many nearest clients count, at least 1.
    """

    def __init__(self, features: Any, neighbours: int = 5) -> None:
        check_whole("neighbours", neighbours, 1, "Use 5.")
        self.features, self.neighbours = features, neighbours

    def __call__(self, num_clients: int, seed: int) -> Any:
        """The union of both directions, with weights 1.

        Raises:
            ValueError: If the features are of other clients, or there are too few clients.
        """
        from sklearn.neighbors import kneighbors_graph

        given = self.features
        if isinstance(given, str):
            if not Path(given).is_file():
                raise ValueError(
                    f"Expected `features` to be an array or the path of a .npy file, but got "
                    f"features={given!r}, where there is no file. Write it with numpy.save."
                )
            given = np.load(given)
        rows = np.asarray(given, dtype=np.float64)
        if rows.ndim != 2 or len(rows) != num_clients or not np.isfinite(rows).all():
            raise ValueError(
                f"Expected `features` to be finite, one row for each of {num_clients} clients, but "
                f"got the shape {rows.shape}. Give an array (clients, features)."
            )
        if num_clients <= self.neighbours:
            raise ValueError(
                f"Expected more than neighbours={self.neighbours!r} clients, but got "
                f"{num_clients}. Use a smaller number."
            )
        directed = kneighbors_graph(rows, self.neighbours)
        return directed.maximum(directed.T)


def label_histograms(data: FederatedTensorDataset, num_classes: int) -> Tensor:
    """Share of each class among each client's samples, float64 ``(clients, classes)``.

    Args:
        data: A split whose second field is the label, an integer per sample.
        num_classes: Number of classes.
    """
    labels = data.fields[1]
    owner = torch.arange(data.num_clients).repeat_interleave(data.num_samples)
    positions = torch.cat([*data.indices, torch.empty(0, dtype=torch.int64)]).to(labels.device)
    place = owner * num_classes + labels[positions].long().cpu()
    counts = torch.bincount(place, minlength=data.num_clients * num_classes).double()
    counts = counts.view(data.num_clients, num_classes)
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def model_features(models: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The clients' models as rows, float64 ``(clients, scalars)``.

    Every floating-point entry counts, buffers too, in the order of the first model.

    Args:
        models: A ``state_dict`` for each client, such as
            ``[strategy.client_state_dict(k) for k in range(strategy.num_clients)]`` of a run of
            LocalOnly.

    Raises:
        ValueError: If the models don't have the same entries of the same shapes.

    Example:
        >>> model_features([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 5.0])}])
        tensor([[1., 2.],
                [0., 5.]], dtype=torch.float64)
    """
    found = [shapes(dict(model)) for model in models]
    for client, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                "Expected `models` to have the same entries of the same shapes, but got "
                f"{found[0]} of client 0 and {other} of client {client}. Compare clients of "
                "different architectures by their label histograms."
            )
    names = [name for name, leaf in models[0].items() if leaf.is_floating_point()] if models else []
    rows = [torch.cat([model[name].flatten().double() for name in names]) for model in models]
    return torch.stack(rows).cpu() if rows else torch.zeros(0, 0, dtype=torch.float64)
