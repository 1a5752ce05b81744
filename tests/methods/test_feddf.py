"""FedDF: FedAvg, then Adam towards the ensemble's outputs on public samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import FedAvg, FedDF
from lightning_pfl.solvers.distances import distance_to
from lightning_pfl.testing import assert_trees_close, assert_trees_equal, fit
from lightning_pfl.testing.conformance import SIZES, small_clients
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.public import pictures, with_public
from tests.methods.quadratics import closed_form
from tests.methods.references import softmax
from tests.methods.references.distillation import distilled
from tests.methods.references.softmax import softmax_module

few_steps = partial(FedDF, 4)  # by default they are 500
CASE = Case(
    method=few_steps,
    bytes={"few steps": Bytes(few_steps, 4 * D, 4 * D, with_public(plain_module))},
    twin=None,  # FedAvg, without public samples, which it doesn't need: tested below.
    above_zero="server_steps",
    published={"server_lr": 1e-3, "temperature": 1.0, "weighting": "samples"},
    problem={"make_module": with_public(plain_module)},
)


@closed_form
@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.0311388924), (3.0, 0.0298440308)])
def test_three_logits_have_the_known_divergence(temperature: float, expected: float) -> None:
    """Clients (2, 0, 0) and (0, 3, 0), and the student (1, 1, 0)."""
    teachers = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]]).double().mean(0, keepdim=True)
    student = torch.tensor([[1.0, 1.0, 0.0]]).double()
    found = distance_to(student, teachers, "kl", temperature)
    assert float(found) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("size", "drop_last"), [(3, False), (4, "single"), (5, True)])
def test_matches_the_reference(engine: str, size: int, drop_last: Any) -> None:
    public = with_public(softmax_module, batch_size=size, drop_last=drop_last)
    data, module, steps = small_clients(), public(), 5
    run = fit(FedDF(steps, 0.02, 2.0), data, module, 3, engine, participation=3)
    server = softmax.as_numpy(softmax_module().state_dict())
    rates = [0.02 * (1 + np.cos(np.pi * step / steps)) / 2 for step in range(steps)]
    for number, cohort in enumerate(cohorts(3, 3)):
        sent = []
        for k in cohort.tolist():
            w = server
            for batch in softmax.minibatches(data, k, number, epochs=1):
                w = softmax.moved(w, softmax.gradient(w, *batch), -0.05)
            sent.append(w)
        server = softmax.mean(sent, [SIZES[k] for k in cohort.tolist()])
        server = distilled(server, sent, number, rates, 2.0, batch=size)
        for name, leaf in server.items():
            found = run.recorder.servers[number + 1]["model"][name]
            np.testing.assert_allclose(found, leaf, rtol=1e-8)


def test_a_server_without_a_minibatch_is_refused(engine: str) -> None:
    module = with_public(plain_module, batch_size=10, drop_last=True)()
    with pytest.raises(MisconfigurationException, match="9 samples with batch_size=10"):
        fit(few_steps(), small_clients(), module, 1, engine)


def test_without_steps_it_is_fedavg(engine: str) -> None:
    method = FedDF(0)
    assert method.notes(ParameterSplit(plain_module())) == ["server_steps=0 makes FedDF FedAvg."]
    run = fit(method, small_clients(), plain_module(), 2, engine, participation=3)
    expected = fit(FedAvg(), small_clients(), plain_module(), 2, engine, participation=3)
    assert_trees_equal(run.server, expected.server)


def test_equal_clients_teach_nothing(engine: str) -> None:
    """The gradient is 0 at the average, but for rounding, which Adam divides by 1e-8."""
    data = small_clients().subset([3])
    run = fit(FedDF(1), data, with_public(plain_module)(), 1, engine)
    expected = fit(FedAvg(), data, plain_module(), 1, engine)
    assert_trees_close(run.server, expected.server, rtol=1e-9, atol=1e-10)


def test_the_ensemble_teaches_the_mean(engine: str) -> None:
    """After many steps the server's outputs are nearer to the clients' mean outputs."""
    module = with_public(plain_module)()
    run = fit(FedDF(60, 0.01), small_clients(), module, 1, engine)
    average = fit(FedAvg(), small_clients(), plain_module(), 1, engine)
    uploads = run.recorder.rounds[0].uploads
    assert uploads is not None

    def outputs(state: Any) -> torch.Tensor:
        net = plain_module()
        net.load_state_dict(state)
        with torch.no_grad():
            found: torch.Tensor = net(pictures())
        return found

    each = [{n: leaf[k] for n, leaf in uploads["model"].items()} for k in range(4)]
    wanted = torch.stack([outputs(state) for state in each]).mean(0)
    far = distance_to(outputs(average.server["model"]), wanted, "kl").mean()
    near = distance_to(outputs(run.server["model"]), wanted, "kl").mean()
    assert near < far / 2


def test_public_samples_are_needed() -> None:
    with pytest.raises(Exception, match="public samples, on which FedDF compares models, but got"):
        fit(FedDF(), small_clients(), plain_module(), 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"server_steps": -1}, "`server_steps` to be a whole number >= 0, but got"),
        ({"server_lr": 0}, "`server_lr` to be a finite number > 0, but got server_lr=0"),
        ({"temperature": 0}, "`temperature` to be a finite number > 0, but got temperature=0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedDF(**settings)
