"""One line per method: the smallest settings that use everything it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pfl import methods
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.priors import DiagonalGaussianPrior
from lightning_pfl.testing.conformance import small_clients


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


CASES: dict[str, Callable[[], Method]] = {
    "APFL": lambda: methods.APFL(mixing=0.3, adaptive=True),
    "CFL": lambda: methods.CFL(eps_mean=10.0, eps_max=1e-6, start_round=0),
    "ClusterOracle": lambda: methods.ClusterOracle(lambda client: client % 2),
    "ConvexClustering": lambda: methods.ConvexClustering(0.2, local_epochs=2),
    "Ditto": lambda: methods.Ditto(prox_weight=0.5),
    "FedAvg": lambda: methods.FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
    "FedBN": lambda: methods.FedBN(),
    "FedMAP": lambda: methods.FedMAP(DiagonalGaussianPrior(0.5), log_envelope=True),
    "FedMTL": lambda: methods.FedMTL(0.05),
    "FedPer": lambda: methods.FedPer(),
    "FedProx": lambda: methods.FedProx(prox_weight=0.5),
    "FedRep": lambda: methods.FedRep(head_epochs=2, body_epochs=1, head_lr=0.1),
    "FedU": lambda: methods.FedU("complete", 0.3),
    "GTVMin": lambda: methods.GTVMin("complete", 0.05),
    "HomologicalConstraints": lambda: methods.HomologicalConstraints(
        "complete", 0.02, 0.5, edge_dim_ratio=0.5, local_epochs=1, local_steps=None
    ),
    "IFCA": lambda: methods.IFCA(2),
    "L2GD": lambda: methods.L2GD(2.0, 0.5, local_epochs=2),
    "LGFedAvg": lambda: methods.LGFedAvg(local_epochs=None, local_steps=3),
    "LinearFedRep": lambda: methods.LinearFedRep(body_lr=0.02, ridge=0.1),
    "LocalOnly": lambda: methods.LocalOnly(),
    "MOCHA": lambda: methods.MOCHA(0.05, inner_iterations=1),
    "PFedMe": lambda: methods.PFedMe(3.0, inner_steps=2, inner_lr=0.05, server_mixing=0.8),
    "PerFedAvg": lambda: methods.PerFedAvg(0.1, order="hessian-free"),
    "SCAFFOLD": lambda: methods.SCAFFOLD(option="I", server_lr=0.7),
    "SheafFMTL": lambda: methods.SheafFMTL("complete", 0.05, 0.1, 0.3, maps="identity"),
    "SquaredPenalty": lambda: methods.SquaredPenalty(0.1),
}

PROBLEMS: dict[str, dict[str, Any]] = {
    "ClusterOracle": {"make_data": even_clients},
    "LinearFedRep": {"make_module": two_matrices},
    "MOCHA": {"make_module": linear_module},
}
"""Where the conformance suite's own network or clients are not for a method."""
