r"""Cellular sheaves on a graph of clients: restriction maps to the edges, and products with them.

Client :math:`i` has parameters :math:`\theta_i \in \mathbb{R}^{d_i}`; the edge to its neighbour
:math:`j` has a space :math:`\mathbb{R}^{d_{ij}}` and a restriction map :math:`P_{ij} \in
\mathbb{R}^{d_{ij} \times d_i}` at each end. The maps of some clients are one tensor ``(clients,
slots, width, scalars)`` whose rows from :math:`d_{ij}` on are zero, so that all edges are one
batched product; architectures with different numbers of parameters have separate tensors. ``None``
stands for maps that keep the first :math:`d_{ij}` parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_pfl.core.checks import check_number, is_number
from lightning_pfl.core.randomness import derive, generator
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Tree
from lightning_pfl.graphs import Graph

GivenMaps = Mapping[tuple[int, int], Tensor]
"""Maps by ``(i, j)``: that of client i on its edge to client j, ``(d_ij, d_i)``."""
Maps = Literal["random", "identity"] | GivenMaps
"""Initial maps: random numbers, the identity on the first parameters, or given matrices."""


# --- the spaces ---


def check_maps(edge_dim_ratio: float, maps: object, map_std: float) -> None:
    """Raise ValueError unless the settings define maps."""
    if not is_number(edge_dim_ratio) or not 0 < edge_dim_ratio <= 1:
        raise ValueError(
            "Expected `edge_dim_ratio` to be a number in (0, 1], but got "
            f"edge_dim_ratio={edge_dim_ratio!r}. Use 0.1, for example."
        )
    if maps not in ("random", "identity") and not isinstance(maps, Mapping):
        raise ValueError(
            "Expected `maps` to be 'random', 'identity' or a mapping from pairs of clients to "
            f"matrices, but got maps={maps!r}. Use 'random'."
        )
    for ends, given in maps.items() if isinstance(maps, Mapping) else ():
        matrix = isinstance(given, Tensor) and given.is_floating_point()
        if not matrix or not given.isfinite().all():
            raise ValueError(
                "Expected `maps` to hold tensors of finite floating-point numbers, but got "
                f"{given!r} under {ends}. Use torch.tensor(..., dtype=torch.float32)."
            )
    check_number("map_std", map_std, "Use 0.01, as the authors do.", positive=True)


def edge_dims(graph: Graph, sizes: Tensor, ratio: float) -> Tensor:
    r"""Compute the edges' dimensions :math:`d_{ij} = \lfloor \gamma \min(d_i, d_j) \rfloor`.

    Args:
        graph: The graph of all clients.
        sizes: :math:`d_i`, int64 ``(clients,)``.
        ratio: :math:`\gamma` in (0, 1].

    Returns:
        int64 ``(clients, slots)``, 0 in slots without a neighbour.

    Raises:
        ValueError: If an edge has no dimension.
    """
    smaller = torch.minimum(sizes.unsqueeze(1), sizes[graph.neighbours])
    # 0.57 * 100 is 56.99... in floating point, but must give 57.
    dims = (ratio * smaller.double() + 1e-9).floor().long().clamp(max=smaller)
    if graph.mask.any() and not dims[graph.mask].all():
        raise ValueError(
            "Expected `edge_dim_ratio` to give every edge at least one dimension, but got "
            f"edge_dim_ratio={ratio!r} and a client with {int(smaller[graph.mask].min())} "
            "trainable scalars. Use a larger ratio."
        )
    return torch.where(graph.mask, dims, 0)


def given_dims(graph: Graph, sizes: Tensor, maps: GivenMaps) -> Tensor:
    """Compute the edges' dimensions from given maps, int64 ``(clients, slots)``.

    Raises:
        ValueError: If a map is missing, belongs to no edge, or doesn't fit its ends.
    """
    dims = torch.zeros_like(graph.neighbours)
    edges = [(i, int(graph.neighbours[i, s]), s) for i, s in graph.mask.nonzero().tolist()]
    for i, j, slot in edges:
        ours, theirs = (tuple(maps[k].shape) if k in maps else None for k in ((i, j), (j, i)))
        if ours is None or len(ours) != 2 or ours[1] != int(sizes[i]):
            raise ValueError(
                f"Expected `maps` to hold a matrix (d, {int(sizes[i])}) under ({i}, {j}), but got "
                f"{ours or 'nothing'}. Give a map for both ends of every edge, with one column per "
                "trainable scalar of its client."
            )
        if theirs is not None and ours[0] != theirs[0]:
            raise ValueError(
                f"Expected `maps` of both ends of an edge to have one number of rows, but got "
                f"{ours} under ({i}, {j}) and {theirs} under ({j}, {i}). Use the dimension of the "
                "edge."
            )
        dims[i, slot] = ours[0]
    if foreign := sorted(set(maps) - {(i, j) for i, j, _ in edges}):
        raise ValueError(
            f"Expected `maps` of the edges of the graph, but got one under {foreign[0]}, which is "
            "no edge. Remove it, or add the edge."
        )
    return dims


@dataclass(frozen=True)
class Restrictions:
    """The restriction maps of a graph's edges: dimensions and initial values.

    Attributes:
        graph: The graph of all clients.
        start: The kind of initial maps, or given maps.
        std: Standard deviation of random entries, which are independent and normal.
        seed: Seed of the random entries.
        dims: Dimensions of the edges' spaces, int64 ``(clients, slots)``.
        width: The largest of them.
        scalars: Number of entries in the maps of all clients.
        implicit: Whether the maps are fixed identities, which aren't stored.
    """

    graph: Graph
    start: Maps
    std: float
    seed: int
    dims: Tensor
    width: int
    scalars: int
    implicit: bool

    @classmethod
    def plan(
        cls, graph: Graph, sizes: Tensor, start: Maps, ratio: float, std: float, seed: int
    ) -> Restrictions:
        """Compute the dimensions.

        Args:
            graph: The graph of all clients.
            sizes: Trainable scalars of each client, int64 ``(clients,)``.
            start: The kind of initial maps, or given maps.
            ratio: As in :func:`edge_dims`; unused for given maps.
            std: Standard deviation of random entries.
            seed: Seed of the random entries.
        """
        if isinstance(start, str):
            dims = edge_dims(graph, sizes, ratio)
        else:
            dims = given_dims(graph, sizes, start)
        width = int(dims.max()) if dims.numel() else 0
        scalars = dims.shape[1] * width * int(sizes.sum())
        return cls(graph, start, std, seed, dims, width, scalars, start == "identity")

    def learned(self) -> Restrictions:
        """Return restrictions for maps that change, which are always stored."""
        return replace(self, implicit=False)

    def empty(self, theta: Tensor) -> Tree:
        """Make one client's zero maps, ``{"maps": (slots, width, scalars)}``.

        Empty for implicit maps.

        Args:
            theta: The client's parameters, ``(scalars,)``.
        """
        shape = (self.dims.shape[1], self.width, len(theta))
        # An expanded view, which the client state store copies for each client.
        return {} if self.implicit else {"maps": theta.new_zeros(()).expand(shape)}

    def filled(self, client_state: Tree, clients: Tensor) -> Tree:
        """Fill in the initial maps of some clients, in states made by :meth:`empty`."""
        if self.implicit:
            return client_state
        maps = torch.zeros_like(client_state["maps"], memory_format=torch.contiguous_format)
        for row, client in enumerate(clients.tolist()):
            for slot in self.graph.mask[client].nonzero().flatten().tolist():
                self._fill(maps[row, slot], client, slot)
        return {**client_state, "maps": maps}

    def _fill(self, place: Tensor, client: int, slot: int) -> None:
        neighbour = int(self.graph.neighbours[client, slot])
        place = place[: int(self.dims[client, slot])]
        if self.start == "random":
            drawn = generator(derive(self.seed, "restriction map", client, neighbour))
            place.copy_(self.std * torch.randn(place.shape, generator=drawn, dtype=torch.float32))
        elif isinstance(self.start, str):
            place.fill_diagonal_(1.0)
        else:
            place.copy_(self.start[client, neighbour])

    def project(self, theta: Tensor, client_state: Tree, clients: Tensor) -> Tensor:
        """Call :func:`project` with the maps in some clients' states, if they have any."""
        return project(theta, client_state.get("maps"), self.dims[clients], self.width)

    def nbytes(self, projections: Tensor, clients: Tensor) -> Tensor:
        """Count the bytes of each client's projections without padding, ``(clients, slots)``."""
        return self.dims[clients] * projections.element_size()


# --- projections ---


def inside(dims: Tensor, width: int) -> Tensor:
    """Mask the rows that an edge has among ``width`` rows, bool ``(..., width)``."""
    return torch.arange(width, device=dims.device) < dims.unsqueeze(-1)


def project(theta: Tensor, maps: Tensor | None, dims: Tensor, width: int) -> Tensor:
    r"""Project each client's parameters to its edges: :math:`P_{ij} \theta_i`.

    Args:
        theta: ``(clients, scalars)``.
        maps: ``(clients, slots, width, scalars)``, or None.
        dims: Dimensions of these clients' edges, int64 ``(clients, slots)``.
        width: The largest dimension of an edge.

    Returns:
        ``(clients, slots, width)``, zeros from :math:`d_{ij}` on.
    """
    if maps is not None:
        found = theta.new_zeros(maps.shape[:3])
        for slot, of_slot in enumerate(maps.unbind(1)):
            found[:, slot] = (of_slot * theta.unsqueeze(1)).sum(2)
        return found
    first = torch.nn.functional.pad(theta, (0, max(0, width - theta.shape[1])))[:, :width]
    kept = inside(send(dims, theta.device), width)
    return torch.where(kept, first.unsqueeze(1), torch.zeros_like(first).unsqueeze(1))


def lift(residual: Tensor, maps: Tensor | None, scalars: int) -> Tensor:
    r"""Map residuals on the edges back to the clients: :math:`\sum_j P_{ij}^\top r_{ij}`.

    Args:
        residual: ``(clients, slots, width)``, zeros from :math:`d_{ij}` on.
        maps: ``(clients, slots, width, scalars)``, or None.
        scalars: Number of a client's parameters.

    Returns:
        ``(clients, scalars)``.
    """
    if maps is not None:
        total = residual.new_zeros(len(residual), scalars)
        for of_slot, part in zip(maps.unbind(1), residual.unbind(1), strict=True):
            total += (of_slot * part.unsqueeze(2)).sum(1)
        return total
    first = residual.sum(1)
    return torch.nn.functional.pad(first, (0, max(0, scalars - first.shape[1])))[:, :scalars]


def disagreement(ours: Tensor, theirs: Tensor, weights: Tensor) -> Tensor:
    r"""Compute residuals on the edges, :math:`a_e (P_{ij} \theta_i - P_{ji} \theta_j)`.

    Args:
        ours: Projections of these clients, ``(clients, slots, width)``.
        theirs: Projections of the neighbours, in the same slots.
        weights: Weights of the edges, ``(clients, slots)``; 0 leaves an edge out.
    """
    return (ours - theirs) * weights.to(ours).unsqueeze(2)


def move_maps(maps: Tensor, residual: Tensor, theta: Tensor, step: float) -> Tensor:
    r"""Take a gradient step on the maps: :math:`P_{ij} - s\, r_{ij} \theta_i^\top`.

    Args:
        maps: ``(clients, slots, width, scalars)``.
        residual: :math:`r`, ``(clients, slots, width)``.
        theta: ``(clients, scalars)``.
        step: :math:`s`.
    """
    return torch.addcmul(maps, residual.unsqueeze(3), theta[:, None, None], value=-step)


# --- how long a step is ---


def map_steps(graph: Graph, squares: Tensor, step: float) -> Tensor:
    r"""Compute relative step lengths :math:`s\, a_e (\lVert \theta_i \rVert^2 + \ldots)`.

    The sum is over both ends of each edge. A simultaneous step of both, with fixed parameters,
    multiplies the edge's residual by 1 minus this number: stable below 2.

    Args:
        graph: The graph of all clients.
        squares: :math:`\lVert \theta_i \rVert^2`, float64 ``(clients,)``.
        step: :math:`s`.

    Returns:
        float64 ``(clients, slots)``, 0 in slots without a neighbour.
    """
    both = squares.unsqueeze(1) + squares[graph.neighbours]
    return torch.where(graph.mask, step * graph.slot_weights * both, 0.0)
