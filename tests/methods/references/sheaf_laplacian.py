"""The sheaf Laplacian as a matrix, from its definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_pfl.graphs import Graph


def sheaf_laplacian(graph: Graph, maps: Sequence[Tensor]) -> Tensor:
    r"""The sheaf Laplacian as a matrix, for small problems.

    .. math::
        L_{ii} = \sum_j a_{ij} P_{ij}^\top P_{ij}, \quad L_{ij} = -a_{ij} P_{ij}^\top P_{ji}, \quad
        \theta^\top L\, \theta = \sum_{\{i, j\}} a_{ij} \lVert P_{ij} \theta_i - P_{ji} \theta_j
        \rVert^2

    It is symmetric and positive semidefinite; its kernel holds the parameters that agree on all
    edges. For identity maps it is the graph's Laplacian times the identity.

    Args:
        graph: Who is whose neighbour, with the weights :math:`a`.
        maps: Each client's maps, ``(slots, width, d_i)``.

    Returns:
        float64 ``(d, d)`` with :math:`d = \sum_i d_i`.
    """
    ends = torch.tensor([0, *(m.shape[2] for m in maps)]).cumsum(0).tolist()
    at = [slice(begin, end) for begin, end in pairwise(ends)]
    matrix = torch.zeros(ends[-1], ends[-1], dtype=torch.float64)
    for i, slot in graph.mask.nonzero().tolist():
        j, weight = int(graph.neighbours[i, slot]), graph.slot_weights[i, slot]
        ours, theirs = (
            maps[i][slot].double(),
            maps[j][int(graph.reverse[i, slot])].double(),
        )
        matrix[at[i], at[i]] += weight * ours.T @ ours
        matrix[at[i], at[j]] -= weight * ours.T @ theirs
    return matrix
