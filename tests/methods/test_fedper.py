r"""FedPer: body and head train together, only the body is averaged.

On the split quadratic, a/2 ||b + h - c||^2, both halves have the same gradient: the sum follows
``descend`` at twice the rate, and each half moves by half of its change.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pfl.methods import FedAvg, FedPer, LocalOnly
from lightning_pfl.testing import (
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import BODY, Bytes, Case
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references.split import split
from tests.methods.split_quadratic import SplitQuadraticModule

CASE = Case(
    method=lambda: FedPer(),
    bytes={
        "defaults": Bytes(FedPer, 4 * BODY, 4 * BODY),
    },
    twin=FedAvg,
    published={"personal": "head", "weighting": "samples"},
)

HEAD = ("head.weight", "head.bias")


def split_quadratic() -> SplitQuadraticModule:
    return SplitQuadraticModule(2, LR, backbone=0.5, head=-0.2)


def halves(epochs: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Body ``(2,)`` and heads ``(clients, 2)`` after some rounds of full participation."""
    body, head = torch.full((2,), 0.5, dtype=torch.float64), torch.full_like(C, -0.2)
    for _ in range(rounds):
        change = (descend(body + head, A, C, 2 * LR, epochs * STEPS) - (body + head)) / 2
        body, head = mean(body + change, SAMPLES), head + change
    return body, head


class TestFedPer:
    @closed_form
    @pytest.mark.parametrize("rounds", [1, 3])
    def test_rounds_match_the_closed_form(self, engine: str, rounds: int) -> None:
        run = fit(FedPer(local_epochs=2), ragged(), split_quadratic(), rounds, engine)
        body, head = halves(2, rounds)
        close(run.server["model"]["backbone.weight"], body)
        close(run.client_state["model"]["head.weight"], head)

    def test_personal_models_have_the_current_body(self, engine: str) -> None:
        run = fit(FedPer(), ragged(), split_quadratic(), 2, engine)
        body, head = halves(1, 2)
        close(run.models["backbone.weight"], body.expand(4, 2))
        close(run.models["head.weight"], head)

    def test_nothing_personal_is_fedavg(self, engine: str) -> None:
        a = fit(FedPer(personal=None), small_clients(), small_module(), 2, engine)
        b = fit(FedAvg(), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.server, b.server)

    def test_nothing_shared_is_local_training(self, engine: str) -> None:
        a = fit(FedPer(personal=["backbone", "head"]), small_clients(), small_module(), 2, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.client_state, b.client_state)

    @pytest.mark.parametrize("weighting", ["samples", "uniform"])
    def test_matches_the_reference(self, engine: str, weighting: str) -> None:
        method = FedPer(local_epochs=2, weighting=weighting)  # type: ignore[arg-type]
        run = fit(method, small_clients(), small_module(), 3, engine)
        expected = split(small_module(), small_clients(), 3, HEAD, weighting == "samples", 2)
        assert_trees_close(
            run.models, {n: torch.stack([one[n] for one in expected]) for n in expected[0]}
        )

    def test_a_client_that_never_took_part_has_the_initial_head(self, engine: str) -> None:
        run = fit(FedPer(), small_clients(), small_module(), 2, engine)
        start = small_module().state_dict()
        assert torch.equal(run.models["head.weight"][1], start["head.weight"])
        assert not torch.equal(run.models["backbone.0.weight"][1], start["backbone.0.weight"])

    def test_there_is_no_global_model(self, engine: str) -> None:
        assert (
            fit(FedPer(), ragged(), split_quadratic(), 1, engine).strategy.method.global_model({})
            is None
        )


def test_a_personal_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"Expected `personal` to match at least one parameter, but got personal='haed'",
    ):
        fit(FedPer(personal="haed"), ragged(), split_quadratic())
