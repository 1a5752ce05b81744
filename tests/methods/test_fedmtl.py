r"""FedMTL on quadratics: with s the sum of the others, each penalty leaves the client a quadratic,
of curvature a + 2 r (2 - 1/m) and centre (a c + 2 r s / m) / curvature for the spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.methods import FedMTL, LocalOnly
from lightning_pfl.methods.fedmtl import penalty_gradient
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import SCALARS, cohorts, plain_module
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, ragged
from tests.methods.references.fedmtl import fedmtl, penalty

CASE = Case(
    method=lambda: FedMTL(0.05),
    bytes={
        # The sum of the others' models in the place of all of them.
        "defaults": Bytes(FedMTL, 4 * D, 4 * D),
    },
    twin=lambda: FedMTL(0.0),
    above_zero="regularization",
)

MODES: tuple[Any, ...] = ("spread", "asrun", "none")


def by_formula(in_rounds: list[Tensor], r: float, mode: str) -> Tensor:
    w = torch.full((4, 2), 0.5, dtype=torch.float64)
    for cohort in in_rounds:
        m, a, c = len(cohort), A[cohort], C[cohort]
        rest = w[cohort].sum(0) - w[cohort]
        client_state, other = {
            "spread": (2 - 1 / m, -1 / m),
            "asrun": (1 + (1 - 1 / m) ** 2, (1 - 1 / m) ** 2),
            "none": (1.0, 0.0),
        }[mode]
        curvature = a + 2 * r * client_state
        center = (a[:, None] * c - 2 * r * other * rest) / curvature[:, None]
        w[cohort] = descend(w[cohort], curvature, center, LR, STEPS[cohort])
    return w


@pytest.mark.parametrize("mode", MODES)
class TestFedMTL:
    @closed_form
    @pytest.mark.parametrize("participation", [3, 2, 1])
    def test_rounds_match_the_closed_form(self, engine: str, mode: Any, participation: int) -> None:
        method, module = FedMTL(0.4, mode), QuadraticModule(2, LR, 0.5)
        run = fit(method, ragged(), module, 4, engine, participation=participation)
        in_rounds = cohorts(4, participation, eligible=SAMPLES.nonzero().flatten())
        expected = by_formula(in_rounds, 0.4, mode)
        close(run.models["w"], expected)
        close(run.server["models"]["w"], expected)

    def test_matches_the_reference(self, engine: str, mode: Any) -> None:
        """With momentum, weight decay and BatchNorm."""
        data = small_clients()
        run = fit(FedMTL(0.05, mode), data, small_module(), 3, engine, participation=3)
        client_state = fedmtl(small_module(), data, cohorts(3, 3), 0.05, mode)
        assert_trees_close(
            run.models, {n: torch.stack([o[n] for o in client_state]) for n in client_state[0]}
        )

    def test_without_penalty_every_client_trains_alone(self, engine: str, mode: Any) -> None:
        a = fit(FedMTL(0.0, mode), small_clients(), small_module(), 2, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.models, b.models)

    def test_the_penalty_has_an_effect(self, engine: str, mode: Any) -> None:
        """Built on detached weights it would have no gradient, and this would be local training."""
        a = fit(FedMTL(0.05, mode), small_clients(), plain_module(), 1, engine)
        b = fit(LocalOnly(), small_clients(), plain_module(), 1, engine)
        change = a.models["head.weight"][3] - b.models["head.weight"][3]
        assert float(change.abs().max()) > 1e-4

    def test_one_model_up_and_the_sum_of_the_others_down(self, engine: str, mode: Any) -> None:
        round = fit(FedMTL(0.1, mode), small_clients(), small_module(), 1, engine).recorder.rounds[
            0
        ]
        trainable = sum(p.numel() for p in small_module().parameters())
        assert round.bytes_up == 8 * trainable
        assert round.bytes_down == (0 if mode == "none" else 8 * trainable)


@pytest.mark.parametrize("mode", MODES)
def test_the_penalty_is_the_gradient_of_the_trace(mode: Any) -> None:
    m, d = 4, 5
    columns = torch.randn(d, m, dtype=torch.float64)
    expected = []
    for at in range(m):
        client_state = columns[:, at].clone().requires_grad_()
        penalty(client_state, columns, at, mode).backward()
        assert client_state.grad is not None
        assert float(client_state.grad.abs().max()) > 0
        expected.append(client_state.grad)
    model = {"w": columns.T}
    others = {"w": columns.sum(1) - columns.T}
    share = torch.full((m,), 1 / m, dtype=torch.float64)
    got = penalty_gradient(model, others, share, mode)["w"]
    torch.testing.assert_close(2 * got, torch.stack(expected), rtol=1e-12, atol=1e-13)


def test_equal_models_have_no_spread() -> None:
    same = {"w": torch.randn(5, dtype=torch.float64).expand(4, 5)}
    others = {"w": 3 * same["w"]}
    share = torch.full((4,), 0.25, dtype=torch.float64)
    spread, none, as_run = (
        penalty_gradient(same, others, share, mode)["w"] for mode in ("spread", "none", "asrun")
    )
    torch.testing.assert_close(spread, none, rtol=1e-12, atol=1e-14)
    # The mistaken matrix pulls equal models to zero instead.
    torch.testing.assert_close(as_run, none + 9 / 16 * 4 * same["w"], rtol=1e-12, atol=1e-14)


def test_rounds_converge_to_the_joint_optimum() -> None:
    """a_k (w_k - c_k) + 2 r (2 w_k - mean(w)) = 0 for all k: a linear system."""
    a, c, r = np.array([1.0, 3.0, 0.5]), np.array([0.0, 1.0, -2.0]), 0.3
    matrix = np.diag(a + 4 * r) - 2 * r / 3 * np.ones((3, 3))
    star = np.linalg.solve(matrix, a * c)
    method = FedMTL(r, local_epochs=None, local_steps=4)
    run = fit(method, quadratic_clients(a.tolist(), c.tolist()), QuadraticModule(lr=0.3), 30)
    assert run.models["w"].flatten().tolist() == pytest.approx(star.tolist(), abs=1e-9)


def test_there_is_no_global_model_and_unsampled_clients_have_the_initial_one() -> None:
    run = fit(FedMTL(0.1), small_clients(), plain_module(), 2)
    assert run.strategy.method.global_model(run.server) is None
    start = plain_module().state_dict()
    assert all(torch.equal(leaf[1], start[name]) for name, leaf in run.models.items())
    assert sum(leaf[0].numel() for leaf in run.server["models"].values()) == SCALARS


def test_an_unknown_relationship_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Expected `relationship` to be 'spread', .* but got relationship='mean'"
    ):
        FedMTL(relationship="mean")  # type: ignore[arg-type]
