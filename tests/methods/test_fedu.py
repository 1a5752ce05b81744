"""FedU: local training, then one step along the graph's Laplacian, with or without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.methods import FedU, LocalOnly
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    descend,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import DEGREE, Bytes, Case, D
from tests.methods.graphs import PATH
from tests.methods.networks import EVERYBODY, SCALARS, cohorts, plain_module
from tests.methods.quadratics import LR, STEPS, A, C, closed_form, ragged
from tests.methods.references.fedu import combine, objective_gradient
from tests.methods.references.training import batches, load, train

CASE = Case(
    method=lambda: FedU("complete", 0.3),
    bytes={
        "defaults": Bytes(lambda: FedU("complete"), 4 * D, 4 * D),
        "decentralized": Bytes(
            lambda: FedU("complete", decentralized=True), 4 * D * DEGREE, 4 * D * DEGREE
        ),
    },
    twin=lambda: FedU("complete", 0.0),
    needed=("complete",),
    published={"lap_factor": 1.0, "decentralized": False},
)

EDGES = {(0, 1): 0.5, (0, 2): 2.0, (1, 3): 1.0}
GRAPH = torch.zeros(4, 4, dtype=torch.float64)
for (i, j), weight in EDGES.items():
    GRAPH[i, j] = GRAPH[j, i] = weight
L4 = torch.tensor([[0.0], [0.1], [1.0], [1.1]], dtype=torch.float64)
FORMS = [False, True]


def models(run: Any, name: str = "w") -> Tensor:
    """All clients' parameters after a run."""
    clients = range(run.strategy.federation.num_clients)
    return torch.stack([run.strategy.client_state_dict(k)[name] for k in clients])


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-12)


@closed_form
@pytest.mark.parametrize("decentralized", FORMS)
def test_a_round_on_ragged_quadratics_is_training_and_one_combination(
    engine: Any, decentralized: bool
) -> None:
    """Client 3 has no samples: it trains for no step, and is in the combination."""
    method = FedU(GRAPH, 0.3, decentralized, lap_factor=1.5)
    run = fit(method, ragged(), QuadraticModule(dim=2, lr=LR, start=0.4), 3, engine)
    w = torch.full((4, 2), 0.4, dtype=torch.float64)
    for _ in range(3):
        w = descend(w, A, C, LR, STEPS)
        mixed = combine({k: w[k].numpy() for k in range(4)}, EDGES, LR * 0.3 * 1.5)
        w = torch.stack([torch.from_numpy(mixed[k]) for k in range(4)])
    close(models(run), w)


@pytest.mark.parametrize("decentralized", FORMS)
def test_a_network_trains_as_the_reference(engine: Any, decentralized: bool) -> None:
    """Partial participation: edges with an absent end are skipped."""
    data, edges = small_clients(shuffle=True), {(0, 2): 1.0, (2, 3): 0.5, (3, 4): 2.0, (0, 1): 1.0}
    graph = torch.zeros(5, 5)
    for (i, j), weight in edges.items():
        graph[i, j] = graph[j, i] = weight
    method = FedU(graph, 0.4, decentralized, local_epochs=2)
    run = fit(method, data, plain_module(), 3, engine, participation=3)
    start = plain_module()
    states = [dict(start.state_dict()) for _ in range(5)]
    for number, cohort in enumerate(cohorts(3, 3, eligible=EVERYBODY)):
        for client in [k for k in cohort.tolist() if data.num_samples[k]]:
            net = train(load(start, states[client]), batches(data, client, number, 2))
            states[client] = dict(net.state_dict())
        for name in states[0]:
            trained = {k: states[k][name].numpy() for k in cohort.tolist()}
            for k, leaf in combine(trained, edges, 0.05 * 2 * 0.4).items():
                states[k] = {**states[k], name: torch.from_numpy(leaf)}
    for client in range(5):
        assert_trees_close(dict(run.strategy.client_state_dict(client)), states[client])


@pytest.mark.parametrize("decentralized", FORMS)
def test_a_client_without_samples_is_between_its_neighbours(decentralized: bool) -> None:
    """A path 0 - 1 - 2 whose middle has no loss, to the fixed point of training and combination."""
    eye = np.eye(3)
    mix = eye - 0.1 * 0.5 * (np.diag(PATH.sum(1)) - PATH)
    keep = np.diag([0.9, 1.0, 0.9])
    expected = np.linalg.solve(eye - mix @ keep, mix @ [0.0, 0.0, 0.1 * 2])
    assert expected[1] == pytest.approx((expected[0] + expected[2]) / 2)
    method = FedU(PATH, 0.5, decentralized, local_epochs=None, local_steps=1)
    data = quadratic_clients([1.0] * 3, [0.0, 9.0, 2.0], [2, 0, 2])
    run = fit(method, data, QuadraticModule(lr=0.1), 30)
    w = np.zeros(3)
    for _ in range(30):
        w = mix @ (keep @ w + [0.0, 0.0, 0.1 * 2])
    close(models(run).flatten(), torch.from_numpy(w))
    assert np.abs(w - expected).max() < np.abs(expected).max() / 2


def test_server_and_neighbours_do_the_same() -> None:
    """With BatchNorm, momentum and partial participation, to the last bits of rounding."""
    pair = [
        fit(FedU("ring", 0.2, form), small_clients(), small_module(), 3, participation=4)
        for form in FORMS
    ]
    for client in range(5):
        found, expected = (dict(run.strategy.client_state_dict(client)) for run in pair)
        assert_trees_close(found, expected)


@pytest.mark.parametrize("decentralized", FORMS)
def test_without_regularization_it_is_local_training(decentralized: bool) -> None:
    method = FedU("complete", 0.0, decentralized)
    assert method.notes(None) == ["regularization=0 makes FedU LocalOnly."]  # type: ignore[arg-type]
    run = fit(method, small_clients(), small_module(), 2)
    alone = fit(LocalOnly(), small_clients(), small_module(), 2)
    for client in range(5):
        expected = dict(alone.strategy.client_state_dict(client))
        assert_trees_close(dict(run.strategy.client_state_dict(client)), expected)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("decentralized", FORMS)
def test_the_combination_keeps_the_sum_and_leads_to_the_mean(decentralized: bool) -> None:
    """A flat loss: nothing moves but the combination."""
    flat = quadratic_clients([1e-300] * 4, L4.tolist())
    first = torch.tensor([[1.0], [5.0], [-2.0], [0.0]], dtype=torch.float64)
    run = fit(FedU(GRAPH, 1.0, decentralized), flat, QuadraticModule(lr=0.2), 1)
    # From models that differ: put them where the method keeps them, and go on.
    kept = (
        run.strategy.federation.client_states.tree["model"]
        if decentralized
        else run.strategy.server["models"]
    )
    kept["w"].copy_(first)
    mixing = torch.eye(4, dtype=torch.float64) - 0.2 * (torch.diag(GRAPH.sum(1)) - GRAPH)
    for rounds in (1, 80):
        run.trainer.fit_loop.max_epochs = 1 + rounds
        run.trainer.fit(run.module, flat)
        close(models(run).sum(0), first.sum(0))
        close(models(run), torch.linalg.matrix_power(mixing, rounds) @ first)
    limit = torch.linalg.matrix_power(mixing, 1000) @ first
    close(limit, first.mean(0).expand(4, 1))
    assert (models(run) - limit).norm() < 0.01 * (first - limit).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("decentralized", FORMS)
def test_equal_models_stay_to_the_bit(decentralized: bool, dtype: torch.dtype) -> None:
    """Clients at their optimum: the sum of 0.3 w + 0.1 w + 0.7 w isn't 1.1 w in few bits."""
    graph = torch.zeros(4, 4, dtype=torch.float64)
    for (i, j), weight in {(0, 1): 0.3, (0, 2): 0.1, (0, 3): 0.7, (1, 2): 0.9}.items():
        graph[i, j] = graph[j, i] = weight
    start = torch.linspace(0.1, 3, 9).to(dtype)
    data = quadratic_clients([1.0] * 4, [start.double().tolist()] * 4, dtype=dtype)
    module = QuadraticModule(dim=9, lr=0.5, dtype=dtype)
    module.w.data.copy_(start)
    run = fit(FedU(graph, 0.5, decentralized), data, module, 4, "sequential")
    assert torch.equal(models(run), start.expand(4, 9))


def fixed_point(lr: float, eta: float, factor: float) -> Tensor:
    """Where a step on (w - a)^2 / 2 and the combination cancel, on the complete graph."""
    eye = torch.eye(4, dtype=torch.float64)
    mix = eye - lr * eta * factor * (4 * eye - 1)
    point: Tensor = torch.linalg.solve(eye - (1 - lr) * mix, lr * mix @ L4)
    return point


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_small_steps_lead_to_the_optimum(factor: float) -> None:
    """L4, complete graph, a = 1: (a_i + lambda mean) / (1 + lambda), lambda = factor n eta.

    That is L2GD's optimum. The rounds' fixed point differs from it by a multiple of the rate.
    """
    eta, n = 0.25, 4
    lam = factor * n * eta
    optimum = (L4 + lam * L4.mean()) / (1 + lam)
    if lam == 2.0:  # printed numbers of L2GD
        assert optimum.flatten().tolist() == pytest.approx([0.3667, 0.4, 0.7, 0.7333], abs=5e-5)
    edges = {(i, j): 1.0 for j in range(n) for i in range(j)}
    gradients = [w - a for w, a in zip(optimum.numpy(), L4.numpy(), strict=True)]
    for g in objective_gradient(list(optimum.numpy()), gradients, edges, eta, factor):
        assert g == pytest.approx(0.0, abs=1e-12)
    errors = [float((fixed_point(lr, eta, factor) - optimum).abs().max()) for lr in (1e-3, 1e-4)]
    assert errors[0] < 1e-3
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.01)


@pytest.mark.parametrize("decentralized", FORMS)
def test_rounds_lead_to_the_fixed_point(decentralized: bool) -> None:
    """A rate of 1/2 halves the distance to it in every round, or better."""
    method = FedU("complete", 0.25, decentralized, local_epochs=None, local_steps=1)
    data = quadratic_clients([1.0] * 4, L4.tolist())
    run = fit(method, data, QuadraticModule(lr=0.5), 45)
    close(models(run), fixed_point(0.5, 0.25, 1.0))


def test_a_client_sends_one_model_or_one_to_each_neighbour() -> None:
    run = fit(FedU(GRAPH, 0.1), ragged_four(), QuadraticModule(dim=2), 1)
    (round,) = run.recorder.rounds
    assert (round.bytes_down, round.bytes_up) == (2 * 8, 2 * 8)
    peers = fit(FedU("ring", 0.1, True), small_clients(), plain_module(), 1)
    (round,) = peers.recorder.rounds
    assert (round.bytes_down, round.bytes_up) == (0, 0)
    total = 2 * 5 * SCALARS * 8
    assert peers.trainer.callback_metrics["round/bytes_up"] == total
    assert peers.trainer.callback_metrics["round/bytes_down"] == total


def ragged_four() -> Any:
    return quadratic_clients(A, C, [4, 1, 7, 2], batch_size=3)


def test_a_step_too_long_for_the_graph_is_said_before_it_is_taken() -> None:
    """The complete graph of four has the eigenvalue 4."""
    with pytest.warns(UserWarning, match="to be below 2, but got 2.4 with the eigenvalue 4"):
        fit(FedU("complete", 6.0), ragged_four(), QuadraticModule(dim=2, lr=0.1), 1)
    fit(FedU("complete", 4.9), ragged_four(), QuadraticModule(dim=2, lr=0.1), 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"regularization": -1.0}, "finite number >= 0, but got regularization=-1.0"),
        ({"regularization": np.inf}, "finite number >= 0, but got regularization=inf"),
        ({"lap_factor": 0.0}, "finite number > 0, but got lap_factor=0.0"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FedU("ring", **settings)
