"""Validation of graphs given by users."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_pfl.core.argument_types import check_types
from lightning_pfl.graphs.builders import (
    Complete,
    ErdosRenyi,
    GraphBuilder,
    Ring,
    ScaleFree,
    SmallWorld,
)
from lightning_pfl.graphs.graph import Graph

BUILDERS: dict[str, type[GraphBuilder]] = {
    "complete": Complete,
    "ring": Ring,
    "erdos_renyi": ErdosRenyi,
    "small_world": SmallWorld,
    "scale_free": ScaleFree,
}
"""Builders by name, each with its default arguments."""
GraphLike = str | GraphBuilder | list[list[float]] | Any
"""A name in :data:`BUILDERS`, a builder, an adjacency matrix (nested lists, a tensor, a NumPy array
or a scipy sparse matrix) or a networkx graph."""


def resolve_graph(graph: GraphLike, num_clients: int, seed: int = 0) -> Graph:
    """Validate a graph and convert it to :class:`Graph`.

    Args:
        graph: See :data:`GraphLike`. Nodes of a networkx graph are clients in the order of the
            graph; edges have the attribute ``weight``, 1 by default.
        num_clients: Number of clients.
        seed: Seed of the builders' random choices.

    Raises:
        ValueError: If the name is unknown, or the matrix isn't square with a row per client,
            symmetric, finite, non-negative and without loops.
        TypeError: If ``graph`` has another type.
    """
    check_types(resolve_graph, {"num_clients": num_clients}, least=0)
    check_types(resolve_graph, {"seed": seed})
    if isinstance(graph, Graph):
        matrix = graph.adjacency()
    else:
        matrix = _matrix(_built(graph, num_clients, seed))
    _check(matrix, num_clients)
    index, weights = matrix.indices(), matrix.values()
    upper = (index[0] < index[1]) & (weights != 0)
    made = Graph.of(num_clients, index[:, upper], weights[upper])
    if num_clients > 1 and not made.edges.shape[1]:
        rank_zero_warn(
            f"Expected `graph` to have edges between its {num_clients} clients, but got none. "
            "Give a matrix with weights above 0, or use LocalOnly."
        )
    elif made.components > 1:
        rank_zero_info(
            f"The graph of {num_clients} clients has {made.components} components that exchange "
            "nothing."
        )
    return made


def _built(graph: GraphLike, num_clients: int, seed: int) -> Any:
    if isinstance(graph, str):
        if graph not in BUILDERS:
            raise ValueError(
                f"Expected `graph` to be one of {', '.join(BUILDERS)}, but got graph={graph!r}. "
                "Use one of these, a builder, an adjacency matrix or a networkx graph."
            )
        graph = BUILDERS[graph]()
    return graph(num_clients, seed) if isinstance(graph, GraphBuilder) else graph


def _matrix(graph: Any) -> Tensor:
    """Convert to a coalesced sparse adjacency matrix, float64."""
    if hasattr(graph, "adjacency") and hasattr(graph, "nodes"):
        import networkx

        if graph.is_directed() or graph.is_multigraph():
            raise TypeError(
                f"Expected `graph` to be an undirected networkx.Graph, but got "
                f"{type(graph).__name__}. Use graph.to_undirected(), or networkx.Graph(graph)."
            )
        graph = (
            networkx.to_scipy_sparse_array(graph, dtype=float) if len(graph) else np.zeros((0, 0))
        )
    if hasattr(graph, "tocoo"):
        found = graph.tocoo()
        index = torch.from_numpy(np.stack([found.row, found.col]).astype(np.int64))
        values = torch.from_numpy(np.asarray(found.data, dtype=np.float64))
        shape = tuple(found.shape)
        made = torch.sparse_coo_tensor(index, values, shape, check_invariants=False)
        return made.coalesce()
    if not isinstance(graph, (Tensor, np.ndarray, list, tuple)):
        raise TypeError(
            f"Expected `graph` to be an adjacency matrix, a networkx graph, a builder or a name, "
            f"but got graph={graph!r}. Use 'complete', for example."
        )
    try:
        dense = torch.as_tensor(graph, dtype=torch.float64)
    except (TypeError, ValueError) as cause:
        raise ValueError(
            f"Expected `graph` to be a matrix of real numbers, but got {graph!r}. Give one row "
            "and one column per client."
        ) from cause
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    if dense.ndim != 2:
        raise ValueError(
            f"Expected `graph` to be a matrix, but got the shape {tuple(dense.shape)}. Give one "
            "row and one column per client."
        )
    place = dense.nonzero().T
    made = torch.sparse_coo_tensor(
        place, dense[place[0], place[1]], dense.shape, check_invariants=False
    )
    return made.coalesce()


def _check(matrix: Tensor, num_clients: int) -> None:
    index, weights = matrix.indices(), matrix.values()
    problem = ""
    if tuple(matrix.shape) != (num_clients, num_clients):
        problem = f"the shape {tuple(matrix.shape)}. Give one row and one column per client."
    elif not weights.isfinite().all() or (weights < 0).any():
        bad = int(((weights < 0) | ~weights.isfinite()).nonzero()[0])
        problem = f"{weights[bad].item()!r} at {tuple(index[:, bad].tolist())}. Use weights >= 0."
    elif ((index[0] == index[1]) & (weights != 0)).any():
        client = int(index[0][(index[0] == index[1]) & (weights != 0)][0])
        problem = f"an edge from client {client} to itself. Set the diagonal to 0."
    elif (difference := (matrix - matrix.T.coalesce()).coalesce()).values().any():
        at = tuple(difference.indices()[:, difference.values().nonzero()[0, 0]].tolist())
        problem = f"different weights at {at} and {at[::-1]}. Use (A + A.T) / 2."
    if problem:
        raise ValueError(
            f"Expected `graph` to be a symmetric matrix of {num_clients} clients with weights >= 0 "
            f"and no loops, but got {problem}"
        )
