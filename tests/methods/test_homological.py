"""HomologicalConstraints reaches the solution of the KKT system, not just near it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl import ClientModules
from lightning_pfl.methods import HomologicalConstraints, LocalOnly
from lightning_pfl.methods.support import memory
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.federation.test_architectures import OF, loaders, modules
from tests.methods.case import DEGREE, EDGE, Bytes, Case
from tests.methods.graphs import (
    PAIR,
    PATH,
    RAGGED,
    TWO_CENTRES,
    TWO_MAPS,
    edges_among,
    random_maps,
    two_clients,
)
from tests.methods.networks import EVERYBODY, SCALARS, cohorts, plain_module
from tests.methods.quadratics import closed_form
from tests.methods.references.homological import homological, kkt
from tests.trainer.setting import trainer

CASE = Case(
    method=lambda: HomologicalConstraints(
        "complete", 0.02, 0.5, edge_dim_ratio=0.5, local_epochs=1, local_steps=None
    ),
    bytes={
        "defaults": Bytes(
            lambda: HomologicalConstraints("complete", edge_dim_ratio=0.1),
            8 * EDGE * DEGREE,
            8 * EDGE * DEGREE,
        ),
    },
    twin=lambda: LocalOnly(local_epochs=None, local_steps=1),
    needed=("complete",),
)

EPOCH: dict[str, Any] = {"local_epochs": 1, "local_steps": None}


class TestHomologicalConstraints:
    @closed_form
    @pytest.mark.filterwarnings(r"ignore:Expected a \* m")
    @pytest.mark.parametrize("participation", [5, 3])
    def test_matches_the_reference(self, engine: str, participation: int) -> None:
        """Models and multipliers after three rounds of a network with momentum and BatchNorm.

        The steps are too long for more rounds, and the run says so.
        """
        data = small_clients()
        scalars = sum(p.numel() for p in small_module().parameters())
        maps = random_maps(RAGGED, [scalars] * 5, 6)
        method = HomologicalConstraints(RAGGED, 0.1, 0.5, maps=maps, **EPOCH)
        run = fit(method, data, small_module(), 3, engine, participation=participation)
        arrays = {edge: p.numpy() for edge, p in maps.items()}
        some = cohorts(3, participation, eligible=EVERYBODY)
        client_state, dual = homological(small_module(), data, some, RAGGED, arrays, 0.1, 0.5, 0.05)
        assert_trees_close(
            run.models, {n: torch.stack([o[n] for o in client_state]) for n in client_state[0]}
        )
        np.testing.assert_allclose(
            run.client_state["dual"].numpy(), np.stack(dual), rtol=1e-9, atol=1e-12
        )

    @pytest.mark.slow
    def test_clients_of_different_sizes_meet_the_constraint(self, engine: str) -> None:
        """The first parameter of one and the second of the other end equal: at (1 + 5) / 2."""
        module, data = two_clients(lr=0.6)
        method = HomologicalConstraints(PAIR, 0.3, 0.5, maps=TWO_MAPS)
        run = trainer(method, engine=engine, max_epochs=35)
        run.fit(module, data, data)
        coboundary = np.array([[1.0, 0, 0, -1, 0]])
        laplacian = coboundary.T @ coboundary
        centres = np.concatenate(TWO_CENTRES)
        expected = kkt(np.eye(5), centres, laplacian)
        assert expected.tolist() == pytest.approx([3, 2, 0, 3, 7])
        got = torch.cat([run.strategy.client_state_dict(client)["w"] for client in (0, 1)])
        assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-8)
        assert float(got[0] - got[3]) == pytest.approx(0, abs=1e-8)
        # A penalty alone gets there in the limit of its weight.
        for weight in (1e2, 1e4):
            near = np.linalg.solve(np.eye(5) + weight * laplacian, centres)
            assert 0.1 < abs(near - expected).max() * weight < 2


def test_identity_maps_on_a_connected_graph_make_consensus() -> None:
    """argmin of the sum of all losses, sum a c / sum a, reached by every client."""
    a, c = [1.0, 3.0, 0.5, 2.0], [0.0, 1.0, -2.0, 4.0]
    method = HomologicalConstraints("ring", 0.3)
    run = fit(method, quadratic_clients(a, c), QuadraticModule(lr=0.2), 50)
    expected = np.dot(a, c) / np.sum(a)
    assert run.models["w"].flatten().tolist() == pytest.approx([expected] * 4, abs=1e-7)


def test_a_client_without_samples_carries_the_constraint_on(engine: str) -> None:
    """A path whose middle has no loss; rounds go to consensus at the ends' mean, (0 + 2) / 2."""
    data = quadratic_clients([1.0] * 3, [0.0, 9.0, 2.0], [2, 0, 2])
    run = fit(HomologicalConstraints(PATH, 0.5), data, QuadraticModule(lr=0.2), 20, engine)
    laplacian, x, y = np.diag(PATH.sum(1)) - PATH, np.zeros(3), np.zeros(3)
    for number in range(200):
        if number == 20:
            assert run.models["w"].flatten().tolist() == pytest.approx(x.tolist(), rel=1e-10)
        gradient = np.array([1.0, 0.0, 1.0]) * (x - [0.0, 9.0, 2.0])
        x = x - 0.2 * (gradient + laplacian @ (x + y))
        y = y + 0.5 * laplacian @ x
    assert x.tolist() == pytest.approx([1.0] * 3, abs=1e-3)


@pytest.mark.slow
def test_quadratics_end_at_the_solution_of_the_kkt_system() -> None:
    """Random maps to one dimension on a ragged graph with weights: some freedom is left."""
    curvature, dim = [1.0, 2.0, 0.5, 1.5, 1.0], 4
    centres = torch.randn(5, dim, generator=torch.Generator().manual_seed(1)).double()
    maps = {edge: 3 * p for edge, p in random_maps(RAGGED, [dim] * 5, 1).items()}
    laplacian = np.zeros((20, 20))
    for i, j in maps:
        if i < j:
            row = np.zeros((1, 20))
            row[:, dim * i : dim * i + dim] = maps[i, j].numpy()
            row[:, dim * j : dim * j + dim] = -maps[j, i].numpy()
            laplacian += RAGGED[i, j] * row.T @ row
    hessian: Any = np.kron(np.diag(curvature), np.eye(dim))
    expected = kkt(hessian, hessian @ centres.numpy().ravel(), laplacian)
    step = 0.9 / np.linalg.eigvalsh(hessian + laplacian).max()
    method = HomologicalConstraints(RAGGED, 2 * step, maps=maps)
    run = fit(method, quadratic_clients(curvature, centres), QuadraticModule(dim, step), 120)
    got = run.models["w"].flatten().numpy()
    np.testing.assert_allclose(got, expected, atol=1e-3)
    assert np.abs(laplacian @ got).max() < 1e-3
    assert np.abs(got - centres.numpy().ravel()).max() > 0.1


@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_one_step_by_hand(penalty: float) -> None:
    """Two clients, one parameter: x <- x - h (x - a + L (p x + y)), then y <- y + h L x."""
    method = HomologicalConstraints(PAIR, 0.25, penalty)
    run = fit(method, quadratic_clients([1.0, 1.0], [1.0, 3.0]), QuadraticModule(lr=0.1), 2)
    laplacian, a = np.array([[1.0, -1], [-1, 1]]), np.array([1.0, 3.0])
    x = y = np.zeros(2)
    for _ in range(2):
        x = x - 0.1 * (x - a + laplacian @ (penalty * x + y))
        y = y + 0.25 * laplacian @ x
    assert run.models["w"].flatten().tolist() == pytest.approx(x.tolist(), rel=1e-12)
    assert run.client_state["dual"].flatten().tolist() == pytest.approx(y.tolist(), rel=1e-12)


@pytest.mark.parametrize(("step", "stable"), [(0.95, True), (1.05, False)])
def test_where_steps_are_stable(step: float, stable: bool) -> None:
    """alpha lambda (2 rho + h lambda) = 4 at h = 1 for a pair, lambda = 2, and alpha = 1/2."""
    data = quadratic_clients([1e-9, 1e-9], [0.0, 1e9])
    with nullcontext() if stable else pytest.warns(UserWarning, match="to be below 4, .* got 4.1"):
        run = fit(HomologicalConstraints(PAIR, step), data, QuadraticModule(lr=0.5), 60)
    gap = float((run.models["w"][0] - run.models["w"][1]).abs())
    assert (gap < 0.2) if stable else (gap > 10)


def test_bytes_are_those_of_two_projections() -> None:
    """8 sum_j d_ij per client and round in single precision."""
    kinds: tuple[Any, ...] = ("identity", "random")
    for maps in kinds:
        method = HomologicalConstraints(RAGGED, edge_dim_ratio=0.1, maps=maps)
        data, module = small_clients(torch.float32), plain_module().float()
        for round in fit(method, data, module, 2, participation=3).recorder.rounds:
            edges = edges_among(RAGGED, round.info.index)
            assert round.bytes_exchanged == 8 * (SCALARS // 10) * edges > 0


@pytest.mark.filterwarnings("ignore:Expected `graph` to have edges")
def test_without_a_neighbour_in_the_cohort_it_is_local_training() -> None:
    data = small_clients()
    graph = np.zeros((5, 5))
    a = fit(HomologicalConstraints(graph, **EPOCH), data, small_module(), 2)
    b = fit(LocalOnly(), data, small_module(), 2)
    assert_trees_equal(a.models, b.models)


def test_architectures_agree_on_their_first_parameters() -> None:
    method = HomologicalConstraints("complete", 0.05, edge_dim_ratio=0.2, **EPOCH)
    run = trainer(method, max_epochs=3)
    run.fit(ClientModules(modules(), OF), loaders(), loaders(1))
    for group in run.strategy.federation.architectures:
        assert "maps" not in group.client_states.tree
        # Only what is projected has a multiplier: a fifth of the smaller model.
        narrow = 4 * 3 + 3 + 3 * 2 + 2
        dual = group.client_states.tree["dual"]
        assert (dual[:, : int(0.2 * narrow)] != 0).all()


def test_maps_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1_000)
    method = HomologicalConstraints("complete", maps="random")
    with pytest.raises(Exception, match=r"restriction maps of HomologicalConstraints .*identity"):
        fit(method, small_clients(), plain_module(), 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"step": 0.0}, "Expected `step` to be a finite number > 0, but got step=0.0"),
        ({"penalty": -1.0}, "Expected `penalty` to be a finite number >= 0, but got penalty=-1.0"),
        ({"maps": 3}, "Expected `maps` to be 'random', 'identity' or a mapping"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        HomologicalConstraints("ring", **settings)
