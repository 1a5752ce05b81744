r"""APFL on quadratics: v's gradient is alpha a (alpha v + (1 - alpha) w - c), with w from the same
step; one step of both at a time, as the equations say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import APFL, FedAvg, LocalOnly
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    fit,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import SCALARS, cohorts, plain_module
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, ragged
from tests.methods.references.apfl import apfl

CASE = Case(
    method=lambda: APFL(mixing=0.3, adaptive=True),
    bytes={
        "defaults": Bytes(lambda: APFL(adaptive=True), 4 * D, 4 * D),
    },
    twin=lambda: APFL(0.0),
    published={"mixing": 0.5, "adaptive": False, "mix": "parameters", "weighting": "uniform"},
)


def by_formula(
    in_rounds: list[Tensor], mixing: float, adaptive: bool, epochs: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The global model, the own models and the mixing weights, one client and step at a time."""
    x = torch.full((2,), 0.5, dtype=torch.float64)
    client_state, alphas = x.repeat(4, 1), torch.full((4,), mixing, dtype=torch.float64)
    for cohort in in_rounds:
        ends = []
        for k in cohort.tolist():
            w, v, alpha = x, client_state[k], alphas[k].clone()
            for step in range(int(epochs * STEPS[k])):
                w = w - LR * A[k] * (w - C[k])
                g = A[k] * (alpha * v + (1 - alpha) * w - C[k])
                slope = g @ (v - w)
                v = v - LR * alpha * g
                if adaptive and step == 0:
                    alpha = (alpha - LR * slope).clamp(0, 1)
            client_state[k], alphas[k] = v, alpha
            ends.append(w)
        x = torch.stack(ends).mean(0)
    return x, client_state, alphas


class TestAPFL:
    @closed_form
    @pytest.mark.parametrize("adaptive", [False, True])
    @pytest.mark.parametrize("participation", [3, 2])
    def test_rounds_match_the_equations(
        self, engine: str, adaptive: bool, participation: int
    ) -> None:
        method = APFL(0.3, adaptive, local_epochs=2)
        module = QuadraticModule(2, LR, 0.5)
        run = fit(method, ragged(), module, 4, engine, participation=participation)
        in_rounds = cohorts(4, participation, eligible=SAMPLES.nonzero().flatten())
        x, client_state, alphas = by_formula(in_rounds, 0.3, adaptive, 2)
        close(run.server["model"]["w"], x)
        close(run.client_state["personal"]["w"], client_state)
        close(run.models["w"], alphas[:, None] * client_state + (1 - alphas[:, None]) * x)
        if adaptive:
            close(run.client_state["mixing"], alphas)
            assert len(set(alphas.tolist())) > 2

    @pytest.mark.slow
    @pytest.mark.parametrize("mixing", [0.5, 1.0])
    def test_the_mixture_reaches_each_clients_own_optimum(self, engine: str, mixing: float) -> None:
        """w settles, and v makes up for it, as long as v has a part in the mixture at all."""
        method = APFL(mixing, local_epochs=None, local_steps=220)
        run = fit(method, ragged(), QuadraticModule(2, 0.6, 0.5), 1, engine)
        # At the end of a round the mixture is with the clients' own w, the evaluated one with x.
        ends = run.recorder.rounds[-1].uploads
        assert ends is not None
        client_state = run.client_state["personal"]["w"][:3]
        reached = mixing * client_state + (1 - mixing) * ends["model"]["w"]
        torch.testing.assert_close(reached, C[:3], rtol=0, atol=1e-6)

    def test_the_own_model_has_a_gradient(self, engine: str) -> None:
        run = fit(APFL(0.5), small_clients(), plain_module(), 1, engine)
        start = plain_module().state_dict()
        for name, leaf in run.client_state["personal"].items():
            assert not torch.equal(leaf[3], start[name]), name

    def test_mixing_one_is_local_training_beside_fedavg(self, engine: str) -> None:
        a = fit(APFL(1.0), small_clients(), small_module(), 3, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 3, engine)
        assert_trees_close(a.models, b.models)

    def test_mixing_zero_predicts_as_fedavg(self, engine: str) -> None:
        a = fit(APFL(0.0), small_clients(), plain_module(), 3, engine)
        b = fit(FedAvg(weighting="uniform"), small_clients(), plain_module(), 3, engine)
        assert_trees_equal(a.models, b.models)
        start = plain_module().state_dict()
        assert_trees_equal(
            a.client_state["personal"], {n: s.expand(5, *s.shape) for n, s in start.items()}
        )

    @pytest.mark.parametrize("adaptive", [False, True])
    @pytest.mark.parametrize("mixing", [0.25, 0.75])
    def test_the_global_model_is_that_of_fedavg(
        self, engine: str, mixing: float, adaptive: bool
    ) -> None:
        a = fit(APFL(mixing, adaptive), small_clients(), small_module(), 3, engine)
        b = fit(FedAvg(weighting="uniform"), small_clients(), small_module(), 3, engine)
        assert_trees_equal(a.server, b.server)

    @pytest.mark.parametrize("adaptive", [False, True])
    def test_matches_the_reference(self, engine: str, adaptive: bool) -> None:
        data, module = small_clients(), plain_module(lr=0.3)
        run = fit(APFL(0.4, adaptive), data, module, 3, engine, participation=3)
        server, client_state, alphas = apfl(
            plain_module(), data, cohorts(3, 3), 0.4, adaptive, lr=0.3
        )
        assert_trees_close(run.server["model"], server)
        assert_trees_close(
            run.client_state["personal"],
            {n: torch.stack([o[n] for o in client_state]) for n in server},
        )
        if adaptive:
            close(run.client_state["mixing"], torch.stack(alphas))
            assert float(run.client_state["mixing"].std()) > 1e-4

    def test_statistics_of_the_mixture_stay_with_the_client(self, engine: str) -> None:
        module = small_module()
        module.hparams.update(momentum=0.0, weight_decay=0.0)
        run = fit(APFL(0.4), small_clients(), module, 2, engine)
        reference = small_module()
        reference.hparams.update(momentum=0.0, weight_decay=0.0)
        _, client_state, _ = apfl(reference, small_clients(), cohorts(2, 4), 0.4, False, lr=0.05)
        for name in ("backbone.1.running_mean", "backbone.1.num_batches_tracked"):
            torch.testing.assert_close(
                run.models[name], torch.stack([o[name] for o in client_state])
            )

    def test_one_model_travels_each_way(self, engine: str) -> None:
        method = APFL(adaptive=True)
        round = fit(method, small_clients(), plain_module(), 1, engine).recorder.rounds[0]
        assert round.bytes_down == round.bytes_up == 8 * SCALARS


def test_adaptive_weights_stay_between_zero_and_one() -> None:
    """A large rate drives them to the ends, and no further."""
    run = fit(APFL(0.5, adaptive=True), ragged(), QuadraticModule(2, 0.6, 3.0), 6)
    found = run.client_state["mixing"][:3]
    assert ((found >= 0) & (found <= 1)).all()
    assert (found == 1).any() or (found == 0).any()


def test_the_ends_are_said_to_be_other_methods() -> None:
    parameter_split = ParameterSplit(plain_module())
    assert APFL(1.0).notes(parameter_split) == ["mixing=1.0 makes APFL LocalOnly besides FedAvg."]
    assert APFL(0.0).notes(parameter_split) == ["mixing=0.0 makes APFL FedAvg."]
    assert APFL(0.5).notes(parameter_split) == APFL(1.0, adaptive=True).notes(parameter_split) == []
