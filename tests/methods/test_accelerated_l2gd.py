"""AcceleratedL2GD: APGD1 in NumPy, and its rate on two quadratics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.methods import AcceleratedL2GD, LocalOnly
from lightning_pfl.testing import QuadraticModule, assert_trees_close, fit, q2, quadratic_clients
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts
from tests.methods.quadratics import closed_form
from tests.methods.references import softmax
from tests.methods.references.softmax import softmax_module

CASE = Case(
    method=lambda: AcceleratedL2GD(2.0, local_epochs=2),
    bytes={"defaults": Bytes(AcceleratedL2GD, 4 * D, 4 * D)},
    twin=lambda: AcceleratedL2GD(0.0, momentum=0.0),
    above_zero="mixing_weight",
)


class TestTwoQuadratics:
    """F = (x^2 / 2, 3 (x - 1)^2 / 2), L = 3 and mu = 1: the models of weight 1 are 0.3 and 0.9."""

    @closed_form
    def test_it_ends_in_the_optimum_of_l2gd(self, engine: str) -> None:
        run = fit(AcceleratedL2GD(1.0, 0.268), q2(), QuadraticModule(lr=1 / 3), 24, engine)
        assert run.models["w"].flatten().tolist() == pytest.approx([0.3, 0.9], rel=1e-6)

    def test_momentum_takes_fewer_rounds(self) -> None:
        """On a badly conditioned problem: curvatures 0.05 and 1, eta = 1, weight 0.02."""
        data = quadratic_clients([0.05, 1.0], [4.0, 1.0])
        errors = []
        for momentum in (0.0, 0.6):
            run = fit(AcceleratedL2GD(0.02, momentum), data, QuadraticModule(lr=1.0), 25)
            # a (x - c) + 0.02 (x - m) = 0, m = (x_1 + x_2) / 2.
            matrix = np.array([[0.05 + 0.01, -0.01], [-0.01, 1.0 + 0.01]])
            star = np.linalg.solve(matrix, [0.05 * 4.0, 1.0])
            errors.append(np.abs(run.models["w"].flatten().numpy() - star).max())
        assert errors[1] < 0.05 * errors[0]


def test_a_classifier_trains_as_the_reference(engine: str) -> None:
    data, lr, weight, beta = small_clients(), 0.2, 1.5, 0.4
    method = AcceleratedL2GD(weight, beta, local_epochs=1)
    run = fit(method, data, softmax_module(lr), 4, engine, participation=3)
    start = softmax.as_numpy(softmax_module().state_dict())
    x, z = [start] * 5, [start] * 5
    mean = start
    for number, cohort in enumerate(cohorts(4, 3)):
        for k in cohort.tolist():
            near = {n: (z[k][n] + lr * weight * mean[n]) / (1 + lr * weight) for n in mean}
            y = {n: near[n] + beta * (near[n] - x[k][n]) for n in mean}
            for batch in softmax.minibatches(data, k, number, epochs=1):
                y = softmax.moved(y, softmax.gradient(y, *batch), -lr)
            x[k], z[k] = near, y
        mean = softmax.mean([z[k] for k in cohort.tolist()], [1.0] * 3)
    for name in softmax.NAMES:
        np.testing.assert_allclose(run.server["point"][name], mean[name], rtol=1e-10)
        expected = np.stack([one[name] for one in x])
        np.testing.assert_allclose(run.models[name], expected, rtol=1e-10)


def test_without_weight_and_momentum_points_are_those_of_local_training(engine: str) -> None:
    method = AcceleratedL2GD(0.0, 0.0, local_epochs=2)
    run = fit(method, small_clients(), small_module(), 3, engine)
    alone = fit(LocalOnly(local_epochs=2), small_clients(), small_module(), 3, engine)
    point = run.client_state["point"]
    assert_trees_close(point, {name: alone.models[name] for name in point})


def test_the_mean_of_all_is_kept_by_the_map(engine: str) -> None:
    """With everybody in the cohort: mean x+ = mean z."""
    run = fit(AcceleratedL2GD(3.0, 0.3), small_clients(), softmax_module(), 3, engine)
    last, before = run.recorder.banks[3], run.recorder.servers[2]
    some = torch.tensor([0, 2, 3, 4])
    for name in softmax.NAMES:
        found = last["model"][name][some].mean(0)
        torch.testing.assert_close(found, before["point"][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"mixing_weight": -1.0}, "`mixing_weight` to be a finite number >= 0, but got"),
        ({"momentum": 1.0}, r"`momentum` to be in \[0, 1\), but got momentum=1.0"),
        ({"momentum": -0.1}, r"`momentum` to be in \[0, 1\), but got momentum=-0.1"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AcceleratedL2GD(**settings)
