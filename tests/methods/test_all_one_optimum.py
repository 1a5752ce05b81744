"""Four methods of one objective, whose optimum is known, end there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl.contract.known import Known
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import L2GD, FedMAP, FedPop, PFedMe
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing import QuadraticModule, fit, local_round, q2


def expected_steps_of_l2gd(engine: Any) -> tuple[float, list[float]]:
    """Where its steps lead on average over the coin, p = 1/2: single ones never settle."""
    method, module, data = L2GD(1.0, 0.5), QuadraticModule(lr=0.8), q2()
    method.bind(Known.of(ParameterSplit(module), 2))
    coins = [method.aggregates(number) for number in range(20)]
    x = torch.zeros(2, 1).double()
    for _ in range(20):
        mean, moved = x.mean(0), torch.zeros_like(x)
        server = {"model": {"w": mean}, "informed": torch.ones(2, dtype=torch.bool)}
        client_state = {"model": {"w": x}, "mean": {"w": mean.expand(2, 1)}}
        for coin in (False, True):
            number = coins.index(coin)
            state: Any = {"round": number, "server": server, "client_state": client_state}
            outcome = local_round(method, module, data, engine, **state)
            moved += outcome.result.client_state["model"]["w"] / 2
        x = moved
    return float(x.mean()), x.flatten().tolist()


@pytest.mark.slow
def test_they_meet_in_the_optimum(engine: str) -> None:
    """min sum_k F_k(x_k) + |x_k - x|^2 / 2 with F = (x^2 / 2, 3 (x - 1)^2 / 2).

    x is the mean of the x_k, and a (x_k - c) + x_k - x = 0: x_1 = x / 2 and x_2 = (3 + x) / 4, so
    x = 3/5. The prior of variance 1 is the penalty of weight 1; a normal posterior's mean is its
    mode.
    """
    prior: Any = GaussianPrior(1.0)
    runs: dict[str, tuple[Any, float]] = {
        "FedPop": (FedPop(prior, 0.35, chain_steps=20, burn_in=19, noise=False), 0.1),
        "PFedMe": (PFedMe(1.0, 30, 0.3, local_epochs=None, local_steps=1), 1.5),
        "FedMAP": (FedMAP(prior, "uniform", local_steps=20), 0.35),
    }
    found = {"L2GD": expected_steps_of_l2gd(engine)}
    for name, (method, lr) in runs.items():
        run = fit(method, q2(), QuadraticModule(lr=lr), 16, engine)
        found[name] = float(run.server["model"]["w"]), run.models["w"].flatten().tolist()
    for name, (center, models) in found.items():
        assert center == pytest.approx(0.6, rel=1e-6), name
        assert models == pytest.approx([0.3, 0.9], rel=1e-6), name
