"""LG-FedAvg: the mirror image of FedPer."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl.methods import (
    FedAvg,
    FedPer,
    LGFedAvg,
    LocalOnly,
)
from lightning_pfl.testing import (
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import HEAD, Bytes, Case
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references.split import split
from tests.methods.split_quadratic import SplitQuadraticModule

CASE = Case(
    method=lambda: LGFedAvg(local_epochs=None, local_steps=3),
    bytes={
        "defaults": Bytes(LGFedAvg, 4 * HEAD, 4 * HEAD),
    },
    twin=lambda: FedAvg(weighting="uniform"),
    published={"shared": "head", "weighting": "uniform"},
)


class TestLGFedAvg:
    @closed_form
    @pytest.mark.parametrize("rounds", [1, 3])
    def test_rounds_match_the_closed_form(self, engine: str, rounds: int) -> None:
        """Both halves have the gradient a (body + head - c): the sum descends at twice the rate,
        each does half of it."""
        module = SplitQuadraticModule(2, LR, backbone=0.5, head=-0.2)
        run = fit(LGFedAvg(local_epochs=2), ragged(), module, rounds, engine)
        body, head = torch.full_like(C, 0.5), torch.full((2,), -0.2, dtype=torch.float64)
        for _ in range(rounds):
            change = (descend(body + head, A, C, 2 * LR, 2 * STEPS) - (body + head)) / 2
            body, head = body + change, mean(head + change, SAMPLES > 0)
        close(run.client_state["model"]["backbone.weight"], body)
        close(run.server["model"]["head.weight"], head)

    @pytest.mark.parametrize("shared", ["head", "backbone", ["head.bias", "backbone.1"]])
    def test_is_fedper_with_the_roles_swapped(self, engine: str, shared: str | list[str]) -> None:
        def in_shared(name: str) -> bool:
            parts = [shared] if isinstance(shared, str) else shared
            return any(name == part or name.startswith(f"{part}.") for part in parts)

        rest = [name for name in small_module().state_dict() if not in_shared(name)]
        a = fit(LGFedAvg(shared=shared), small_clients(), small_module(), 2, engine)
        b = fit(
            FedPer(personal=rest, weighting="uniform"), small_clients(), small_module(), 2, engine
        )
        assert_trees_equal(a.server, b.server)
        assert_trees_equal(a.client_state, b.client_state)

    def test_everything_shared_is_fedavg(self, engine: str) -> None:
        a = fit(LGFedAvg(shared="all"), small_clients(), small_module(), 2, engine)
        b = fit(FedAvg(weighting="uniform"), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.server, b.server)

    def test_nothing_shared_is_local_training(self, engine: str) -> None:
        a = fit(LGFedAvg(shared=None), small_clients(), small_module(), 2, engine)
        b = fit(LocalOnly(), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.client_state, b.client_state)

    @pytest.mark.parametrize("weighting", ["samples", "uniform"])
    def test_matches_the_reference(self, engine: str, weighting: str) -> None:
        method = LGFedAvg(local_epochs=2, weighting=weighting)  # type: ignore[arg-type]
        run = fit(method, small_clients(), small_module(), 3, engine)
        body = [name for name in small_module().state_dict() if name.startswith("backbone")]
        expected = split(small_module(), small_clients(), 3, body, weighting == "samples", 2)
        assert_trees_close(
            run.models, {n: torch.stack([one[n] for one in expected]) for n in expected[0]}
        )

    def test_buffers_stay_with_their_layer(self, engine: str) -> None:
        run = fit(LGFedAvg(), small_clients(), small_module(), 1, engine)
        assert set(run.server["model"]) == {"head.weight", "head.bias"}
        assert "backbone.1.running_mean" in run.client_state["model"]


def test_a_shared_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Expected `shared` to match at least one parameter, but got shared='top'"
    ):
        fit(LGFedAvg(shared="top"), ragged(), SplitQuadraticModule())
