"""MOCHA: the convex problem has a dual, and the duality gap says how far from solved it is."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import MOCHA
from lightning_pfl.methods.mocha import aggregation_bound, learned_relationship
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import Fit, fit
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.case import LINEAR, Bytes, Case
from tests.methods.networks import cohorts, linear_module
from tests.methods.quadratics import close, closed_form
from tests.methods.references.mocha import mocha, objectives

CASE = Case(
    method=lambda: MOCHA(0.05, inner_iterations=1),
    bytes={
        # The weights and one number for the step; up the change of the weights.
        "defaults": Bytes(
            lambda: MOCHA(inner_iterations=1), 4 * LINEAR + 4, 4 * LINEAR, linear_module
        ),
    },
    twin=None,  # No setting makes it another method of linear models.
    published={"outer_iterations": 10, "inner_iterations": 100, "local_fraction": 0.5},
    problem={"make_module": linear_module},
)

COUNTS = (7, 12, 4)
DIM = 3
LAM = 0.05


def problem() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Three clients whose classes are separated by similar, noisy planes."""
    rng = np.random.default_rng(1)
    x = [rng.standard_normal((size, DIM)) for size in COUNTS]
    plane = np.array([1.0, -1.0, 0.5])
    y = [np.sign(f @ plane + 0.8 * rng.standard_normal(len(f))) for f in x]
    return x, y


def clients(x: Any = None, y: Any = None) -> FederatedTensorDataset:
    if x is None:
        x, y = problem()
    sizes = [len(f) for f in x]
    # Targets 0 and 1, as the module's loss has them.
    fields = (
        torch.from_numpy(np.concatenate(x)),
        torch.from_numpy((np.concatenate(y) > 0).astype(float)),
    )
    return FederatedTensorDataset(
        fields, torch.arange(sum(sizes)).split(sizes), batch_size=3, shuffle=True
    )


def plane_module(bias: bool = False, dim: int = DIM) -> PersonalizedModule:
    return PersonalizedModule(nn.Flatten(), nn.Linear(dim, 1, bias=bias), loss="bce").double()


def gaps(run: Fit) -> list[tuple[float, float]]:
    """Primal and dual value after each round."""
    x, y = problem()
    found = []
    for server, client_states in zip(run.recorder.servers, run.recorder.banks, strict=True):
        dual = [client_states["dual"][k, : len(f), 0].numpy() for k, f in enumerate(x)]
        sigma = server["relationship"].numpy()
        b = np.stack([a @ f / len(f) for a, f in zip(dual, x, strict=True)])
        np.testing.assert_allclose(server["dual_vectors"][:, 0].numpy(), b, rtol=0, atol=1e-12)
        signed = np.concatenate([a * t for a, t in zip(dual, y, strict=True)])
        assert signed.min() >= 0
        assert signed.max() <= 1
        found.append(objectives(x, y, dual, sigma, LAM))
    return found


def visits(
    rounds: int, fraction: float, in_rounds: Any = None, sizes: Any = COUNTS
) -> list[list[list[int]]]:
    """The documented order: that of one permutation, of which a client takes its own."""
    passes = int(np.ceil(fraction))
    found = []
    for t in range(rounds):
        common = [
            i
            for number in range(passes)
            for i in permutation(max(sizes), derive(0, "coordinates", t, number)).tolist()
        ]
        each = [[i for i in common if i < size][: int(np.ceil(fraction * size))] for size in sizes]
        if in_rounds is not None:
            each = [v if k in in_rounds[t].tolist() else [] for k, v in enumerate(each)]
        found.append(each)
    return found


def reference_svm(x: np.ndarray, y: np.ndarray, weight: float) -> np.ndarray:
    """Minimiser of the mean hinge loss plus weight / 2 ||w||^2."""
    from sklearn.svm import LinearSVC

    model = LinearSVC(
        loss="hinge", C=1 / (weight * len(x)), fit_intercept=False, tol=1e-10, max_iter=10**6
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y)
    found: np.ndarray = model.coef_[0]
    return found


class TestMOCHA:
    @closed_form
    @pytest.mark.parametrize("fraction", [0.5, 2.0])
    @pytest.mark.parametrize(("participation", "bound"), [(3, "common"), (2, "common"), (2, "own")])
    def test_matches_the_reference(
        self, engine: str, fraction: float, participation: int, bound: Any
    ) -> None:
        method = MOCHA(LAM, 9, 2, local_fraction=fraction, bound=bound)
        run = fit(method, clients(), plane_module(), 5, engine, participation=participation)
        in_rounds = cohorts(5, participation, eligible=torch.arange(3))
        x, y = problem()
        w, sigma, dual = mocha(x, y, visits(5, fraction, in_rounds), LAM, 2, bound == "own")
        close(run.models["head.weight"][:, 0], torch.from_numpy(w))
        close(run.server["relationship"], torch.from_numpy(sigma))
        for k, mine in enumerate(dual):
            close(run.client_state["dual"][k, : len(mine), 0], torch.from_numpy(mine))
            assert not run.client_state["dual"][k, len(mine) :].any()

    def test_several_classes_with_a_bias_are_one_problem_each(self, engine: str) -> None:
        """Sigma is shared, so the reference runs to before it is learned."""
        data = small_clients().subset([0, 2, 3, 4])
        sizes = [size for size in SIZES if size]
        run = fit(MOCHA(LAM, 0), data, linear_module(), 3, engine)
        flat = data.fields[0].flatten(1)
        x = [torch.cat([flat[i], flat[i].new_ones(len(i), 1)], 1).numpy() for i in data.indices]
        for c in range(3):
            y = [(data.fields[1][i] == c).double().numpy() * 2 - 1 for i in data.indices]
            w, _, _ = mocha(x, y, visits(3, 0.5, sizes=sizes), LAM, 99)
            close(run.models["head.weight"][:, c], torch.from_numpy(w[:, :-1].copy()))
            close(run.models["head.bias"][:, c], torch.from_numpy(w[:, -1].copy()))

    @pytest.mark.parametrize(("participation", "bound"), [(3, "common"), (1, "common"), (3, "own")])
    def test_the_gap_is_not_negative_and_falls(
        self, engine: str, participation: int, bound: Any
    ) -> None:
        """Also where two of three clients drop out, and the others solve a third of a pass."""
        method = MOCHA(LAM, 3, 20, local_fraction=0.34, bound=bound)
        rounds = 30 if participation == 3 else 90
        run = fit(method, clients(), plane_module(), rounds, engine, participation=participation)
        values = gaps(run)
        assert min(primal - dual for primal, dual in values) >= -1e-12
        assert values[0][0] - values[0][1] == pytest.approx(3.0)  # no weights: hinge losses of 1
        assert values[-1][0] - values[-1][1] < 0.03
        # While Sigma stays, no step makes the dual worse: adding the clients' changes is safe.
        for number, (before, after) in enumerate(pairwise(values)):
            if (number + 1) % 20:
                assert after[1] >= before[1] - 1e-12

    def test_one_client_is_a_linear_svm(self, engine: str) -> None:
        x, y = problem()
        data = clients(x[1:2], y[1:2])
        run = fit(MOCHA(0.1, 0, local_fraction=20.0), data, plane_module(), 12, engine)
        expected = torch.from_numpy(reference_svm(x[1], y[1], 0.1))
        found = run.models["head.weight"][0, 0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    def test_without_relationship_clients_are_apart(self, engine: str) -> None:
        """Sigma = I / n: each solves its own problem, with n times the weight."""
        run = fit(MOCHA(0.05, 0, local_fraction=20.0), clients(), plane_module(), 12, engine)
        for k, (x, y) in enumerate(zip(*problem(), strict=True)):
            expected = torch.from_numpy(reference_svm(x, y, 3 * 0.05))
            found = run.models["head.weight"][k, 0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert torch.equal(run.server["relationship"], torch.eye(3).double() / 3)

    def test_sigma_stays_positive_with_trace_one(self, engine: str) -> None:
        run = fit(MOCHA(LAM, 4, 1), clients(), plane_module(), 6, engine)
        seen = [server["relationship"] for server in run.recorder.servers]
        for sigma in seen:
            assert torch.equal(sigma, sigma.T)
            assert float(torch.linalg.eigvalsh(sigma).min()) > 0
            assert float(sigma.trace()) == pytest.approx(1.0, abs=1e-12)
        changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
        assert changed == [True] * 4 + [False] * 2

    def test_a_vector_and_a_number_down_and_a_vector_up(self, engine: str) -> None:
        round = fit(MOCHA(), clients(), plane_module(bias=True), 1, engine).recorder.rounds[0]
        assert round.bytes_up == 8 * (DIM + 1)
        assert round.bytes_down == 8 * (DIM + 1) + 8

    def test_the_reported_loss_is_that_of_the_received_weights(self, engine: str) -> None:
        rounds = fit(MOCHA(LAM), clients(), plane_module(), 2, engine).recorder.rounds
        received = rounds[1].received
        assert received is not None
        losses = [
            np.maximum(0, 1 - t * (f @ w.numpy())).mean()
            for f, t, w in zip(*problem(), received["weights"][:, 0], strict=True)
        ]
        assert rounds[0].metrics["train_loss"] == pytest.approx(1.0)
        assert rounds[1].metrics["train_loss"] == pytest.approx(np.mean(losses))


@pytest.mark.slow
def test_related_clients_help_each_other() -> None:
    """A client with two samples, one for each class, among others of the same plane."""
    rng = np.random.default_rng(0)
    plane = rng.standard_normal(8)
    x = [rng.standard_normal((size, 8)) for size in (40, 40, 40, 3)]
    y = [np.sign(f @ plane) for f in x]
    test = rng.standard_normal((2000, 8))

    def accuracy(outer: int) -> float:
        inner: dict[str, Any] = {"inner_iterations": 5} if outer else {}
        method = MOCHA(0.01, outer, local_fraction=2.0, **inner)
        run = fit(method, clients(x, y), plane_module(dim=8), 25)
        w = run.models["head.weight"][3, 0].numpy()
        return float((np.sign(test @ w) == np.sign(test @ plane)).mean())

    alone, together = accuracy(0), accuracy(10)
    assert together > alone + 0.1


def test_the_relationship_is_the_root_of_the_gram_matrix() -> None:
    weights = torch.randn(4, 2, 5, dtype=torch.float64)
    sigma = learned_relationship(weights)
    gram = weights.flatten(1) @ weights.flatten(1).T
    torch.testing.assert_close(
        sigma @ sigma / (sigma @ sigma).trace(), gram / gram.trace(), rtol=1e-8, atol=1e-10
    )
    nothing = learned_relationship(torch.zeros(3, 1, 5, dtype=torch.float64))
    close(nothing, torch.eye(3, dtype=torch.float64) / 3)


def test_more_clients_than_features_have_the_smallest_eigenvalue() -> None:
    """The Gram matrix of 9 clients has 3 eigenvalues above 0; the others are raised to 1e-7."""
    weights = torch.randn(9, 1, 3, dtype=torch.float64)
    weights[4] = 0
    values, vectors = torch.linalg.eigh(weights.flatten(1) @ weights.flatten(1).T)
    root = vectors @ torch.diag(values.clamp_min(1e-7).sqrt()) @ vectors.T
    close(learned_relationship(weights), root / root.trace())


@pytest.mark.parametrize("percent", [7, 14, 28, 29, 56, 57, 58, 100])
def test_local_fractions_are_decimal(percent: int) -> None:
    """Of 100 samples: in binary 0.07 of them are a little more than 7."""
    # Each sample has a direction of its own, so that each visit leaves a dual variable above 0.
    fields = torch.eye(100, dtype=torch.float64), torch.ones(100, dtype=torch.int64)
    data = FederatedTensorDataset(fields, [range(100)], batch_size=100)
    run = fit(MOCHA(1.0, 0, local_fraction=percent / 100), data, plane_module(dim=100), 1)
    visited = int((run.client_state["dual"] != 0).sum())
    assert visited == percent


@pytest.mark.parametrize("bound", ["common", "own"])
def test_the_bound_covers_the_couplings(bound: Any) -> None:
    root = torch.randn(5, 5, dtype=torch.float64)
    sigma = root @ root.T
    curvature = aggregation_bound(sigma, bound)
    assert float(torch.linalg.eigvalsh(torch.diag(curvature) - sigma).min()) > -1e-10
    assert (aggregation_bound(sigma, "own") <= curvature + 1e-12).all()
    assert torch.equal(aggregation_bound(torch.eye(3), bound), torch.ones(3))


def test_with_bounds_of_their_own_one_client_does_not_slow_all() -> None:
    """The last client's inputs, and with them its weights, are a tenth of the others'."""
    rng = np.random.default_rng(0)
    plane = rng.standard_normal(DIM)
    x = [scale * rng.standard_normal((10, DIM)) for scale in (1, 1, 1, 1, 1, 0.1)]
    y = [np.sign(f @ plane + 0.1 * rng.standard_normal(10)) for f in x]
    gaps = []
    for bound in ("common", "own"):
        method = MOCHA(0.1, 1, 10, bound=bound)
        run = fit(method, clients(x, y), plane_module(), 30)
        sigma = run.server["relationship"].numpy()
        ratios = np.sort(np.abs(sigma).sum(1) / np.diag(sigma))
        assert ratios[-1] > 5 * ratios[-2]
        dual = [run.client_state["dual"][k, :, 0].numpy() for k in range(len(x))]
        primal, value = objectives(x, y, dual, sigma, 0.1)
        gaps.append(primal - value)
    assert 0 <= gaps[1] < gaps[0] / 5


def test_learning_the_relationship_before_all_took_part_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="after round 0, before 2 of 3 clients had taken"):
        fit(MOCHA(LAM, inner_iterations=1), clients(), plane_module(), participation=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(MOCHA(LAM, inner_iterations=1), clients(), plane_module())
        # Round 0 is before the first time.
        fit(MOCHA(LAM, inner_iterations=2), clients(), plane_module(), participation=1)


def test_a_sample_of_zeros_reaches_its_bound() -> None:
    x, y = problem()
    x[0][0] = 0.0
    run = fit(MOCHA(LAM, 0, local_fraction=1.0), clients(x, y), plane_module())
    assert float(run.client_state["dual"][0, 0, 0]) == y[0][0]
    assert run.models["head.weight"].isfinite().all()


def test_networks_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Expected a linear model, .* FedMTL for"):
        fit(MOCHA(), small_clients(), small_module())


def test_data_that_change_are_refused() -> None:
    """A dual variable would count for a sample that is gone."""
    with pytest.raises(MisconfigurationException, match=r"same samples in .*epochs=1"):
        fit(MOCHA(), clients(), plane_module(), reload_dataloaders_every_n_epochs=1)


def test_inputs_have_to_be_those_of_the_layer() -> None:
    class Half(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.flatten(1)[:, :10]

    module = PersonalizedModule(Half(), nn.Linear(10, 3)).double()
    with pytest.raises(ClientError, match=r"Expected inputs of 10 numbers, but got 25"):
        fit(MOCHA(), small_clients(), module)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regularization": 0.0}, "Expected `regularization` to be a finite .* > 0, .*=0.0"),
        ({"local_fraction": 0.0}, "Expected `local_fraction` to be a finite .* > 0, .*=0.0"),
        ({"bound": "mine"}, "Expected `bound` to be 'common' or 'own', but got bound='mine'"),
        ({"inner_iterations": 0}, "Expected `inner_iterations` to be a whole number >= 1, .*=0"),
        ({"outer_iterations": 1.5}, "Expected `outer_iterations` to be a whole number .*=1.5"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MOCHA(**settings)
