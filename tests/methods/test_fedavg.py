"""FedAvg: closed forms on quadratics, the drift of its fixed point, server optimizers, averages of
buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.federation.sampling import sample_cohort
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    descend,
    fit,
    q2,
)
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import WITH_BATCHNORM, Bytes, Case, D
from tests.methods.quadratics import LR, SAMPLES, STEPS, A, C, close, closed_form, mean, ragged
from tests.methods.references.fedavg import fedavg

CASE = Case(
    method=lambda: FedAvg(server_optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
    bytes={
        "defaults": Bytes(FedAvg, 4 * D, 4 * D),
        # Two statistics for each of two channels, and an int64 that counts batches.
        "with BatchNorm": Bytes(
            FedAvg, 4 * (WITH_BATCHNORM + 2 * 2) + 8, 4 * (WITH_BATCHNORM + 2 * 2) + 8, small_module
        ),
    },
    twin=None,  # The others are compared with it.
    published={"local_epochs": 1, "weighting": "samples", "server_optimizer": None},
)

W0 = torch.tensor([0.5, 0.5], dtype=torch.float64)


def quadratic(start: float = 0.5, dim: int = 2) -> QuadraticModule:
    return QuadraticModule(dim, LR, start)


def fixed_point(steps: int) -> float:
    """sum r_k c_k / sum r_k with r_k = 1 - (1 - lr a_k)^K: where the clients' drifts cancel, for
    equal weights."""
    r = 1 - (1 - LR * np.array([1.0, 3.0])) ** steps
    return float((r * np.array([0.0, 1.0])).sum() / r.sum())


class TestFedAvg:
    @closed_form
    @pytest.mark.parametrize("rounds", [1, 3])
    @pytest.mark.parametrize("weighting", ["samples", "uniform"])
    def test_rounds_match_the_closed_form(self, engine: str, rounds: int, weighting: Any) -> None:
        run = fit(
            FedAvg(local_epochs=2, weighting=weighting), ragged(), quadratic(), rounds, engine
        )
        weights = SAMPLES if weighting == "samples" else (SAMPLES > 0)
        w = W0
        for _ in range(rounds):
            w = mean(descend(w, A, C, LR, 2 * STEPS), weights)
        close(run.server["model"]["w"], w)

    def test_steps_in_the_place_of_epochs(self, engine: str) -> None:
        run = fit(FedAvg(local_epochs=None, local_steps=5), ragged(), quadratic(), 1, engine)
        close(run.server["model"]["w"], mean(descend(W0, A, C, LR, 5), SAMPLES))

    def test_full_batches_of_unequal_samples(self, engine: str) -> None:
        """The mean of a_j/2 (w - c_j)^2 is a quadratic with curvature mean(a) and minimiser
        mean(a c) / mean(a)."""
        a = torch.tensor([1.0, 2.0, 4.0, 0.5, 3.0], dtype=torch.float64)
        c = torch.tensor([[1.0], [-1.0], [0.5], [2.0], [-3.0]], dtype=torch.float64)
        owned = [[0, 1, 2], [3, 4]]
        data = FederatedTensorDataset((a, c), owned, batch_size=10)
        run = fit(FedAvg(local_epochs=3), data, quadratic(dim=1), 1, engine)
        curvature = torch.stack([a[k].mean() for k in owned])
        center = torch.stack([(a[k, None] * c[k]).mean(0) / a[k].mean() for k in owned])
        close(
            run.server["model"]["w"],
            mean(descend(W0[:1], curvature, center, LR, 3), torch.tensor([3, 2])),
        )

    def test_minibatches_of_unequal_samples(self, engine: str) -> None:
        """Each minibatch maps w to w - lr (mean(a) w - mean(a c)); the last one is short."""
        rng = np.random.default_rng(0)
        a, c = rng.uniform(0.5, 3, 9), rng.standard_normal(9)
        owned = [np.arange(5), np.arange(5, 9)]
        fields = (torch.from_numpy(a), torch.from_numpy(c)[:, None])
        data = FederatedTensorDataset(fields, owned, batch_size=2)
        run = fit(FedAvg(local_epochs=2), data, quadratic(dim=1), 1, engine)
        ends = []
        for samples in owned:
            w = 0.5
            for _ in range(2):
                for at in range(0, len(samples), 2):
                    some = samples[at : at + 2]
                    w -= LR * (a[some].mean() * w - (a[some] * c[some]).mean())
            ends.append(w)
        expected = np.average(ends, weights=[5, 4])
        close(run.server["model"]["w"], torch.tensor([expected]))

    @pytest.mark.parametrize(
        ("steps", "printed"), [(1, 0.75), (5, 0.670133), (10, 0.598711), (50, 0.501292)]
    )
    def test_fixed_point_drifts_from_the_optimum(
        self, engine: str, steps: int, printed: float
    ) -> None:
        start = fixed_point(steps)
        assert start == pytest.approx(printed, abs=5e-7)
        run = fit(
            FedAvg(local_epochs=None, local_steps=steps), q2(), quadratic(start, 1), 1, engine
        )
        close(run.server["model"]["w"], torch.tensor([start], dtype=torch.float64))

    def test_rounds_converge_to_the_fixed_point(self, engine: str) -> None:
        run = fit(FedAvg(local_epochs=None, local_steps=10), q2(), quadratic(0.0, 1), 25, engine)
        close(run.server["model"]["w"], torch.tensor([fixed_point(10)], dtype=torch.float64))
        assert float(run.recorder.servers[1]["model"]["w"]) == pytest.approx(0.485876, abs=5e-7)

    def test_one_full_batch_step_is_gradient_descent_on_the_mean_loss(self, engine: str) -> None:
        run = fit(FedAvg(), q2(), quadratic(0.2, 1), 4, engine)
        w = 0.2
        for _ in range(4):
            w -= LR * (1.0 * (w - 0.0) + 3.0 * (w - 1.0)) / 2
        close(run.server["model"]["w"], torch.tensor([w], dtype=torch.float64))

    def test_without_local_work_nothing_moves(self, engine: str) -> None:
        run = fit(FedAvg(local_epochs=0), ragged(), quadratic(), 2, engine)
        assert torch.equal(run.server["model"]["w"], W0)

    @pytest.mark.parametrize("seed", [0, 4])
    def test_matches_the_reference(self, engine: str, seed: int) -> None:
        run = fit(FedAvg(local_epochs=2), small_clients(), small_module(), 3, engine, seed=seed)
        assert_trees_close(run.server["model"], fedavg(small_module(), small_clients(), 3, 2, seed))

    def test_everyone_is_evaluated_with_the_global_model(self, engine: str) -> None:
        run = fit(FedAvg(), small_clients(), small_module(), 1, engine)
        assert all(
            torch.equal(leaf, run.server["model"][n].expand_as(leaf))
            for n, leaf in run.models.items()
        )
        assert_trees_equal(run.strategy.global_state_dict(), run.server["model"])

    def test_only_the_cohort_is_averaged(self, engine: str) -> None:
        run = fit(FedAvg(), ragged(), quadratic(), 3, engine, participation=2, seed=1)
        w, seen = W0, set()
        for number in range(3):
            cohort = sample_cohort(1, number, torch.tensor([0, 1, 2]), 2)
            assert torch.equal(run.recorder.rounds[number].info.index, cohort)
            w = mean(descend(w, A, C, LR, STEPS)[cohort], SAMPLES[cohort])
            seen |= set(cohort.tolist())
        close(run.server["model"]["w"], w)
        assert len(seen) == 3

    def test_batchnorm_buffers_are_averaged_and_counters_take_the_maximum(
        self, engine: str
    ) -> None:
        run = fit(FedAvg(), small_clients(), small_module(), 1, engine)
        uploads = run.recorder.rounds[0].uploads
        assert uploads is not None
        sizes = np.array([size for size in SIZES if size])
        for name in ("backbone.1.running_mean", "backbone.1.running_var"):
            sent = uploads["model"][name].numpy()
            assert sent.std(0).min() > 0
            expected = torch.from_numpy(np.average(sent, axis=0, weights=sizes))
            torch.testing.assert_close(run.server["model"][name], expected, rtol=1e-12, atol=0)
        batches = [-(-size // 3) for size in SIZES]
        assert run.server["model"]["backbone.1.num_batches_tracked"] == max(batches)


# --- server optimizers ---


def deltas(w: Tensor) -> Tensor:
    """The pseudo-gradient x - sum p_k y_k at ``w``."""
    return w - mean(descend(w, A, C, LR, STEPS), SAMPLES)


class TestServerOptimizers:
    def run(self, engine: str, make: Any, rounds: int = 4) -> Tensor:
        found: Tensor = fit(
            FedAvg(server_optimizer=make), ragged(), quadratic(), rounds, engine
        ).server["model"]["w"]
        return found

    def test_sgd_with_rate_one_is_averaging(self, engine: str) -> None:
        plain = fit(FedAvg(), ragged(), quadratic(), 3, engine).server["model"]["w"]
        close(self.run(engine, lambda p: torch.optim.SGD(p, lr=1.0), 3), plain)

    def test_fedavgm(self, engine: str) -> None:
        got = self.run(engine, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9))
        w, v = W0, torch.zeros_like(W0)
        for _ in range(4):
            v = 0.9 * v + deltas(w)
            w = w - 0.7 * v
        close(got, w)

    def test_fedadam(self, engine: str) -> None:
        """Reddi et al. (2021), Algorithm 2, with torch's bias correction."""
        got = self.run(engine, lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3))
        w, m, v = W0, torch.zeros_like(W0), torch.zeros_like(W0)
        for t in range(1, 5):
            d = deltas(w)
            m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d**2
            w = w - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3)
        close(got, w)

    def test_fedadagrad(self, engine: str) -> None:
        got = self.run(engine, lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3))
        w, v = W0, torch.zeros_like(W0)
        for _ in range(4):
            d = deltas(w)
            v = v + d**2
            w = w - 0.1 * d / (v.sqrt() + 1e-3)
        close(got, w)

    def test_buffers_are_averaged_all_the_same(self, engine: str) -> None:
        method = FedAvg(server_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        stepped = fit(method, small_clients(), small_module(), 1, engine).server["model"]
        plain = fit(FedAvg(), small_clients(), small_module(), 1, engine).server["model"]
        start = small_module().state_dict()
        assert torch.equal(stepped["backbone.1.running_mean"], plain["backbone.1.running_mean"])
        assert torch.equal(
            stepped["backbone.1.num_batches_tracked"], plain["backbone.1.num_batches_tracked"]
        )
        expected = start["head.weight"] + 0.1 * (plain["head.weight"] - start["head.weight"])
        close(stepped["head.weight"], expected)


# --- guards ---


@pytest.mark.parametrize("epochs", [-1, 1.5, True])
def test_budgets_are_whole_numbers(epochs: Any) -> None:
    with pytest.raises(
        ValueError,
        match=f"Expected `local_epochs` to be a whole number >= 0, but got local_epochs={epochs}",
    ):
        FedAvg(local_epochs=epochs)


def test_a_server_optimizer_is_a_factory() -> None:
    with pytest.raises(
        TypeError,
        match=r"Expected `server_optimizer` to be a callable .* but got server_optimizer='adam'",
    ):
        FedAvg(server_optimizer="adam")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda p: None, TypeError, "takes one step along a gradient, but it made None"),
        (torch.optim.LBFGS, TypeError, "takes one step along a gradient, but it made LBFGS"),
        (
            lambda p: torch.optim.SGD(p, lr=float("nan")),
            ValueError,
            "a finite learning rate, but got lr=nan",
        ),
    ],
)
def test_a_server_optimizer_that_cannot_step_is_refused(
    make: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        FedAvg(server_optimizer=make)
