r"""FedProx on quadratics: K steps contract to v* = (a c + mu x) / (a + mu) with curvature a +
mu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_pfl.methods import FedAvg, FedProx
from lightning_pfl.solvers.proximal import pull
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
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references.fedprox import fedprox

CASE = Case(
    method=lambda: FedProx(prox_weight=0.5),
    bytes={
        "defaults": Bytes(FedProx, 4 * D, 4 * D),
    },
    twin=FedAvg,
    published={"prox_weight": 0.1, "weighting": "samples"},
)

W0 = torch.tensor([0.5, 0.5], dtype=torch.float64)


def fixed_point(prox_weight: float, steps: int) -> float:
    """sum r_k c_k / sum r_k with r_k = (1 - (1 - lr (a_k + mu))^K) a_k / (a_k + mu), for equal
    weights."""
    a = np.array([1.0, 3.0])
    r = (1 - (1 - LR * (a + prox_weight)) ** steps) * a / (a + prox_weight)
    return float((r * np.array([0.0, 1.0])).sum() / r.sum())


class TestFedProx:
    @closed_form
    @pytest.mark.parametrize("prox_weight", [0.0, 0.7, 5.0])
    def test_rounds_match_the_closed_form(self, engine: str, prox_weight: float) -> None:
        run = fit(
            FedProx(prox_weight, local_epochs=2), ragged(), QuadraticModule(2, LR, 0.5), 3, engine
        )
        w, a = W0, A[:, None]
        for _ in range(3):
            star = (a * C + prox_weight * w) / (a + prox_weight)
            w = mean(descend(w, A + prox_weight, star, LR, 2 * STEPS), SAMPLES)
        close(run.server["model"]["w"], w)

    @pytest.mark.parametrize(("prox_weight", "printed"), [(0.1, 0.601437), (1.0, 0.625507)])
    def test_fixed_point_lies_between_that_of_fedavg_and_the_optimum(
        self, engine: str, prox_weight: float, printed: float
    ) -> None:
        start = fixed_point(prox_weight, 10)
        assert start == pytest.approx(printed, abs=5e-7)
        assert fixed_point(0, 10) < start < 0.75
        method = FedProx(prox_weight, local_epochs=None, local_steps=10)
        run = fit(method, q2(), QuadraticModule(start=start), 1, engine)
        close(run.server["model"]["w"], torch.tensor([start], dtype=torch.float64))

    def test_weight_zero_is_fedavg(self, engine: str) -> None:
        a = fit(FedProx(0.0, local_epochs=2), small_clients(), small_module(), 2, engine)
        b = fit(FedAvg(local_epochs=2), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.server, b.server)

    def test_the_first_step_has_no_proximal_gradient(self, engine: str) -> None:
        one = {"local_epochs": None, "local_steps": 1}
        a = fit(FedProx(100.0, **one), small_clients(), small_module(), 2, engine)  # type: ignore[arg-type]
        b = fit(FedAvg(**one), small_clients(), small_module(), 2, engine)  # type: ignore[arg-type]
        assert_trees_equal(a.server, b.server)

    def test_a_large_weight_holds_the_server_still(self, engine: str) -> None:
        """At lr = 1 / mu the model ends within max(a) / mu of where it began, per unit of distance
        to c."""
        prox_weight = 1e6
        run = fit(
            FedProx(prox_weight, local_epochs=2),
            ragged(),
            QuadraticModule(2, 1 / prox_weight, 0.5),
            1,
            engine,
        )
        distance = float((C - W0).abs().max())
        assert (run.server["model"]["w"] - W0).abs().max() < 2 * float(
            A.max()
        ) / prox_weight * distance

    def test_matches_the_reference(self, engine: str) -> None:
        """With momentum, weight decay and BatchNorm; the reference leaves the penalty to
        autograd."""
        run = fit(FedProx(0.5, local_epochs=2), small_clients(), small_module(), 3, engine)
        assert_trees_close(run.server["model"], fedprox(small_module(), small_clients(), 3, 0.5, 2))

    def test_one_client_is_regularised_sgd(self, engine: str) -> None:
        data = small_clients().subset([3])
        run = fit(FedProx(0.5), data, small_module(), 2, engine)
        assert_trees_close(run.server["model"], fedprox(small_module(), data, 2, 0.5))


def test_pull_adds_the_gradient_of_the_penalty() -> None:
    y, x, g = torch.randn(3, 2, 4, dtype=torch.float64).unbind()
    leaf = y.clone().requires_grad_()
    (0.7 / 2 * (leaf - x).square().sum()).backward()
    assert leaf.grad is not None
    got = pull({"w": g}, {"w": y, "buffer": x}, {"w": x, "buffer": x}, 0.7)
    assert list(got) == ["w"]
    torch.testing.assert_close(got["w"], g + leaf.grad, rtol=1e-14, atol=1e-15)
