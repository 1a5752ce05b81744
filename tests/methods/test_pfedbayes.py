"""pFedBayes: conjugate Gaussians, whose posterior is known, and a classifier against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.mixture import Mix, is_mixed, parts
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree, tmap
from lightning_pfl.engine.sequential_local import SequentialLocalStep
from lightning_pfl.engine.vectorized.local import VectorizedLocalStep
from lightning_pfl.methods import LocalOnly, PFedBayes
from lightning_pfl.testing import QuadraticModule, fit, quadratic_clients
from lightning_pfl.testing.conformance import SIZES, small_clients
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import closed_form
from tests.methods.references import softmax
from tests.methods.references.pfedbayes import pfedbayes_client
from tests.methods.references.softmax import softmax_module

CASE = Case(
    # A client with one sample has the divergence's full weight.
    method=lambda: PFedBayes(0.01, draws=2, inner_steps=2),
    bytes={"defaults": Bytes(lambda: PFedBayes(0.01), 8 * D, 8 * D)},
    # The default divergence is for hundreds of samples; with the suite's one to eight its steps
    # would overshoot.
    twin=None,
    published={"kl_weight": 10.0, "inner_steps": 5, "initial_rho": -3.0, "server_mixing": 1.0},
)


def rho_of(variance: Any) -> Any:
    return np.log(np.expm1(np.sqrt(variance)))


def variance_of(rho: Tensor) -> Tensor:
    return torch.nn.functional.softplus(rho).square()


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws are 1 and -1 in turn: with two of them, the expectation of a quadratic is exact."""

    def noise(self: Any, like: Tree, key: str = "noise") -> Tree:
        sign = 1.0 if int(key.partition("/")[2]) % 2 == 0 else -1.0
        return tmap(lambda leaf: torch.full_like(leaf, sign), like)

    for step in (SequentialLocalStep, VectorizedLocalStep):
        monkeypatch.setattr(step, "noise", noise)


@closed_form
@pytest.mark.usefixtures("signs")
@pytest.mark.parametrize(
    ("zeta", "mean", "variance"),
    [
        (1.0, 0.8, 0.2),
        (10.0, 0.285714286, 0.714285714),
        pytest.param(0.1, 0.975609756, 0.024390244, marks=pytest.mark.slow),  # 450 steps
    ],
)
def test_a_client_finds_the_posterior_of_a_conjugate_prior(
    engine: str, zeta: float, mean: float, variance: float
) -> None:
    """Four samples of mean 1 and noise 1, prior N(0, 1): 1 / v = 4 / zeta + 1, m = 4 v / zeta."""
    data = quadratic_clients([1.0], [1.0], 4)
    method = PFedBayes(
        zeta,
        draws=2,
        inner_steps=450 if zeta < 1 else 200,
        copy_steps=None,
        initial_rho=float(rho_of(1.0)),
        local_steps=1,
    )
    run = fit(method, data, QuadraticModule(lr={0.1: 1.2, 1.0: 0.5, 10.0: 0.25}[zeta]), 1, engine)
    assert float(run.models["w"]) == pytest.approx(mean, rel=1e-6)
    found = variance_of(run.client_state["rho"]["w"])
    assert float(found) == pytest.approx(variance, rel=1e-6)
    # The divergence's minimiser is the client's own distribution, which it sends.
    assert float(run.server["model"]["w"]) == float(run.models["w"])


def posterior(ybar: np.ndarray, m: float, v: float, zeta: float) -> tuple[np.ndarray, np.ndarray]:
    """Of four samples with the mean ybar and noise 1."""
    precision = 4 / zeta + 1 / v
    return (4 * ybar / zeta + m / v) / precision, np.full(2, 1 / precision)


def rounds(ybar: list[float], combine: Any, zeta: float, count: int) -> list[tuple[float, float]]:
    """The common distribution after each round, whose clients solve exactly."""
    method = PFedBayes(zeta, combine)
    method.bind(Known.of(ParameterSplit(QuadraticModule()), 2))
    info = ClientInfo(
        torch.arange(2), torch.tensor([4, 4]), torch.ones(2), torch.full((2,), 0.5).double(), 0, 2
    )
    server: Tree = {
        "model": {"w": torch.zeros(1).double()},
        "rho": {"w": torch.tensor([rho_of(1.0)]).double()},
    }
    found = []
    for _ in range(count):
        m, v = float(server["model"]["w"]), float(variance_of(server["rho"]["w"]))
        means, variances = posterior(np.array(ybar), m, v, zeta)
        uploads = {
            "model": {"w": torch.tensor(means).unsqueeze(1)},
            "rho": {"w": torch.tensor(rho_of(variances)).unsqueeze(1)},
        }
        server = method.server_update(server, uploads, info)
        found.append((float(server["model"]["w"]), float(variance_of(server["rho"]["w"]))))
    return found


def test_averages_of_parameters_lose_the_spread_of_the_clients() -> None:
    """v = 1 / (1 + 4 t) after t rounds, whatever the data."""
    for number, (_, v) in enumerate(rounds([0.0, 4.0], "parameters", 1.0, 20), 1):
        assert v == pytest.approx(1 / (1 + 4 * number), rel=1e-9)


def test_moments_keep_the_spread_of_the_clients() -> None:
    found = rounds([0.0, 4.0], "moments", 1.0, 60)[-1]
    assert found == pytest.approx((2.0, 3.75), rel=1e-6)
    means, variances = posterior(np.array([0.0, 4.0]), *found, 1.0)
    assert means == pytest.approx([0.125, 3.875], rel=1e-6)
    assert variances == pytest.approx([0.234375] * 2, rel=1e-6)
    assert rounds([0.0, 4.0], "moments", 2.0, 90)[-1][1] == pytest.approx(3.5, rel=1e-6)
    # (4 - 0) / 2 = 2, and 2^2 - 1/4 = 3.75; where the spread is below the noise, nothing remains.
    narrow = rounds([0.0, 1.0], "moments", 1.0, 10)
    for number, expected in (
        (1, (0.4, 0.36)),
        (2, (0.459016, 0.234614)),
        (10, (0.498649, 0.080867)),
    ):
        assert narrow[number - 1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("signs")
@pytest.mark.parametrize("copy_steps", [2, 0])
def test_a_classifier_trains_as_the_reference(engine: str, copy_steps: int) -> None:
    data = small_clients(shuffle=True)
    method = PFedBayes(
        0.02,
        draws=2,
        inner_steps=2,
        copy_steps=copy_steps,
        initial_rho=-1.0,
        server_mixing=0.8,
    )
    run = fit(method, data, softmax_module(), 3, engine, participation=3)
    start = softmax.as_numpy(softmax_module().state_dict())
    server = start, {n: np.full_like(leaf, -1.0) for n, leaf in start.items()}
    memory: dict[int, Any] = {}
    for number, cohort in enumerate(cohorts(3, 3)):
        copies = []
        for k in cohort.tolist():
            memory[k], copy = pfedbayes_client(
                memory.get(k, server),
                server,
                softmax.minibatches(data, k, number, epochs=1),
                lambda w, batch: softmax.gradient(w, batch[0], batch[1]),
                0.02,
                SIZES[k],
                [[1.0, -1.0]] * 2,
                0.05,
                copy_steps,
            )
            copies.append(copy)
        means = [softmax.mean([copy[i] for copy in copies], [1.0] * 3) for i in range(2)]
        server = tuple(  # type: ignore[assignment]
            {n: old[n] + 0.8 * (new[n] - old[n]) for n in old}
            for old, new in zip(server, means, strict=True)
        )
    for name in start:
        np.testing.assert_allclose(run.server["model"][name], server[0][name], rtol=1e-9)
        np.testing.assert_allclose(run.server["rho"][name], server[1][name], rtol=1e-9)
        for k, (m, r) in memory.items():
            np.testing.assert_allclose(run.client_state["model"][name][k], m[name], rtol=1e-9)
            np.testing.assert_allclose(run.client_state["rho"][name][k], r[name], rtol=1e-9)


def test_a_heavy_divergence_holds_the_clients_at_the_common_model(engine: str) -> None:
    method = PFedBayes(1e6, copy_steps=0, inner_steps=1)
    module = QuadraticModule(lr=1e-10)
    run = fit(method, quadratic_clients(), module, 1, engine)
    assert run.models["w"].abs().max() < 1e-6


def test_without_divergence_and_spread_every_client_trains_alone(engine: str) -> None:
    """The deviation is softplus(-30) = 1e-13."""
    method = PFedBayes(1e-60, inner_steps=1, copy_steps=None, initial_rho=-30.0)
    run = fit(method, small_clients(), plain_module(), 2, engine)
    alone = fit(LocalOnly(), small_clients(), plain_module(), 2, engine)
    seen = run.recorder.rounds[0].info.index
    for name, leaf in alone.models.items():
        np.testing.assert_allclose(run.models[name][seen], leaf[seen], rtol=1e-9, atol=1e-12)


def test_predictions_may_average_drawn_models() -> None:
    method = PFedBayes(0.01, evaluation_draws=3)
    data = small_clients()
    run = fit(method, data, plain_module(), 1, val_data=data)
    models = run.models
    assert is_mixed(models)
    first, mix = parts(models)
    assert isinstance(mix, Mix)
    assert (mix.space, len(mix.others)) == ("probabilities", 2)
    mean = run.client_state["model"]["head.weight"]
    sigma = torch.nn.functional.softplus(run.client_state["rho"]["head.weight"])
    draws = [(m["head.weight"] - mean) / sigma for m in (first, *mix.others)]
    seen = run.recorder.rounds[0].info.index
    spread = torch.stack(draws, 1)[seen]
    assert 0.8 < float(spread.std()) < 1.2
    assert not torch.equal(draws[0], draws[1])


def test_a_step_that_is_too_long_is_warned_of() -> None:
    """10 / (1 sample * softplus(-3)^2 = 0.00236) is 4237."""
    with pytest.warns(UserWarning, match=r"kl_weight / \(samples \* variance\) to be below 2"):
        fit(PFedBayes(10.0), quadratic_clients(), QuadraticModule(lr=0.01), 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"kl_weight": 0.0}, "`kl_weight` to be a finite number > 0, but got kl_weight=0.0"),
        ({"combine": "mean"}, "'parameters' or 'moments', but got combine='mean'"),
        ({"draws": 0}, "`draws` to be a whole number >= 1, but got draws=0"),
        ({"inner_steps": 0}, "`inner_steps` to be a whole number >= 1, but got inner_steps=0"),
        ({"copy_steps": -1}, "`copy_steps` to be a whole number >= 0, but got copy_steps=-1"),
        ({"initial_rho": float("inf")}, "`initial_rho` to be a finite number, but got"),
        ({"server_mixing": 0.0}, "`server_mixing` to be a finite number > 0, but got"),
        ({"evaluation_draws": -1}, "`evaluation_draws` to be a whole number >= 0, but got"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PFedBayes(**settings)
