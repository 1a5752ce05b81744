"""With one client every method that relates clients is SGD, pulled to the last model at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pfl import methods
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from tests.methods.quadratics import close

STEPS: dict[str, Any] = {"local_epochs": None, "local_steps": 3}
CASES: dict[str, tuple[Callable[[], Method], float]] = {
    "CFL": (lambda: methods.CFL(10.0, 0.0, start_round=0, **STEPS), 0.0),
    "ClusterOracle": (lambda: methods.ClusterOracle([4], **STEPS), 0.0),
    "ConvexClustering": (
        lambda: methods.ConvexClustering(0.7, proximal_weight=0.3, **STEPS),
        0.3,
    ),
    "FedU": (lambda: methods.FedU("complete", 0.7, **STEPS), 0.0),
    "FedU, decentralized": (
        lambda: methods.FedU("complete", 0.7, decentralized=True, **STEPS),
        0.0,
    ),
    # 1 / tau, with a degree of 1 where there is none.
    "GTVMin": (lambda: methods.GTVMin("complete", 0.7, step_ratio=2.0, **STEPS), 0.5),
    "HomologicalConstraints": (
        lambda: methods.HomologicalConstraints("complete", 0.3, **STEPS),
        0.0,
    ),
    "IFCA": (lambda: methods.IFCA(1, **STEPS), 0.0),
    "IFCA, gradients": (
        lambda: methods.IFCA(1, averaging="gradients"),
        0.0,
    ),
    "SheafFMTL": (lambda: methods.SheafFMTL("complete", 0.7, 0.1, 0.5, **STEPS), 0.0),
    # The mean of all models is the own one: 2 * weight * 1.
    "SquaredPenalty": (lambda: methods.SquaredPenalty(0.4, **STEPS), 0.8),
}
"""What each is, and how strongly it holds a client to its last model."""


@pytest.mark.parametrize("name", CASES)
def test_one_client_is_regularized_sgd(name: str, engine: str) -> None:
    make, strength = CASES[name]
    curvature, center, lr, rounds = 1.5, torch.tensor([2.0, -1.0], dtype=torch.float64), 0.1, 4
    data = quadratic_clients([curvature], center.unsqueeze(0))
    run = fit(make(), data, QuadraticModule(2, lr, 0.5), rounds, engine)
    w = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    for _ in range(rounds):
        last = w.detach().clone()
        optimizer = torch.optim.SGD([w], lr=lr)
        for _ in range(1 if name == "IFCA, gradients" else 3):
            optimizer.zero_grad()
            loss = curvature / 2 * (w - center).square().sum()
            (loss + strength / 2 * (w - last).square().sum()).backward()
            optimizer.step()
    close(run.models["w"][0], w.detach())
