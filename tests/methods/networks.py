"""What the tests of several methods need beside the small network: it without what hides an update,
and the cohorts of a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_pfl.core.tree import Tree, leaves
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.federation.sampling import sample_cohort
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.conformance import SIZES, small_clients


def plain_module(lr: float = 0.05) -> PersonalizedModule:
    """The small network without BatchNorm, trained by plain SGD: an update is nothing but a
    gradient."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten())
    settings = {"lr": lr, "momentum": 0.0, "weight_decay": 0.0}
    return PersonalizedModule(backbone, nn.Linear(18, 3), **settings).double()  # type: ignore[arg-type]


def linear_module(dtype: torch.dtype = torch.float64) -> PersonalizedModule:
    """A linear classifier of the conformance suite's pictures."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return PersonalizedModule(nn.Flatten(), nn.Linear(25, 3), lr=0.05).to(dtype)


def two_matrices(dtype: torch.dtype = torch.float64) -> PersonalizedModule:
    """A linear representation of the conformance suite's pictures; class numbers are targets."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 2, bias=False))
        head = nn.Linear(2, 1, bias=False)
        return PersonalizedModule(backbone, head, loss="mse", lr=0.02).to(dtype)


def even_clients(
    dtype: torch.dtype = torch.float64, shuffle: bool = True
) -> FederatedTensorDataset:
    """Six clients: numbered anew by two, they are in a cluster with the same others."""
    positions = torch.arange(17).split((1, 0, 3, 8, 3, 2))
    fields = small_clients(dtype).fields
    return FederatedTensorDataset(fields, positions, batch_size=3, shuffle=shuffle)


EVERYBODY = torch.arange(len(SIZES))
"""Ids of the small clients, also of the one without samples."""
SCALARS = 2 * 9 + 2 + 18 * 3 + 3
"""Trainable scalars of the network above, and all of its state."""


def cohorts(
    rounds: int, participation: int, seed: int = 0, eligible: Tensor | None = None
) -> list[Tensor]:
    """Who takes part in each round of a run on the small clients."""
    some = torch.tensor([k for k, size in enumerate(SIZES) if size])
    some = some if eligible is None else eligible
    return [sample_cohort(seed, number, some, participation) for number in range(rounds)]


def scalars(tree: Tree) -> int:
    """Numbers in a tree."""
    return sum(leaf.numel() for leaf in leaves(tree))
