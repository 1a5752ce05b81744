r"""FedDANE and FedLin: a corrected step maps x to y - lr (a (y - x) + g + mu (y - x)) on a
quadratic, so a round is ``descend`` with the curvature a + mu to x - g / (a + mu)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import SCAFFOLD, FedAvg, FedDANE
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    descend,
    fit,
    local_round,
    q2,
)
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import Case, D, bytes_of_rounds
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references import softmax
from tests.methods.references.softmax import softmax_module

CASE = Case(
    method=FedDANE,
    bytes=None,
    twin=FedAvg,
    above_zero="prox_weight",
)
FEDLIN: Any = {"prox_weight": 0.0, "weighting": "uniform"}


def test_a_trip_for_the_gradient_sends_the_model_and_one_back_both() -> None:
    found = bytes_of_rounds(FedDANE(), plain_module(), 4)
    assert found == [(4 * D, 4 * D), (8 * D, 4 * D)] * 2


class TestQuadratics:
    @closed_form
    @pytest.mark.parametrize("participation", [3, 2])
    def test_rounds_match_the_closed_form(self, engine: str, participation: int) -> None:
        method, module = FedDANE(0.7, local_epochs=2), QuadraticModule(2, LR, 0.5)
        run = fit(method, ragged(), module, 6, engine, participation=participation)
        x, g = torch.full((2,), 0.5, dtype=torch.float64), torch.zeros(2).double()
        in_rounds = cohorts(6, participation, eligible=SAMPLES.nonzero().flatten())
        for number, cohort in enumerate(in_rounds):
            a, c, weights = A[cohort], C[cohort], SAMPLES[cohort]
            if number % 2 == 0:
                g = mean(a[:, None] * (x - c), weights)
            else:
                center = x - g / (a + 0.7)[:, None]
                x = mean(descend(x, a + 0.7, center, LR, 2 * STEPS[cohort]), weights)
        close(run.server["model"]["w"], x)
        close(run.server["gradient"]["w"], g)

    @pytest.mark.parametrize(
        ("weight", "expected"),
        [(0.0, (1.0, 0.666667, 0.777778)), (1.0, (0.5625, 0.703125, 0.738281))],
    )
    def test_solved_problems_step_by_the_mean_inverse_curvature(
        self, engine: str, weight: float, expected: Any
    ) -> None:
        """x - mean(1 / (a + mu)) g on a = (1, 3), g = 2 (x - 0.75)."""
        x = 0.0
        for value in expected:
            x -= (1 / (1 + weight) + 1 / (3 + weight)) / 2 * 2 * (x - 0.75)
            assert x == pytest.approx(value, abs=5e-7)
        method = FedDANE(weight, local_steps=60)
        run = fit(method, q2(), QuadraticModule(lr=0.3), 6, engine)
        found = [float(server["model"]["w"]) for server in run.recorder.servers[2::2]]
        assert found == pytest.approx(expected, abs=1e-6)

    def test_fedlin_goes_to_the_optimum_where_fedavg_drifts(self, engine: str) -> None:
        run = fit(FedDANE(**FEDLIN, local_steps=10), q2(), QuadraticModule(), 12, engine)
        found = [float(server["model"]["w"]) for server in run.recorder.servers[2::2]]
        assert found[:2] == pytest.approx([0.731429289, 0.749540172], rel=1e-6)
        assert found[-1] == pytest.approx(0.75, rel=1e-9)


def test_fedlin_is_scaffold_with_controls_of_the_same_model(engine: Any) -> None:
    """All samples of a client are in every minibatch, so the order of passes doesn't matter."""
    small = small_clients().subset([0, 2, 3, 4])
    data = FederatedTensorDataset(small.fields, small.indices, batch_size=8)
    first = fit(FedDANE(**FEDLIN), data, plain_module(), 1, engine)
    sent = (first.recorder.rounds[0].uploads or {})["gradient"]
    server = {"model": first.server["model"], "control": first.server["gradient"]}
    state: Any = {"server": server, "client_state": {"control": sent}, "round": 1}
    method = SCAFFOLD("I", local_steps=3)
    expected = local_round(method, plain_module(), data, engine, **state).server["model"]
    both = fit(FedDANE(**FEDLIN, local_steps=3), data, plain_module(), 2, engine)
    assert_trees_close(both.server["model"], expected)


def test_one_client_is_plain_sgd(engine: str) -> None:
    """The correction is 0 with one client; without momentum, as its data come in another order."""
    one: Any = {"local_steps": 4}
    data = small_clients().subset([0])
    a = fit(FedDANE(0.0, **one), data, plain_module(), 2, engine)
    b = fit(FedAvg(**one), data, plain_module(), 1, engine)
    assert_trees_close(a.server["model"], b.server["model"])


def test_a_classifier_trains_as_the_reference(engine: str) -> None:
    data, lr, weight = small_clients(), 0.2, 0.3
    run = fit(FedDANE(weight), data, softmax_module(lr), 4, engine, participation=3)
    x = softmax.as_numpy(softmax_module().state_dict())
    mean_of_all: Any = None
    for number, cohort in enumerate(cohorts(4, 3)):
        gradients, models = [], []
        samples = [SIZES[k] for k in cohort.tolist()]
        for k in cohort.tolist():
            inputs = data.fields[0][data.indices[k]].flatten(1).numpy()
            own = softmax.gradient(x, inputs, data.fields[1][data.indices[k]].numpy())
            gradients.append(own)
            y = x
            # The pass for the gradient is the round's first.
            for batch in softmax.minibatches(data, k, number, epochs=1, first_epoch=1):
                g = softmax.gradient(y, *batch)
                if number % 2:
                    step = {n: g[n] - own[n] + mean_of_all[n] + weight * (y[n] - x[n]) for n in y}
                    y = softmax.moved(y, step, -lr)
            models.append(y)
        if number % 2:
            x = softmax.mean(models, samples)
        else:
            mean_of_all = softmax.mean(gradients, samples)
    for name in softmax.NAMES:
        np.testing.assert_allclose(run.server["model"][name], x[name], rtol=1e-10)


def test_the_pass_for_the_gradient_leaves_model_and_statistics_alone(engine: str) -> None:
    run = fit(FedDANE(), small_clients(), small_module(), 1, engine)
    assert_trees_close(run.server["model"], small_module().state_dict(), rtol=0, atol=0)
    assert float(run.server["gradient"]["head.weight"].abs().max()) > 0


def test_a_negative_weight_is_refused() -> None:
    match = "`prox_weight` to be a finite number >= 0, but got prox_weight=-1"
    with pytest.raises(ValueError, match=match):
        FedDANE(-1.0)
