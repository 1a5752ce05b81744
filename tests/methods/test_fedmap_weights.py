"""FedMAP's weights: the worked example, their size, and the loss that they are made of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_pfl.methods import FedMAP
from lightning_pfl.methods.fedmap import MEASURED, log_weights
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing import QuadraticModule, local_round
from tests.methods.quadratics import LR, A, C, ragged

W0 = torch.full((2,), 0.5, dtype=torch.float64)


def test_weights_of_the_worked_example() -> None:
    loss = torch.tensor([0.5, 0.7], dtype=torch.float64)
    penalty = torch.tensor([30.0, 12.0], dtype=torch.float64) / (2 * 15)
    samples = torch.tensor([1400.0, 350.0], dtype=torch.float64)

    def weights(weighting: Any) -> list[float]:
        method = FedMAP(weighting=weighting)
        measured = weighting in MEASURED
        info: Any = SimpleNamespace(weights=method.aggregation_weights(samples))
        logs = {"log_weight": log_weights(weighting, loss, penalty, samples)} if measured else {}
        found: list[float] = method.weights(logs, info).tolist()
        return found

    logs = log_weights("exact", loss, penalty, samples).tolist()
    assert logs == pytest.approx([-701.0, -245.4], abs=1e-12)
    # 1.4e-198, which is 0 in single precision.
    assert weights("exact") == pytest.approx([math.exp(-455.6), 1.0], rel=1e-10)
    assert weights("posterior") == pytest.approx([0.401312, 0.598688], abs=5e-7)
    assert weights("per_sample") == pytest.approx([0.549940, 0.450060], abs=5e-7)
    assert weights("samples") == pytest.approx([0.8, 0.2], rel=1e-12)
    assert weights("uniform") == [0.5, 0.5]


def test_no_weight_underflows_at_any_size() -> None:
    """The logarithms are far below that of the smallest float64, -745; what counts is their
    difference, 1."""
    method = FedMAP(weighting="exact")
    loss, samples = torch.ones(2, dtype=torch.float64), torch.full((2,), 1e9, dtype=torch.float64)
    penalty = torch.tensor([1e6, 1e6 + 1], dtype=torch.float64)
    logs = log_weights("exact", loss, penalty, samples)
    info: Any = None
    found = method.weights({"log_weight": logs}, info).tolist()
    assert found == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rel=1e-6)


def test_losses_are_of_the_trained_models_on_all_of_the_data(engine: Any) -> None:
    """Minibatches of three samples of 4, 1 and 7; sums over a round's parts, not of its steps."""
    method = FedMAP(GaussianPrior(2.0), log_envelope=True)
    out = local_round(method, QuadraticModule(2, LR, 0.5), ragged(), engine, clients=[0, 1, 2])
    theta = out.result.uploads["model"]["w"]
    loss = A[:3] / 2 * (theta - C[:3]).square().sum(1)
    penalty = (theta - W0).square().sum(1) / 4
    torch.testing.assert_close(out.result.uploads["log_weight"], -loss - penalty)
    torch.testing.assert_close(out.result.uploads["envelope"], loss + penalty)
    assert out.result.uploads["log_weight"].dtype == torch.float64
    assert out.info.steps.tolist() == [4, 2, 6]  # the measuring pass counts
