r"""FedSplit on quadratics: prox_s(b) = (s a c + b) / (s a + 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pfl.methods import FedAvg, FedSplit
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import QuadraticModule, fit, q2
from lightning_pfl.testing.conformance import small_clients, small_module
from lightning_pfl.testing.rounds import local_round
from tests.engine.nets import CLASSES, image_clients
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR, SAMPLES, A, C, close, closed_form, ragged
from tests.methods.references import softmax
from tests.methods.references.softmax import softmax_module

CASE = Case(
    method=lambda: FedSplit(0.5, local_epochs=2),
    bytes={"defaults": Bytes(FedSplit, 4 * D, 4 * D)},
    twin=lambda: FedAvg(weighting="uniform"),
    above_zero="prox_step",
)


class TestQuadratics:
    @closed_form
    @pytest.mark.parametrize("participation", [3, 2])
    def test_rounds_match_the_closed_form(self, engine: str, participation: int) -> None:
        s, module = 0.8, QuadraticModule(2, LR, 0.5)
        method = FedSplit(s, "exact")
        run = fit(method, ragged(), module, 5, engine, participation=participation)
        z = torch.full((4, 2), 0.5, dtype=torch.float64)
        some = SAMPLES.nonzero().flatten()
        for cohort in cohorts(5, participation, eligible=some):
            # The client without data has no loss, and isn't counted.
            x, a = z[some].mean(0), A[cohort, None]
            u = (s * a * C[cohort] + 2 * x - z[cohort]) / (s * a + 1)
            z[cohort] = z[cohort] + 2 * (u - x)
        torch.testing.assert_close(run.client_state["point"]["w"], z, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(run.server["model"]["w"], z[some].mean(0), rtol=1e-8, atol=1e-9)

    def test_it_ends_in_the_optimum_of_the_mean_and_not_of_the_points(self, engine: str) -> None:
        """3/4 on two quadratics; with s = 1 after one round, at z = (0, 3/2)."""
        run = fit(FedSplit(1.0, "exact"), q2(), QuadraticModule(), 3, engine)
        for server in run.recorder.servers[1:]:
            assert float(server["model"]["w"]) == pytest.approx(0.75, rel=1e-9)
        assert run.client_state["point"]["w"].flatten().tolist() == pytest.approx([0, 1.5])

    def test_steps_of_the_optimizer_end_there_too(self, engine: str) -> None:
        method = FedSplit(0.4, local_steps=30)
        run = fit(method, q2(), QuadraticModule(lr=0.2), 20, engine)
        assert float(run.server["model"]["w"]) == pytest.approx(0.75, rel=1e-6)


def test_a_classifier_trains_as_the_reference(engine: str) -> None:
    data, lr, s = small_clients(), 0.2, 0.5
    run = fit(FedSplit(s), data, softmax_module(lr), 4, engine, participation=3)
    x = softmax.as_numpy(softmax_module().state_dict())
    points = dict.fromkeys(range(data.num_clients), x)
    for number, cohort in enumerate(cohorts(4, 3)):
        changes = []
        for k in cohort.tolist():
            y, anchor = x, {n: 2 * x[n] - points[k][n] for n in x}
            for batch in softmax.minibatches(data, k, number, epochs=1):
                g = softmax.gradient(y, *batch)
                y = softmax.moved(y, {n: g[n] + (y[n] - anchor[n]) / s for n in y}, -lr)
            changes.append({n: 2 * (y[n] - x[n]) for n in x})
            points[k] = softmax.moved(points[k], changes[-1], 1)
        x = {n: x[n] + np.sum([change[n] for change in changes], 0) / 4 for n in x}
    for name in softmax.NAMES:
        np.testing.assert_allclose(run.server["model"][name], x[name], rtol=1e-10)
        expected = np.stack([points[k][name] for k in range(data.num_clients)])
        np.testing.assert_allclose(run.client_state["point"][name], expected, rtol=1e-10)


def test_statistics_are_averaged(engine: str) -> None:
    run = fit(FedSplit(), small_clients(), small_module(), 1, engine)
    sent = (run.recorder.rounds[0].uploads or {})["model"]
    assert "head.weight" not in sent
    name = "backbone.1.running_mean"
    close(run.server["model"][name], sent[name].mean(0))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"prox_step": 0.0}, "`prox_step` to be a finite number > 0, but got prox_step=0.0"),
        ({"local_solver": "newton"}, "`local_solver` to be 'optimizer' or 'exact', but got"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedSplit(**settings)


@pytest.mark.parametrize("one_by_one", ["reference", "sequential"])
def test_each_gradient_of_the_exact_solver_counts_in_running_statistics(one_by_one: Any) -> None:
    """Of one batch with the mean m, k gradients leave (1 - 0.9^k) m."""
    data = image_clients((8, 6))
    features = data.fields[0].flatten(1).shape[1]
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(features))
    module = PersonalizedModule(backbone, nn.Linear(features, CLASSES), lr=0.1).double()
    run = local_round(FedSplit(0.5, "exact"), module, data, one_by_one, clients=[0])
    found = {name: leaf[0] for name, leaf in run.result.uploads["model"].items()}
    count = int(found["backbone.1.num_batches_tracked"])
    assert count > 1
    mean = data.fields[0][data.indices[0]].flatten(1).double().mean(0)
    expected = (1 - 0.9**count) * mean
    torch.testing.assert_close(found["backbone.1.running_mean"], expected, rtol=1e-9, atol=1e-12)
