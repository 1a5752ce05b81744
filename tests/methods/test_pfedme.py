r"""pFedMe on quadratics: the inner steps are ``descend`` to (a c + lambda w) / (a + lambda)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.methods import FedAvg, PFedMe
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    descend,
    fit,
    q2,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, ragged
from tests.methods.references.pfedme import pfedme

CASE = Case(
    method=lambda: PFedMe(3.0, inner_steps=2, inner_lr=0.05, server_mixing=0.8),
    bytes={
        "defaults": Bytes(PFedMe, 4 * D, 4 * D),
    },
    twin=lambda: FedAvg(weighting="uniform"),
    published={"moreau_weight": 15.0, "inner_steps": 5, "inner_lr": 0.05, "server_mixing": 1.0},
)

W0 = torch.full((2,), 0.5, dtype=torch.float64)


def by_formula(
    in_rounds: list[Tensor], weight: float, inner: int, inner_lr: float, beta: float, epochs: int
) -> tuple[Tensor, Tensor]:
    x, client_state = W0, W0.repeat(4, 1)
    for cohort in in_rounds:
        ends = []
        for k in cohort.tolist():
            a, w, theta = A[k, None], x, x
            for _ in range(int(epochs * STEPS[k])):
                star = (a * C[k] + weight * w) / (a + weight)
                theta = descend(theta, a + weight, star[None], inner_lr, inner)[0]
                w = w - LR * weight * (w - theta)
            client_state[k] = theta
            ends.append(w)
        x = (1 - beta) * x + beta * torch.stack(ends).mean(0)
    return x, client_state


def long(weight: float, inner_lr: float, **settings: Any) -> PFedMe:
    """A method that solves the inner problem to rounding."""
    return PFedMe(weight, 60, inner_lr, local_epochs=None, local_steps=1, **settings)


class TestPFedMe:
    @closed_form
    @pytest.mark.parametrize("participation", [3, 2])
    @pytest.mark.parametrize("beta", [1.0, 0.6, 1.4])
    def test_rounds_match_the_closed_form(
        self, engine: str, beta: float, participation: int
    ) -> None:
        method = PFedMe(2.0, 3, 0.08, beta, local_epochs=2)
        module = QuadraticModule(2, LR, 0.5)
        run = fit(method, ragged(), module, 3, engine, participation=participation)
        in_rounds = cohorts(3, participation, eligible=SAMPLES.nonzero().flatten())
        x, client_state = by_formula(in_rounds, 2.0, 3, 0.08, beta, 2)
        close(run.server["model"]["w"], x)
        close(run.models["w"], client_state)

    @pytest.mark.slow
    def test_converges_to_the_optimum_of_the_envelopes(self, engine: str) -> None:
        """The envelope of a/2 (x - c)^2 has the curvature a lambda / (a + lambda): for lambda = 1
        weights 1/2 and 3/4 give x = 0.6, and theta = (a c + x) / (a + 1) = (0.3, 0.9)."""
        run = fit(long(1.0, 0.3), q2(), QuadraticModule(lr=1.5), 10, engine)
        assert float(run.server["model"]["w"]) == pytest.approx(0.6, abs=1e-9)
        assert run.models["w"].flatten().tolist() == pytest.approx([0.3, 0.9], abs=1e-9)

    def test_a_large_weight_leaves_no_room_to_personalize(self, engine: str) -> None:
        """From w = 0: theta = a (c - theta) / lambda, at most 3 / lambda, and so is w after it."""
        weight = 1e5
        method = long(weight, 0.9 / weight)
        run = fit(method, q2(), QuadraticModule(lr=1 / weight), 1, engine)
        assert run.models["w"].abs().max() < 3.1 / weight
        assert run.server["model"]["w"].abs().max() < 3.1 / weight

    def test_a_small_weight_solves_each_client_alone(self, engine: str) -> None:
        run = fit(long(1e-8, 0.3), q2(), QuadraticModule(lr=0.1), 2, engine)
        assert run.models["w"].flatten().tolist() == pytest.approx([0.0, 1.0], abs=1e-7)

    def test_the_inner_pull_is_not_zero(self, engine: str) -> None:
        """The pull compares theta with w, not with itself: with it, theta stays nearer to w."""
        loose, tight = (
            fit(PFedMe(weight, 5, 0.05), small_clients(), plain_module(0.01), 1, engine)
            for weight in (1e-6, 15.0)
        )
        start = plain_module().state_dict()["head.weight"]
        moved = [(r.models["head.weight"][3] - start).norm() for r in (loose, tight)]
        assert moved[1] < 0.5 * moved[0]

    @pytest.mark.parametrize("beta", [1.0, 0.7])
    def test_matches_the_reference(self, engine: str, beta: float) -> None:
        data = small_clients()
        method = PFedMe(3.0, 3, 0.06, beta)
        run = fit(method, data, plain_module(lr=0.1), 3, engine, participation=3)
        x, client_state = pfedme(plain_module(), data, cohorts(3, 3), 3.0, 3, 0.06, 0.1, beta)
        assert_trees_close(run.server["model"], x)
        assert_trees_close(run.models, {n: torch.stack([o[n] for o in client_state]) for n in x})

    def test_statistics_are_those_of_the_personal_models(self, engine: str) -> None:
        module, reference = small_module(), small_module()
        module.hparams.update(momentum=0.0, weight_decay=0.0)
        run = fit(PFedMe(3.0, 2, 0.06), small_clients(), module, 2, engine)
        x, client_state = pfedme(reference, small_clients(), cohorts(2, 4), 3.0, 2, 0.06, 0.05, 1.0)
        assert_trees_close(run.server["model"], x)
        assert_trees_close(run.models, {n: torch.stack([o[n] for o in client_state]) for n in x})
