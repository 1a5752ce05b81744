r"""Per-FedAvg on quadratics: the inner step maps x - c to (1 - alpha a) (x - c), so the outer steps
are ``descend`` with the curvature a (1 - alpha a), or a (1 - alpha a)^2 for the true gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import FedAvg, PerFedAvg
from lightning_pfl.methods.base import LocalStep
from lightning_pfl.methods.per_fedavg import moved
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    descend,
    fit,
    q2,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import Bytes, Case, D
from tests.methods.networks import cohorts, plain_module
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
from tests.methods.references import softmax
from tests.methods.references.per_fedavg import per_fedavg
from tests.methods.references.softmax import softmax_module
from tests.orders_by_hand import order_by_hand

CASE = Case(
    method=lambda: PerFedAvg(0.1, order="hessian-free"),
    bytes={
        "defaults": Bytes(PerFedAvg, 4 * D, 4 * D),
        "learned rates": Bytes(lambda: PerFedAvg(learn_inner_lr=True), 8 * D, 8 * D),
    },
    twin=lambda: PerFedAvg(0.0),
    published={"inner_lr": 0.01, "order": "first", "difference": 1e-3, "weighting": "uniform"},
)

W0 = torch.full((2,), 0.5, dtype=torch.float64)
ALPHA = 0.2
ORDERS = [("first", 1), ("hessian-free", 2)]


class TestPerFedAvg:
    @closed_form
    @pytest.mark.parametrize(("order", "power"), ORDERS)
    def test_rounds_match_the_closed_form(self, engine: str, order: Any, power: int) -> None:
        method = PerFedAvg(ALPHA, order, local_epochs=4)
        run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 3, engine)
        # Four epochs of 2, 1 and 3 minibatches, cut into steps of two or three.
        steps = -(-4 * STEPS // (power + 1))
        x = W0
        for _ in range(3):
            x = mean(descend(x, A * (1 - ALPHA * A) ** power, C, LR, steps), SAMPLES > 0)
        close(run.server["model"]["w"], x)

    @pytest.mark.parametrize(("order", "power"), ORDERS)
    def test_partial_participation(self, engine: str, order: Any, power: int) -> None:
        method = PerFedAvg(ALPHA, order, local_epochs=None, local_steps=2)
        run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 4, engine, participation=2)
        x = W0
        for cohort in cohorts(4, 2, eligible=SAMPLES.nonzero().flatten()):
            a = A[cohort]
            x = descend(x, a * (1 - ALPHA * a) ** power, C[cohort], LR, 2).mean(0)
        close(run.server["model"]["w"], x)

    @pytest.mark.parametrize(("order", "power"), ORDERS)
    def test_converges_to_the_point_of_its_order(self, engine: str, order: Any, power: int) -> None:
        """sum r_k c_k / sum r_k with r_k = a_k (1 - alpha a_k)^p: for p = 2 the optimum of the meta
        loss, which leaving out the second derivative misses."""
        a, c = np.array([1.0, 3.0]), np.array([0.0, 1.0])
        r = a * (1 - ALPHA * a) ** power
        method = PerFedAvg(ALPHA, order, local_epochs=None, local_steps=1)
        run = fit(method, q2(), QuadraticModule(lr=0.9), 35, engine)
        assert float(run.server["model"]["w"]) == pytest.approx((r * c).sum() / r.sum(), abs=1e-9)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_clients_are_evaluated_after_inner_steps(self, engine: str, steps: int) -> None:
        method = PerFedAvg(ALPHA, evaluation_steps=steps)
        run = fit(method, ragged(), QuadraticModule(2, LR, 0.5), 2, engine)
        x = run.server["model"]["w"]
        expected = descend(x, A, C, ALPHA, steps * (SAMPLES > 0))
        close(run.models["w"], expected)
        assert torch.equal(run.strategy.global_state_dict()["w"], x)

    def test_adaptation_sees_training_data_alone(self, engine: str) -> None:
        """The validation clients have other centres: adapting on them would give another loss."""
        elsewhere = quadratic_clients(A, C + 7, [2, 3, 1, 0])
        run = fit(
            PerFedAvg(ALPHA), ragged(), QuadraticModule(2, LR, 0.5), 1, engine, val_data=elsewhere
        )
        x = run.server["model"]["w"]
        personal = descend(x, A, C, ALPHA, 1)
        losses = A / 2 * (personal - C - 7).square().sum(1)
        assert run.metrics["val_loss"] == pytest.approx(float(losses[:3].mean()), rel=1e-6)
        losses = A / 2 * (x - C - 7).square().sum(1)
        assert run.metrics["global/val_loss"] == pytest.approx(float(losses[:3].mean()), rel=1e-6)

    def test_the_inner_step_is_plain_whatever_the_optimizer(self, engine: str) -> None:
        """Momentum 0.9 and weight decay are the outer step's."""
        run = fit(PerFedAvg(ALPHA), small_clients(), small_module(), 1, engine)
        data, start = small_clients(), run.strategy.global_state_dict()
        some = order_by_hand(8, 3, 0, stream="adaptation")[:3]
        net = small_module()
        net.load_state_dict(start)
        x, y = (field[data.indices[3][some]] for field in data.fields)
        torch.nn.functional.cross_entropy(net.train()(x), y).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            close(run.models[name][3], (start[name] - ALPHA * parameter.grad).detach())

    def test_without_inner_step_it_is_fedavg_on_the_second_draw(self, engine: str) -> None:
        """All samples of a client are in every minibatch, so the draws are alike."""
        data = FederatedTensorDataset(small_clients().fields, small_clients().indices, batch_size=8)
        one: Any = {"local_epochs": None, "local_steps": 2}
        a = fit(PerFedAvg(0.0, **one), data, plain_module(), 2, engine)
        b = fit(FedAvg(weighting="uniform", **one), data, plain_module(), 2, engine)
        assert_trees_close(a.server, b.server)
        assert_trees_close(a.models, b.models)

    @pytest.mark.parametrize(("order", "delta"), [("first", 0.0), ("hessian-free", 1e-3)])
    def test_matches_the_reference(self, engine: str, order: Any, delta: float) -> None:
        """Also with the independent minibatches that the reference draws."""
        method = PerFedAvg(0.3, order, local_epochs=None, local_steps=3)
        run = fit(method, small_clients(), plain_module(0.2), 2, engine, participation=3)
        x = per_fedavg(plain_module(), small_clients(), cohorts(2, 3), 3, 0.3, 0.2, delta)
        assert_trees_close(run.server["model"], x, rtol=1e-9)

    def test_every_pass_updates_the_statistics_once(self, engine: str) -> None:
        method = PerFedAvg(0.1, "hessian-free", local_epochs=None, local_steps=2)
        run = fit(method, small_clients(), small_module(), 1, engine)
        # The first, the query's, and two at the ends of the difference.
        assert int(run.server["model"]["backbone.1.num_batches_tracked"]) == 2 * 4


SMALL = 0.01


def meta_sgd(in_rounds: list[Tensor], second_order: bool) -> tuple[Any, Any]:
    """Meta-SGD in NumPy: on a quadratic with curvature a, g = a (x - c) and u = a (x~ - c)."""
    a, c = A.numpy()[:, None], C.numpy()
    x, alpha = np.full(2, 0.5), np.full(2, ALPHA)
    for cohort in in_rounds:
        ends = []
        for k in cohort.tolist():
            theta, rates = x, alpha
            for _ in range(2):
                g = a[k] * (theta - c[k])
                u = a[k] * (theta - rates * g - c[k])
                by_theta = u - a[k] * rates * u if second_order else u
                theta, rates = theta - SMALL * by_theta, rates + SMALL * g * u
            ends.append((theta, rates))
        x, alpha = np.mean(ends, 0)
    return x, alpha


class TestMetaSGD:
    @closed_form
    @pytest.mark.parametrize("order", ["first", "hessian-free"])
    def test_rates_are_learned_and_averaged_with_the_model(self, engine: str, order: Any) -> None:
        method = PerFedAvg(ALPHA, order, learn_inner_lr=True, local_epochs=None, local_steps=2)
        run = fit(method, ragged(), QuadraticModule(2, SMALL, 0.5), 4, engine, participation=2)
        in_rounds = cohorts(4, 2, eligible=SAMPLES.nonzero().flatten())
        x, rates = meta_sgd(in_rounds, order == "hessian-free")
        assert np.abs(rates - ALPHA).min() > 0.005
        np.testing.assert_allclose(run.server["model"]["w"], x, rtol=1e-8)
        np.testing.assert_allclose(run.server["rates"]["w"], rates, rtol=1e-8)
        # Evaluated after a step with the learned rates; the client without data takes none.
        step = torch.from_numpy(rates) * A[:3, None] * (torch.from_numpy(x) - C[:3])
        torch.testing.assert_close(
            run.models["w"][:3], torch.from_numpy(x) - step, rtol=1e-8, atol=0
        )

    def test_a_network_trains_as_the_reference(self, engine: str) -> None:
        data, lr = small_clients(), 0.2
        method = PerFedAvg(0.3, learn_inner_lr=True, local_epochs=None, local_steps=3)
        run = fit(method, data, softmax_module(lr), 2, engine, participation=3)
        x = softmax.as_numpy(softmax_module().state_dict())
        alpha = {name: np.full_like(leaf, 0.3) for name, leaf in x.items()}
        for number, cohort in enumerate(cohorts(2, 3)):
            models, rates = [], []
            for k in cohort.tolist():
                w, r = x, alpha
                stream = softmax.minibatches(data, k, number, epochs=99)
                for _ in range(3):
                    g = softmax.gradient(w, *next(stream))
                    inner = {name: w[name] - r[name] * g[name] for name in w}
                    u = softmax.gradient(inner, *next(stream))
                    w = softmax.moved(w, u, -lr)
                    r = {name: r[name] + lr * g[name] * u[name] for name in r}
                models.append(w)
                rates.append(r)
            x, alpha = softmax.mean(models, [1.0] * 3), softmax.mean(rates, [1.0] * 3)
        for name in softmax.NAMES:
            np.testing.assert_allclose(run.server["model"][name], x[name], rtol=1e-10)
            np.testing.assert_allclose(run.server["rates"][name], alpha[name], rtol=1e-10)

    def test_the_first_step_of_a_round_is_that_of_fixed_rates(self, engine: str) -> None:
        """Only later ones use rates that have moved."""
        one: Any = {"local_epochs": None, "local_steps": 1}
        a = fit(PerFedAvg(0.3, learn_inner_lr=True, **one), small_clients(), plain_module(), 1)
        b = fit(PerFedAvg(0.3, **one), small_clients(), plain_module(), 1)
        assert_trees_close(a.server["model"], b.server["model"])

    def test_a_deployment_adds_no_noise_to_rates(self) -> None:
        assert PerFedAvg().averages_models
        assert not PerFedAvg(learn_inner_lr=True).averages_models


@pytest.mark.parametrize("difference", [1e-4, 0.1, 10.0])
def test_the_difference_is_exact_on_quadratics(difference: float) -> None:
    runs = [
        fit(
            PerFedAvg(ALPHA, "hessian-free", d, local_epochs=None, local_steps=2),
            ragged(),
            QuadraticModule(2, LR, 0.5),
        )
        for d in (1e-3, difference)
    ]
    torch.testing.assert_close(
        runs[0].server["model"]["w"], runs[1].server["model"]["w"], rtol=1e-8, atol=1e-10
    )


class CubicLocal:
    """Gradients of x^3 / 3 summed over entries: curvature 2 x."""

    phase, lr = "local", 0.5

    def grad(self, model: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        return {"w": model["w"] ** 2}

    def update(self, model: Any, grads: Any, slot: str = "model") -> Any:
        return {"w": model["w"] - self.lr * grads["w"]}


def test_the_difference_approaches_the_hessian_vector_product() -> None:
    local: LocalStep = CubicLocal()  # type: ignore[assignment]
    w = torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    method = PerFedAvg(ALPHA, "hessian-free")
    got = method.client_step({"model": {"w": w}}, (None, None, None), local)["model"]["w"]
    u = (w - ALPHA * w**2) ** 2
    torch.testing.assert_close(got, w - 0.5 * (u - ALPHA * 2 * w * u), rtol=1e-10, atol=0)


def test_moving_keeps_what_has_no_direction() -> None:
    model = {"w": torch.ones(2), "buffer": torch.ones(1)}
    found = moved(model, {"w": torch.ones(2)}, -3.0)
    assert found["w"].tolist() == [-2.0, -2.0]
    assert found["buffer"] is model["buffer"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"inner_lr": -1.0},
            "Expected `inner_lr` to be a finite number >= 0, but got inner_lr=-1.0",
        ),
        ({"order": "second"}, "Expected `order` to be 'first' or .* but got order='second'"),
        (
            {"difference": 0.0},
            "Expected `difference` to be a finite number > 0, but got difference=0.0",
        ),
        (
            {"evaluation_steps": 0},
            "Expected `evaluation_steps` to be a whole number >= 1, but got .*=0",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerFedAvg(**settings)
