r"""LpProj: its projection, optima of two quadratics, and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree
from lightning_pfl.methods import LocalOnly, LpProj
from lightning_pfl.methods.base import Known
from lightning_pfl.methods.lp_proj import lift, project
from lightning_pfl.testing import QuadraticModule, assert_trees_close, fit, q2
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import Bytes, Case
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import closed_form
from tests.methods.references import softmax
from tests.methods.references.lp_proj import lp_proj_client
from tests.methods.references.softmax import softmax_module

CASE = Case(
    method=lambda: LpProj(0.5, dim_ratio=0.3),
    bytes={
        # 77 numbers: 8 of them, or all.
        "defaults": Bytes(LpProj, 4 * 8, 4 * 8),
        "whole models": Bytes(lambda: LpProj(dim_ratio=1.0), 4 * 77, 4 * 77),
    },
    twin=lambda: LpProj(0.0),
    above_zero="penalty_weight",
)


def matrix(method: LpProj) -> np.ndarray:
    """P, from the images of all unit vectors."""
    unit = torch.eye(method.parameter_split.num_trainable(), dtype=torch.float64)
    return project(unit, method._constants(unit, 1)).T.numpy()


@pytest.mark.parametrize("ratio", [0.001, 0.3, 0.7, 1.0])
def test_the_projection_has_orthonormal_rows(ratio: float) -> None:
    method, module = LpProj(dim_ratio=ratio), plain_module()
    method.bind(Known.of(ParameterSplit(module), 3))
    p = matrix(method)
    assert p.shape == (max(1, round(77 * ratio)), 77)
    np.testing.assert_allclose(p @ p.T, np.eye(len(p)), atol=1e-15)
    assert (p != 0).sum() == 77
    assert {*np.sign(p[p != 0])} == {-1, 1}
    vectors = torch.arange(len(p), dtype=torch.float64)[None]
    lifted = lift(vectors, method._constants(vectors, 1))[0]
    np.testing.assert_allclose(lifted, p.T @ vectors[0].numpy(), atol=1e-14)


@pytest.mark.quick
def test_another_seed_draws_another_projection() -> None:
    found = []
    for seed in (0, 0, 1):
        method = LpProj(dim_ratio=0.3)
        method.bind(Known.of(ParameterSplit(plain_module()), 3, seed))
        found.append(matrix(method))
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).any()


class TestTwoQuadratics:
    """F = (x^2 / 2, 3 (x - 1)^2 / 2)."""

    @closed_form
    def test_squares_of_whole_models_have_the_optimum_of_pfedme(self, engine: str) -> None:
        method = LpProj(1.0, dim_ratio=1.0, local_steps=20)
        run = fit(method, q2(), QuadraticModule(lr=0.3), 20, engine)
        assert run.models["w"].flatten().tolist() == pytest.approx([0.3, 0.9], rel=1e-6)
        assert float(run.server["center"].abs()) == pytest.approx(0.6, rel=1e-6)

    @closed_form
    def test_weak_absolute_values_move_each_model_by_the_weight_over_the_curvature(
        self, engine: str
    ) -> None:
        """0 + 0.5 / 1 and 1 - 0.5 / 3, around any center between them."""
        method = LpProj(0.5, "l1", 1.0, server_lr=0.3, local_steps=20)
        run = fit(method, q2(), QuadraticModule(lr=0.3, start=0.6), 2, engine)
        assert run.models["w"].flatten().tolist() == pytest.approx([0.5, 5 / 6], rel=1e-6)
        assert float(run.server["center"].abs()) == pytest.approx(0.6, abs=1e-9)

    def test_strong_absolute_values_make_models_equal(self, engine: str) -> None:
        """In the minimiser 3/4 of the sum, where the slopes 3/4 are below the weight 1."""
        method = LpProj(1.0, "l1", 1.0, server_lr=0.8, local_steps=12)
        run = fit(method, q2(), QuadraticModule(lr=0.3), 25, engine)
        assert run.models["w"].flatten().tolist() == pytest.approx([0.75, 0.75], rel=1e-6)


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_a_classifier_trains_as_the_reference(norm: Any, engine: str) -> None:
    data, lr = small_clients(), 0.2
    method = LpProj(0.7, norm, 0.4, server_lr=0.9, local_epochs=2)
    run = fit(method, data, softmax_module(lr), 3, engine, participation=3)
    start = softmax.as_numpy(softmax_module().state_dict())

    def flat(w: Any) -> np.ndarray:
        return np.concatenate([w[name].ravel() for name in softmax.NAMES])

    def whole(theta: np.ndarray) -> Any:
        return {"head.weight": theta[:75].reshape(3, 25), "head.bias": theta[75:]}

    def gradient(theta: np.ndarray, batch: Any) -> np.ndarray:
        return flat(softmax.gradient(whole(theta), *batch))

    assert method.parameter_split.trainable == softmax.NAMES
    p, thetas = matrix(method), {k: flat(start) for k in range(len(SIZES))}
    center = p @ flat(start)
    for number, cohort in enumerate(cohorts(3, 3)):
        pulls = []
        for k in cohort.tolist():
            stream = softmax.minibatches(data, k, number, epochs=2)
            thetas[k], pull = lp_proj_client(thetas[k], center, p, stream, gradient, 0.7, norm, lr)
            pulls.append(pull)
        center = center + 0.9 * np.mean(pulls, 0)
    assert np.abs(center - p @ flat(start)).max() > 0.1
    np.testing.assert_allclose(run.server["center"], center, rtol=1e-10)
    for k, theta in thetas.items():
        np.testing.assert_allclose(run.models["head.weight"][k], whole(theta)["head.weight"])


def test_without_penalty_every_client_trains_alone(engine: str) -> None:
    a = fit(LpProj(0.0), small_clients(), small_module(), 2, engine)
    b = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
    found: Tree = a.models
    assert_trees_close(found, b.models)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"penalty_weight": -1.0}, "`penalty_weight` to be a finite number >= 0, but got"),
        ({"norm": "l3"}, "`norm` to be 'l1' or 'l2', but got norm='l3'"),
        ({"dim_ratio": 0.0}, r"`dim_ratio` to be in \(0, 1\], but got dim_ratio=0.0"),
        ({"server_lr": 0.0}, "`server_lr` to be a finite number > 0, but got server_lr=0.0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LpProj(**settings)
