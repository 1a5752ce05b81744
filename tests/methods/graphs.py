"""The graphs, and the clients of two architectures, that the tests of methods over graphs share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl import ClientModules
from lightning_pfl.testing import QuadraticModule
from lightning_pfl.testing.conformance import SIZES

RAGGED = np.zeros((5, 5))
"""Five clients as in the conformance suite: degrees 3, 1, 3, 2, 3; weights that differ."""
for (i, j), weight in {
    (0, 2): 1.0,
    (0, 3): 0.5,
    (0, 4): 2.0,
    (2, 3): 1.5,
    (2, 4): 1.0,
    (1, 4): 1.0,
}.items():
    RAGGED[i, j] = RAGGED[j, i] = weight
assert len(RAGGED) == len(SIZES)

PATH = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
PAIR = np.array([[0.0, 1.0], [1.0, 0.0]])
TWO_MAPS = {
    (0, 1): torch.tensor([[1.0, 0.0]], dtype=torch.float64),
    (1, 0): torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64),
}
"""Two clients with 2 and 3 parameters, whose first and second one meet."""
TWO_CENTRES = ([1.0, 2.0], [0.0, 5.0, 7.0])


def edges_among(adjacency: Any, clients: Tensor) -> int:
    """Directed edges between some clients."""
    some = torch.as_tensor(adjacency)[clients][:, clients]
    return int((some > 0).sum())


def complete(clients: int) -> Any:
    """All pairs, with weight 1."""
    return np.ones((clients, clients)) - np.eye(clients)


def ring(clients: int) -> Any:
    """Each client and the next one."""
    matrix = np.roll(np.eye(clients), 1, axis=1)
    return matrix + matrix.T


def random_maps(adjacency: Any, dims: list[int], rank: int, seed: int = 0) -> dict[Any, Tensor]:
    """A map for both ends of every edge."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        (int(i), int(j)): 0.2 * torch.randn(rank, dims[i], generator=drawn, dtype=torch.float64)
        for i, j in zip(*np.nonzero(adjacency), strict=True)
    }


def two_clients(lr: float = 0.25) -> tuple[ClientModules, list[Any]]:
    """Clients with 1/2 |theta - a|^2 for the a of ``TWO_CENTRES``."""
    modules = {name: QuadraticModule(dim, lr) for name, dim in (("two", 2), ("three", 3))}
    data = []
    for centre in TWO_CENTRES:
        point = torch.tensor([centre], dtype=torch.float64)
        data.append(DataLoader(TensorDataset(torch.ones(1, dtype=torch.float64), point)))
    return ClientModules(modules, ["two", "three"]), data
