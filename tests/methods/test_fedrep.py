r"""FedRep: the head is fitted to the received body, then the body to the new head; what is frozen
stays bit for bit.

On the split quadratic, a/2 ||b + h - c||^2, the head phase is gradient descent on h with the centre
c - b, the body phase on b with the centre c - h.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.methods import FedPer, FedRep
from lightning_pfl.methods.base import Phase
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import (
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
    local_round,
)
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import BODY, Bytes, Case
from tests.methods.quadratics import (
    LR,
    SAMPLES,
    STEPS,
    A,
    C,
    close,
    closed_form,
    mean,
    ragged,
)
from tests.methods.references.fedrep import fedrep
from tests.methods.split_quadratic import SplitQuadraticModule

CASE = Case(
    method=lambda: FedRep(head_epochs=2, body_epochs=1, head_lr=0.1),
    bytes={
        "defaults": Bytes(FedRep, 4 * BODY, 4 * BODY),
    },
    twin=FedPer,
    published={"personal": "head", "head_epochs": 10, "body_epochs": 1, "weighting": "samples"},
)


def split_quadratic() -> SplitQuadraticModule:
    return SplitQuadraticModule(2, LR, backbone=0.5, head=-0.2)


def halves(
    head_steps: Tensor, body_steps: Tensor, rounds: int, head_lr: float = LR, body_lr: float = LR
) -> tuple[Tensor, Tensor]:
    """Body ``(2,)`` and heads ``(clients, 2)`` after some rounds of full participation."""
    body, head = torch.full((2,), 0.5, dtype=torch.float64), torch.full_like(C, -0.2)
    for _ in range(rounds):
        head = descend(head, A, C - body, head_lr, head_steps)
        body = mean(descend(body, A, C - head, body_lr, body_steps), SAMPLES)
    return body, head


class TestFedRep:
    @closed_form
    @pytest.mark.parametrize("rounds", [1, 3])
    def test_rounds_match_the_closed_form(self, engine: str, rounds: int) -> None:
        run = fit(FedRep(head_epochs=3, body_epochs=2), ragged(), split_quadratic(), rounds, engine)
        body, head = halves(3 * STEPS, 2 * STEPS, rounds)
        close(run.server["model"]["backbone.weight"], body)
        close(run.client_state["model"]["head.weight"], head)

    def test_steps_and_rates_of_each_phase(self, engine: str) -> None:
        method = FedRep(head_steps=4, body_steps=1, head_lr=0.2, body_lr=0.05)
        run = fit(method, ragged(), split_quadratic(), 2, engine)
        some = (SAMPLES > 0).long()
        body, head = halves(4 * some, some, 2, 0.2, 0.05)
        close(run.server["model"]["backbone.weight"], body)
        close(run.client_state["model"]["head.weight"], head)

    @pytest.mark.parametrize("plateau", [False, True])
    def test_a_schedule_scales_the_rate_of_a_phase(self, engine: str, plateau: bool) -> None:
        class Scheduled(SplitQuadraticModule):
            def configure_optimizers(self) -> Any:
                optimizer = super().configure_optimizers()
                if plateau:  # with a threshold of 1 every round is a bad one
                    halve = torch.optim.lr_scheduler.ReduceLROnPlateau(
                        optimizer, factor=0.5, patience=0, threshold=1.0, eps=0
                    )
                    config = {"scheduler": halve, "monitor": "round/clients"}
                    return {"optimizer": optimizer, "lr_scheduler": config}
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        method = FedRep(head_steps=2, body_steps=1, head_lr=0.2)
        module = Scheduled(2, LR, backbone=0.5, head=-0.2)
        run = fit(method, ragged(), module, 3, engine)
        some = (SAMPLES > 0).long()
        body, head = torch.full((2,), 0.5, dtype=torch.float64), torch.full_like(C, -0.2)
        for factor in (1, 0.5, 0.25):
            head = descend(head, A, C - body, 0.2 * factor, 2 * some)
            body = mean(descend(body, A, C - head, LR * factor, some), SAMPLES)
        close(run.server["model"]["backbone.weight"], body)
        close(run.client_state["model"]["head.weight"], head)

    def test_a_solved_head_leaves_the_body_nothing_to_do(self, engine: str) -> None:
        method = FedRep(head_steps=100, body_epochs=1, head_lr=2 / 3.5)
        run = fit(method, ragged(), split_quadratic(), 1, engine)
        close(run.models["head.weight"][:3], C[:3] - 0.5)
        close(run.server["model"]["backbone.weight"], torch.full((2,), 0.5, dtype=torch.float64))

    def test_without_head_epochs_only_the_body_moves(self, engine: str) -> None:
        run = fit(FedRep(head_epochs=0), small_clients(), small_module(), 2, engine)
        start = small_module().state_dict()
        assert all(
            torch.equal(leaf, start[n].expand_as(leaf))
            for n, leaf in run.client_state["model"].items()
        )
        assert not torch.equal(run.server["model"]["backbone.0.weight"], start["backbone.0.weight"])

    def test_without_body_epochs_the_server_stays(self, engine: str) -> None:
        run = fit(FedRep(head_epochs=2, body_epochs=0), small_clients(), small_module(), 2, engine)
        body = {
            n: leaf for n, leaf in small_module().state_dict().items() if n.startswith("backbone")
        }
        assert_trees_close(run.server["model"], body, rtol=1e-14, atol=0)
        moved = [
            not torch.equal(head, small_module().state_dict()["head.weight"])
            for head in run.client_state["model"]["head.weight"]
        ]
        assert moved == [size > 0 for size in SIZES]

    def test_a_joint_schedule_makes_it_fedper(self, engine: str) -> None:
        method = FedRep()
        method.phases = lambda round: (Phase("all", epochs=2),)  # type: ignore[method-assign]
        a = fit(method, small_clients(), small_module(), 2, engine)
        b = fit(FedPer(local_epochs=2), small_clients(), small_module(), 2, engine)
        assert_trees_equal(a.server, b.server)
        assert_trees_equal(a.client_state, b.client_state)

    def test_matches_the_reference(self, engine: str) -> None:
        run = fit(FedRep(head_epochs=2, body_epochs=1), small_clients(), small_module(), 3, engine)
        expected = fedrep(small_module(), small_clients(), 3, 2, 1)
        assert_trees_close(
            run.models, {n: torch.stack([one[n] for one in expected]) for n in expected[0]}
        )


def everything_that_drifts() -> PersonalizedModule:
    """Momentum, weight decay on all parameters, BatchNorm in both halves: what moves frozen
    parameters by accident."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    head = nn.Sequential(nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "decay_bias": True}
    return PersonalizedModule(backbone, head, **settings).double()


@pytest.mark.parametrize("feature_cache", [True, False])
@pytest.mark.parametrize(("phase", "frozen"), [(0, "backbone"), (1, "head")])
def test_frozen_means_frozen(engine: Any, phase: int, frozen: str, feature_cache: bool) -> None:
    method = FedRep(head_epochs=3, body_epochs=3)
    settings = EngineSettings(feature_cache=feature_cache)
    whole = local_round(
        method, everything_that_drifts(), small_clients(), engine, settings=settings
    )
    models = local_round(
        method, everything_that_drifts(), small_clients(), engine, settings=settings, only=phase
    ).models
    start = everything_that_drifts().state_dict()
    for name, leaf in models.items():
        unchanged = [torch.equal(one, start[name]) for one in leaf]
        if name.startswith(frozen):
            assert all(unchanged), name
        else:
            # A one-sample client's BatchNorm output is independent of a bias before it, so some
            # entries may stay.
            assert not all(unchanged), name
    # Nor does the other phase undo it: momentum of the first must not leak into the second.
    assert any(
        not torch.equal(leaf[3], start[n])
        for n, leaf in whole.models.items()
        if n.startswith(frozen)
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"head_epochs": 2, "head_steps": 5}, "head"),
        ({"head_epochs": None}, "head"),
        ({"body_epochs": 3, "body_steps": 5}, "body"),
        ({"body_epochs": None}, "body"),
    ],
)
def test_exactly_one_budget_per_phase(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(
        ValueError, match=f"Expected exactly one of `{name}_epochs` and `{name}_steps`, but got"
    ):
        FedRep(**settings)


def test_steps_replace_the_default_epochs() -> None:
    method = FedRep(head_steps=5, body_steps=1)
    assert (method.head_epochs, method.head_steps, method.body_epochs, method.body_steps) == (
        None,
        5,
        None,
        1,
    )
