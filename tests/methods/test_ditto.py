r"""Ditto on quadratics: the personal steps contract to (a c + lambda x) / (a + lambda) with
curvature a + lambda; the global model is that of FedAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.methods import Ditto, FedAvg, LocalOnly
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
    q2,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references.ditto import ditto

CASE = Case(
    method=lambda: Ditto(prox_weight=0.5),
    bytes={
        "defaults": Bytes(Ditto, 4 * D, 4 * D),
    },
    twin=lambda: Ditto(0.0),
    published={"prox_weight": 1.0, "weighting": "uniform"},
)

W0 = torch.full((2,), 0.5, dtype=torch.float64)


class TestDitto:
    @closed_form
    @pytest.mark.parametrize("prox_weight", [0.0, 0.7, 5.0])
    @pytest.mark.parametrize("separate", [None, 3])
    def test_rounds_match_the_closed_form(
        self, engine: str, prox_weight: float, separate: int | None
    ) -> None:
        method = Ditto(prox_weight, personal_epochs=separate, local_epochs=2)
        run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 3, engine)
        x, v, a = W0, W0.expand(4, 2), A[:, None]
        for _ in range(3):
            star = (a * C + prox_weight * x) / (a + prox_weight)
            v = descend(v, A + prox_weight, star, LR, (separate or 2) * STEPS)
            x = mean(descend(x, A, C, LR, 2 * STEPS), SAMPLES > 0)
        close(run.server["model"]["w"], x)
        close(run.client_state["personal"]["w"], v)
        close(run.models["w"], v)

    def test_steps_in_the_place_of_epochs(self, engine: str) -> None:
        method = Ditto(0.7, personal_steps=5, local_epochs=None, local_steps=2)
        run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 1, engine)
        star = (A[:, None] * C + 0.7 * W0) / (A[:, None] + 0.7)
        close(run.models["w"], descend(W0, A + 0.7, star, LR, 5 * (SAMPLES > 0)))

    def test_partial_participation(self, engine: str) -> None:
        data, module = ragged(), QuadraticModule(2, LR, 0.5)
        run = fit(Ditto(0.7), data, module, 4, engine, participation=2)
        x, v = W0, W0.repeat(4, 1)
        for cohort in cohorts(4, 2, eligible=SAMPLES.nonzero().flatten()):
            a, c = A[cohort], C[cohort]
            star = (a[:, None] * c + 0.7 * x) / (a[:, None] + 0.7)
            v[cohort] = descend(v[cohort], a + 0.7, star, LR, STEPS[cohort])
            x = descend(x, a, c, LR, STEPS[cohort]).mean(0)
        close(run.server["model"]["w"], x)
        close(run.models["w"], v)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("prox_weight", "printed"),
        [
            (0.1, (0.068182, 0.991935)),
            (1.0, (0.375, 0.9375)),
            (10.0, (0.681818, 0.807692)),
        ],
    )
    def test_converges_to_the_regularised_optimum(
        self, engine: str, prox_weight: float, printed: tuple[float, float]
    ) -> None:
        """One step a round makes FedAvg converge to the optimum 0.75 of the mean loss."""
        a, c = np.array([1.0, 3.0]), np.array([0.0, 1.0])
        star = (a * c + prox_weight * 0.75) / (a + prox_weight)
        assert star == pytest.approx(printed, abs=5e-7)
        method = Ditto(prox_weight, personal_steps=9, local_epochs=None, local_steps=1)
        lr, rounds = (0.4, 15) if prox_weight < 10 else (0.12, 80)
        run = fit(method, q2(), QuadraticModule(lr=lr), rounds, engine)
        torch.testing.assert_close(run.models["w"][:, 0], torch.from_numpy(star), rtol=0, atol=1e-9)

    @pytest.mark.parametrize("settings", [{}, {"personal_epochs": 2}])
    def test_the_global_model_is_that_of_fedavg(self, engine: str, settings: Any) -> None:
        """Whatever the pull: the personal models leave no trace in it, nor in its statistics."""
        a = fit(Ditto(3.0, **settings), small_clients(), small_module(), 3, engine)
        b = fit(FedAvg(weighting="uniform"), small_clients(), small_module(), 3, engine)
        assert_trees_equal(a.server, b.server)
        assert_trees_equal(a.strategy.global_state_dict(), b.strategy.global_state_dict())

    def test_without_pull_the_personal_models_are_local_training(self, engine: str) -> None:
        a = fit(Ditto(0.0), small_clients(), small_module(), 3, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 3, engine)
        assert_trees_equal(a.models, b.models)

    @pytest.mark.parametrize("personal_epochs", [None, 2])
    def test_matches_the_reference(self, engine: str, personal_epochs: int | None) -> None:
        """With momentum, weight decay and BatchNorm; the reference leaves the penalty to
        autograd."""
        method = Ditto(0.5, personal_epochs)
        run = fit(method, small_clients(), small_module(), 3, engine)
        server, client_state = ditto(small_module(), small_clients(), 3, 0.5, personal_epochs)
        assert_trees_close(run.server["model"], server)
        assert_trees_close(
            run.models, {n: torch.stack([o[n] for o in client_state]) for n in server}
        )

    def test_one_client_goes_to_its_optimum_and_stays(self, engine: str) -> None:
        """Curvature 3, step 0.2: x keeps 0.4 of its distance a round; v 0.2, and 0.2 of that."""
        data, rounds = q2().subset([1]), 30
        run = fit(Ditto(1.0), data, QuadraticModule(lr=0.2), rounds, engine)
        x, v, path = 1.0, 1.0, []  # distances from the optimum
        for _ in range(rounds):
            x, v = 0.4 * x, 0.2 * v + 0.2 * x
            path.append(1 - v)
        found = [client_states["personal"]["w"].item() for client_states in run.recorder.banks[1:]]
        assert found == pytest.approx(path, rel=1e-12)
        close(run.models["w"], torch.ones(1, 1, dtype=torch.float64))


def test_a_client_that_never_took_part_has_the_initial_model() -> None:
    run = fit(Ditto(), small_clients(), small_module(), 2)
    start = small_module().state_dict()
    assert all(torch.equal(leaf[1], start[name]) for name, leaf in run.models.items())


def test_at_most_one_personal_budget() -> None:
    with pytest.raises(
        ValueError, match="Expected exactly one of `personal_epochs` and `personal_steps`, but got"
    ):
        Ditto(personal_epochs=1, personal_steps=1)
