r"""PerAda: personal steps contract to (a c + 2 lambda w) / (a + 2 lambda) with curvature
a + 2 lambda; the server goes on from the mean by Adam on public samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import Ditto, FedAvg, FedMD, PerAda
from lightning_pfl.models import Adapter, LowRank
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_equal,
    descend,
    fit,
    q2,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.public import pictures, with_public
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references import softmax
from tests.methods.references.distillation import distilled
from tests.methods.references.softmax import softmax_module

CASE = Case(
    method=lambda: PerAda(0.5, server_steps=2, local_epochs=1),
    bytes={
        "defaults": Bytes(lambda: PerAda(server_steps=2), 4 * D, 4 * D, with_public(plain_module))
    },
    twin=None,  # Ditto, without public samples, which it doesn't need: tested below.
    above_zero="server_steps",
    published={
        "prox_weight": 1.0,
        "local_epochs": 10,
        "server_steps": 500,
        "server_lr": 1e-3,
        "server_weight_decay": 1e-4,
        "temperature": 1.0,
        "distil_rounds": 30,
        "weighting": "uniform",
    },
    problem={"make_module": with_public(plain_module)},
)


@closed_form
def test_rounds_match_the_closed_form(engine: str) -> None:
    """The penalty has no factor one half."""
    method = PerAda(0.35, server_steps=0, local_epochs=2)
    run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 3, engine)
    x = torch.full((2,), 0.5, dtype=torch.float64)
    v, a = x.expand(4, 2), A[:, None]
    for _ in range(3):
        v = descend(v, A + 0.7, (a * C + 0.7 * x) / (a + 0.7), LR, 2 * STEPS)
        x = mean(descend(x, A, C, LR, 2 * STEPS), SAMPLES > 0)
    close(run.server["model"]["w"], x)
    close(run.models["w"], v)


def test_on_two_quadratics_it_has_the_known_optimum(engine: str) -> None:
    """One step a round makes w the optimum 0.75; then (a c + w) / (a + 1) is (0.375, 0.9375)."""
    method = PerAda(0.5, server_steps=0, local_epochs=None, local_steps=1)
    run = fit(method, q2(), QuadraticModule(lr=0.3), 60, engine)
    expected = torch.tensor([0.375, 0.9375], dtype=torch.float64)
    torch.testing.assert_close(run.models["w"][:, 0], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("settings", [{"server_steps": 0}, {"distil_rounds": 0}])
def test_without_distillation_it_is_ditto_with_twice_the_weight(engine: str, settings: Any) -> None:
    method = PerAda(0.25, local_epochs=1, **settings)
    note = "Nothing is distilled: that is Ditto(prox_weight=0.5)."
    assert method.notes(ParameterSplit(small_module())) == [note]
    run = fit(method, small_clients(), small_module(), 2, engine, participation=3)
    other = fit(Ditto(0.5), small_clients(), small_module(), 2, engine, participation=3)
    assert_trees_equal(run.server, other.server)
    assert_trees_equal(run.client_state, other.client_state)


def test_matches_the_reference(engine: str) -> None:
    """Rounds 0 and 1 are distilled, round 2 isn't."""
    data, steps = small_clients(), 4
    method = PerAda(0.5, steps, 0.02, 0.3, 2.0, distil_rounds=2, local_epochs=1)
    run = fit(method, data, with_public(softmax_module)(), 3, engine, participation=3)
    server = softmax.as_numpy(softmax_module().state_dict())
    personal = dict.fromkeys(range(data.num_clients), server)
    for number, cohort in enumerate(cohorts(3, 3)):
        sent = []
        for k in cohort.tolist():
            w, v = server, personal[k]
            for batch in softmax.minibatches(data, k, number, epochs=1):
                w = softmax.moved(w, softmax.gradient(w, *batch), -0.05)
                pulled = softmax.moved(softmax.gradient(v, *batch), v, 1.0)
                v = softmax.moved(v, softmax.moved(pulled, server, -1.0), -0.05)
            sent.append(w)
            personal[k] = v
        server = softmax.mean(sent, [1.0] * len(sent))
        if number < 2:
            server = distilled(server, sent, number, [0.02] * steps, 2.0, 0.3)
        for name, leaf in server.items():
            found = run.recorder.servers[number + 1]["model"][name]
            np.testing.assert_allclose(found, leaf, rtol=1e-8)
    for k, v in personal.items():
        for name, leaf in v.items():
            np.testing.assert_allclose(run.models[name][k], leaf, rtol=1e-8)


def test_personal_models_leave_no_trace_in_the_common_one(engine: str) -> None:
    module = with_public(plain_module)
    settings: Any = {"server_steps": 2, "local_epochs": 1, "server_weight_decay": 0.0}
    a = fit(PerAda(3.0, **settings), small_clients(), module(), 2, engine)
    b = fit(PerAda(0.0, **settings), small_clients(), module(), 2, engine)
    assert_trees_equal(a.server, b.server)


def test_adapters_alone_are_sent_and_distilled(engine: str) -> None:
    def module() -> PersonalizedModule:
        torch.manual_seed(0)
        frozen: Any = nn.Conv2d(1, 2, 3).requires_grad_(False)
        backbone = nn.Sequential(frozen, Adapter(2, dropout=0.0), nn.Tanh(), nn.Flatten())
        return PersonalizedModule(backbone, LowRank(nn.Linear(18, 3), 1), lr=0.05).double()

    made = with_public(module)()
    before = {name: leaf.clone() for name, leaf in made.state_dict().items()}
    run = fit(PerAda(server_steps=3, local_epochs=1), small_clients(), made, 1, engine)
    sent = (2 * 2 + 2) + (18 + 3)
    assert run.recorder.rounds[0].bytes_up == run.recorder.rounds[0].bytes_down == 8 * sent
    assert sum(leaf.numel() for leaf in run.server["model"].values()) == sent
    average = fit(FedAvg(weighting="uniform"), small_clients(), module(), 1, engine).server["model"]
    moved = {n for n, leaf in run.server["model"].items() if not torch.equal(leaf, average[n])}
    assert moved == set(average)
    after = run.strategy.client_state_dict(3)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"backbone.0.weight", "backbone.0.bias", "head.layer.weight", "head.layer.bias"}


def test_public_samples_are_needed() -> None:
    """Before anything trains."""
    module: Any = plain_module()
    module.training_step = lambda *_: pytest.fail("a client trains")
    with pytest.raises(Exception, match="public samples, on which PerAda compares models, but got"):
        fit(PerAda(), small_clients(), module, 1)


@pytest.mark.parametrize("method", [PerAda(server_steps=1), FedMD(9)])
def test_labels_that_the_step_wants_are_asked_for(method: Any) -> None:
    module: Any = plain_module().double()
    nine = torch.arange(9)
    module.public_dataloader = lambda: FederatedTensorDataset((pictures(),), [nine], batch_size=3)
    with pytest.raises(ClientError, match=r"these are one tensor\. If the step wants labels, give"):
        fit(method, small_clients(), module, 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"prox_weight": -1}, "`prox_weight` to be a finite number >= 0, but got prox_weight=-1"),
        ({"server_steps": -1}, "`server_steps` to be a whole number >= 0, but got"),
        ({"server_lr": 0}, "`server_lr` to be a finite number > 0, but got server_lr=0"),
        ({"server_weight_decay": -1}, "`server_weight_decay` to be a finite number >= 0, but got"),
        ({"temperature": 0}, "`temperature` to be a finite number > 0, but got temperature=0"),
        ({"distil_rounds": -1}, "`distil_rounds` to be a whole number >= 0, but got"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PerAda(**settings)
