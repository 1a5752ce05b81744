r"""SCAFFOLD on quadratics: the corrected gradient a (y - c_k) - u_k + u is that of a quadratic with
the centre c_k + (u_k - u) / a, so a round is ``descend`` to that centre."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_pfl.methods import SCAFFOLD, FedAvg
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    descend,
    fit,
    q2,
)
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, ragged
from tests.methods.references.scaffold import scaffold
from tests.trainer.setting import classes, network, trainer

CASE = Case(
    method=lambda: SCAFFOLD(option="I", server_lr=0.7),
    bytes={
        "defaults": Bytes(SCAFFOLD, 8 * D, 8 * D),
        "option I": Bytes(lambda: SCAFFOLD("I"), 8 * D, 8 * D),
    },
    twin=lambda: FedAvg(weighting="uniform"),
    published={"option": "II", "server_lr": 1.0},
)

OPTIONS: tuple[Any, ...] = ("I", "II")
N = int((SAMPLES > 0).sum())


def rounds_by_formula(
    option: str, in_rounds: list[Tensor], epochs: int = 1, server_lr: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The model, c and all c_k; the formulas as printed, for the given cohorts."""
    x, u = torch.full((2,), 0.5, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    client_state = torch.zeros(len(A), 2, dtype=torch.float64)
    for cohort in in_rounds:
        a, steps = A[cohort], (epochs * STEPS[cohort]).double()
        center = C[cohort] + (client_state[cohort] - u) / a[:, None]
        y = descend(x, a, center, LR, steps)
        new = a[:, None] * (x - C[cohort])
        if option == "II":
            new = client_state[cohort] - u + (x - y) / (steps * LR)[:, None]
        u_next = u + (new - client_state[cohort]).sum(0) / N
        x, u = x + server_lr * (y - x).mean(0), u_next
        client_state[cohort] = new
    return x, u, client_state


class HeavyBall(QuadraticModule):
    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=self.lr, momentum=0.8)


@pytest.mark.parametrize("option", OPTIONS)
class TestSCAFFOLD:
    @closed_form
    @pytest.mark.parametrize("server_lr", [1.0, 0.6])
    def test_rounds_match_the_closed_form(self, engine: str, option: Any, server_lr: float) -> None:
        method = SCAFFOLD(option, server_lr, local_epochs=2)
        run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 3, engine)
        everybody = [torch.tensor([0, 1, 2])] * 3
        x, u, client_state = rounds_by_formula(option, everybody, 2, server_lr)
        close(run.server["model"]["w"], x)
        close(run.server["control"]["w"], u)
        close(run.client_state["control"]["w"], client_state)

    def test_partial_participation_keeps_the_controls_of_the_others(
        self, engine: str, option: Any
    ) -> None:
        run = fit(
            SCAFFOLD(option), ragged(), QuadraticModule(2, LR, 0.5), 5, engine, participation=2
        )
        in_rounds = cohorts(5, 2, eligible=SAMPLES.nonzero().flatten())
        assert len({tuple(cohort.tolist()) for cohort in in_rounds}) > 1
        x, u, client_state = rounds_by_formula(option, in_rounds)
        close(run.server["model"]["w"], x)
        close(run.server["control"]["w"], u)
        close(run.client_state["control"]["w"], client_state)

    def test_c_is_the_mean_of_the_controls_of_clients_with_data_after_every_round(
        self, engine: str, option: Any
    ) -> None:
        with_data = torch.tensor(SIZES) > 0
        assert not with_data.all()
        recorder = fit(
            SCAFFOLD(option), small_clients(), small_module(), 4, engine, participation=2
        ).recorder
        for server, client_states in zip(recorder.servers, recorder.banks, strict=True):
            for name, leaf in server["control"].items():
                close(leaf, client_states["control"][name][with_data].mean(0))
        assert float(recorder.servers[-1]["control"]["head.weight"].abs().max()) > 1e-3

    @pytest.mark.slow
    def test_converges_to_the_optimum_where_fedavg_drifts(self, engine: str, option: Any) -> None:
        ten: Any = {"local_epochs": None, "local_steps": 10}
        run = fit(SCAFFOLD(option, **ten), q2(), QuadraticModule(), 60, engine)
        assert float(run.server["model"]["w"]) == pytest.approx(0.75, abs=1e-9)
        drifted = fit(FedAvg(**ten), q2(), QuadraticModule(), 60, engine)
        assert float(drifted.server["model"]["w"]) == pytest.approx(0.598711, abs=5e-7)

    @pytest.mark.slow
    def test_converges_with_one_of_two_clients_a_round(self, engine: str, option: Any) -> None:
        method = SCAFFOLD(option, local_epochs=None, local_steps=5)
        run = fit(method, q2(), QuadraticModule(lr=0.05), 150, engine, participation=1)
        assert float(run.server["model"]["w"]) == pytest.approx(0.75, abs=1e-4)

    def test_momentum_does_not_bias_the_controls(self, engine: str, option: Any) -> None:
        """The printed option II divides a displacement that momentum makes longer by K lr."""
        method = SCAFFOLD(option, local_epochs=None, local_steps=4)
        recorder = fit(method, q2(), HeavyBall(lr=0.02), 1, engine).recorder
        control = recorder.banks[1]["control"]["w"][1]
        if option == "I":
            close(control, torch.tensor([3.0 * (0.0 - 1.0)], dtype=torch.float64))
        else:
            w, v, grads = 0.0, 0.0, []
            for _ in range(4):
                grads.append(3.0 * (w - 1.0))
                v = 0.8 * v + grads[-1]
                w -= 0.02 * v
            close(control, torch.tensor([sum(grads) / 4], dtype=torch.float64))
            assert abs(-w / (4 * 0.02) - sum(grads) / 4) > 0.5

    def test_one_step_of_everybody_is_that_of_fedavg(self, engine: str, option: Any) -> None:
        """The corrections of all clients cancel: with one step each, the mean doesn't see them."""
        one: Any = {"local_epochs": None, "local_steps": 1}
        data = small_clients()
        a = fit(SCAFFOLD(option, **one), data, plain_module(), 3, engine)
        b = fit(FedAvg(weighting="uniform", **one), data, plain_module(), 3, engine)
        assert_trees_close(a.server["model"], b.server["model"])

    @pytest.mark.parametrize("participation", [4, 2])
    def test_matches_the_reference(self, engine: str, option: Any, participation: int) -> None:
        method, data = SCAFFOLD(option, local_epochs=2), small_clients()
        run = fit(method, data, plain_module(), 3, engine, participation=participation)
        in_rounds = cohorts(3, participation)
        x, c, client_state = scaffold(plain_module(), data, in_rounds, option, lr=0.05, epochs=2)
        assert_trees_close(run.server["model"], x)
        assert_trees_close(run.server["control"], c)
        assert_trees_close(
            run.client_state["control"], {n: torch.stack([o[n] for o in client_state]) for n in c}
        )

    def test_buffers_are_averaged_without_control(self, engine: str, option: Any) -> None:
        run = fit(SCAFFOLD(option), small_clients(), small_module(), 1, engine)
        uploads = run.recorder.rounds[0].uploads
        assert uploads is not None
        name = "backbone.1.running_mean"
        assert name not in run.server["control"]
        close(run.server["model"][name], uploads["model"][name].mean(0))


def test_options_agree_on_one_step_of_a_full_batch() -> None:
    one: Any = {"local_epochs": None, "local_steps": 1}
    a, b = (
        fit(SCAFFOLD(option, **one), q2(), QuadraticModule(), 3, participation=1)
        for option in OPTIONS
    )
    assert_trees_close(a.server, b.server)
    assert_trees_close(a.client_state, b.client_state)


def test_the_further_pass_of_option_one_leaves_model_and_statistics_alone() -> None:
    none: Any = {"local_epochs": 0}
    server = fit(SCAFFOLD("I", **none), small_clients(), small_module()).server
    start = small_module().state_dict()
    assert_trees_close(server["model"], start, rtol=1e-14, atol=0)
    assert float(server["control"]["head.weight"].abs().max()) > 0


def test_a_client_without_a_step_keeps_its_control_variate() -> None:
    """The first took three steps, whose gradients add up to 6, the second none."""
    one = torch.ones(2, 2)
    controls: Any = {"control": {"w": torch.tensor([[0.5, -1.0], [0.25, 3.0]])}}
    state: Any = {
        "model": {"w": one},
        "gradients": {"w": 6 * one * torch.tensor([[1.0], [0.0]])},
        "count": torch.tensor([3.0, 0.0], dtype=torch.float64),
    }
    upload, kept = SCAFFOLD().client_final({}, controls, state, cast(Any, None))
    assert kept["control"]["w"].tolist() == [[2.0, 2.0], [0.25, 3.0]]
    assert upload["control_change"]["w"].tolist() == [[1.5, 3.0], [0.0, 0.0]]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected `option` to be 'I' or 'II', but got option=2"):
        SCAFFOLD(option=2)  # type: ignore[arg-type]


@pytest.mark.usefixtures("clients_at_once")
def test_controls_that_are_zero_but_for_rounding_are_no_other_result() -> None:
    # The gradient of a bias before BatchNorm is zero, and its control variate is rounding.
    run = trainer(SCAFFOLD(), max_epochs=1, engine="auto")
    run.fit(network(), *classes())
    assert run.strategy.federation.engine.choices["training_step"].startswith("vectorized")
