"""FedPop: optima of Gaussian populations, the law of the Langevin steps, and NumPy."""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.methods import FedAvg, FedPop
from lightning_pfl.priors import DiagonalGaussianPrior, GaussianPrior, LaplacePrior
from lightning_pfl.testing import QuadraticModule, fit, q2, quadratic_clients
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import BODY, HEAD, Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import closed_form
from tests.methods.references import softmax
from tests.methods.references.fedpop import fedpop_client
from tests.methods.references.softmax import softmax_module

HEADS = GaussianPrior(1.0, parameters="head")
CASE = Case(
    method=lambda: FedPop(HEADS, 0.02, chain_steps=4, burn_in=2),
    bytes={
        "defaults": Bytes(FedPop, 4 * D, 4 * D),
        "learned variances": Bytes(
            lambda: FedPop(DiagonalGaussianPrior(parameters="head")),
            4 * BODY + 8 * HEAD,
            4 * BODY + 8 * HEAD,
        ),
    },
    twin=FedAvg,
    published={"chain_steps": 10, "burn_in": 5},
)


def modes(variance: float, **settings: Any) -> FedPop:
    """All parameters under a Gaussian; the chain descends to the mode."""
    return FedPop(GaussianPrior(variance), noise=False, **settings)


class TestGaussianPopulation:
    @closed_form
    @pytest.mark.parametrize(
        ("variance", "step_size", "prior_lr", "center", "models"),
        [
            (0.1, 0.09, 0.6, 0.717391304, [0.652173913, 0.782608696]),
            (1.0, 0.35, None, 0.6, [0.3, 0.9]),
            (10.0, 0.45, 11.0, 0.515625, [0.046875, 0.984375]),
        ],
    )
    def test_prior_and_models_are_those_of_maximum_likelihood(
        self,
        engine: str,
        variance: float,
        step_size: float,
        prior_lr: float | None,
        center: float,
        models: list[float],
    ) -> None:
        settings: Any = {"step_size": step_size, "prior_lr": prior_lr}
        method = modes(variance, chain_steps=20, burn_in=19, **settings)
        run = fit(method, q2(), QuadraticModule(), 25, engine)
        assert float(run.server["model"]["w"]) == pytest.approx(center, rel=1e-6)
        assert run.models["w"].flatten().tolist() == pytest.approx(models, rel=1e-6)

    def test_langevin_steps_have_the_variance_of_the_scheme(self, engine: str) -> None:
        """Precision P = 3 + 1, step 0.1: 1 / (P (1 - 0.1 P / 2)) = 0.3125, of which 4000
        coordinates know a fiftieth; the posterior itself has 0.25."""
        data = quadratic_clients([3.0], torch.zeros(1, 4000))
        method = FedPop(
            GaussianPrior(1.0), 0.1, chain_steps=40, burn_in=39, prior_lr=0.0, server_lr=1.0
        )
        run = fit(method, data, QuadraticModule(dim=4000), 1, engine)
        assert float(run.models["w"].var()) == pytest.approx(0.3125, rel=0.06)
        assert float(run.models["w"].mean()) == pytest.approx(0.0, abs=0.03)

    def test_noise_shrinks_with_the_number_of_samples(self) -> None:
        """Three samples of curvature 1: P = 4 for the step 0.1 = 0.3 / 3."""
        data = quadratic_clients([1.0], torch.zeros(1, 4000), 3)
        method = FedPop(GaussianPrior(1.0), 0.3, chain_steps=40, burn_in=39, prior_lr=0.0)
        run = fit(method, data, QuadraticModule(dim=4000), 1)
        assert float(run.models["w"].var()) == pytest.approx(0.3125, rel=0.06)


def test_a_classifier_trains_as_the_reference(engine: str) -> None:
    """The weights are personal, the bias is shared; the chain cycles through the minibatches."""
    data = small_clients(shuffle=True)
    method = FedPop(
        GaussianPrior(0.7, parameters="head.weight"),
        0.05,
        chain_steps=5,
        burn_in=2,
        noise=False,
        server_lr=0.3,
        prior_lr=0.2,
    )
    run = fit(method, data, softmax_module(), 3, engine, participation=3)
    start = softmax.as_numpy(softmax_module().state_dict())
    phi = {"head.bias": start["head.bias"]}
    mu = {"head.weight": start["head.weight"]}
    chains: dict[int, Any] = {}
    means: dict[int, Any] = {}
    for number, cohort in enumerate(cohorts(3, 3)):
        slopes = []
        for k in cohort.tolist():
            batches = islice(
                chain.from_iterable(
                    softmax.minibatches(data, k, number, epochs=1, first_epoch=epoch)
                    for epoch, _ in enumerate(repeat(None, 5))
                ),
                5,
            )
            chains[k], means[k], *slope = fedpop_client(
                chains.get(k, mu),
                phi,
                mu,
                batches,
                lambda w, batch: softmax.gradient(w, batch[0], batch[1]),
                0.7,
                SIZES[k],
                0.05,
                2,
            )
            slopes.append(slope)
        samples = [SIZES[k] for k in cohort.tolist()]
        phi = softmax.moved(phi, softmax.mean([by for by, _ in slopes], samples), -0.3)
        mu = softmax.moved(mu, softmax.mean([by for _, by in slopes], [1.0] * 3), -0.2)
    for name, leaf in {**phi, **mu}.items():
        np.testing.assert_allclose(run.server["model"][name], leaf, rtol=1e-10)
    for k in chains:
        for entry, found in (("chain", chains), ("mean", means)):
            np.testing.assert_allclose(
                run.client_state[entry]["head.weight"][k], found[k]["head.weight"], rtol=1e-10
            )


def test_a_narrow_prior_leaves_no_room_to_personalize(engine: str) -> None:
    run = fit(modes(1e-9, step_size=1e-10), q2(), QuadraticModule(), 3, engine)
    assert run.models["w"].abs().max() < 1e-6


def test_heads_are_under_the_prior_and_statistics_are_averaged() -> None:
    run = fit(FedPop(), small_clients(), small_module(), 2)
    assert set(run.client_state["chain"]) == {"head.weight", "head.bias"}
    start = small_module().state_dict()["backbone.1.running_mean"]
    found = run.strategy.global_state_dict()["backbone.1.running_mean"]
    assert not torch.equal(found, start)


def test_the_backbone_moves_along_the_mean_gradient() -> None:
    run = fit(FedPop(server_lr=0.5), small_clients(), plain_module(), 1)
    uploads, info = run.recorder.rounds[0].uploads or {}, run.recorder.rounds[0].info
    slope = (uploads["gradient"]["backbone.0.bias"] * info.weights.unsqueeze(1)).sum(0)
    start = plain_module().state_dict()["backbone.0.bias"]
    torch.testing.assert_close(run.server["model"]["backbone.0.bias"], start - 0.5 * slope)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"step_size": 0.0}, "`step_size` to be a finite number > 0, but got step_size=0.0"),
        ({"chain_steps": 0}, "`chain_steps` to be a whole number >= 1, but got chain_steps=0"),
        ({"burn_in": 10}, "`burn_in` to be below `chain_steps`, but got burn_in=10"),
        ({"burn_in": -1}, "`burn_in` to be a whole number >= 0, but got burn_in=-1"),
        ({"server_lr": 0.0}, "`server_lr` to be a finite number > 0, but got server_lr=0.0"),
        ({"prior_lr": -1.0}, "`prior_lr` to be a finite number >= 0, but got prior_lr=-1.0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedPop(**settings)


def test_a_prior_is_a_prior() -> None:
    with pytest.raises(TypeError, match="Expected `prior` to be a Prior, but got"):
        FedPop(1.0)  # type: ignore[arg-type]


def test_a_prior_without_curvature_needs_a_step() -> None:
    with pytest.raises(ValueError, match="`prior_lr` to be a number for LaplacePrior"):
        fit(FedPop(LaplacePrior()), q2(), QuadraticModule(), 1)
