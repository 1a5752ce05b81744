"""A sheaf's penalty with maps that stay tends to the constraint as its weight grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.methods import HomologicalConstraints, SheafFMTL
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from tests.methods.graphs import PAIR

MAPS = {
    (0, 1): torch.tensor([[0.4, -0.2]], dtype=torch.float64),
    (1, 0): torch.tensor([[0.1, 0.5]], dtype=torch.float64),
}
CENTRES = np.array([[1.0, 2.0], [-1.0, 3.0]])


@pytest.mark.slow
def test_a_large_weight_comes_as_near_to_the_constraint_as_it_should() -> None:
    """L = v v' for the row v = (P_01, -P_10): (I + weight L)^-1 a is off by 1 / (1 + weight |v|^2).

    The constraint's solution is a without its part along v.
    """
    data = quadratic_clients([1.0, 1.0], torch.from_numpy(CENTRES))
    v = np.array([0.4, -0.2, -0.1, -0.5])
    along = v * (v @ CENTRES.ravel()) / (v @ v)
    assert np.abs(along).max() > 0.5
    constrained = CENTRES.ravel() - along
    hard = HomologicalConstraints(PAIR, 0.8, maps=MAPS)
    run = fit(hard, data, QuadraticModule(2, lr=0.5), 150)
    limit = run.models["w"].flatten().numpy()
    np.testing.assert_allclose(limit, constrained, rtol=0, atol=1e-7)
    distances = []
    one_step: dict[str, Any] = {"local_epochs": None, "local_steps": 1}
    for weight, rounds in ((10.0, 60), (100.0, 440)):
        soft = SheafFMTL(PAIR, weight, 0.0, maps=MAPS, **one_step)
        largest = 1 + weight * (v @ v)
        run = fit(soft, data, QuadraticModule(2, lr=1.7 / largest), rounds)
        found = run.models["w"].flatten().numpy()
        system = np.eye(4) + weight * np.outer(v, v)
        expected = np.linalg.solve(system, CENTRES.ravel())
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found - limit, along / largest, rtol=0, atol=2e-6)
        distances.append(np.linalg.norm(found - limit))
    nearer = (1 + 10 * (v @ v)) / (1 + 100 * (v @ v))
    assert distances[1] == pytest.approx(distances[0] * nearer, rel=1e-4)
