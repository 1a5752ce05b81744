r"""GTVMin: a solution is proved optimal by its duals, w_i + sum of the duals = a_i on quadratics
1/2 |w - a|^2, where a dual is as long as its weight, along w_i - w_j, if the ends differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_pfl.methods import GTVMin, LocalOnly
from lightning_pfl.methods.gtvmin import dual_update
from lightning_pfl.methods.support import memory
from lightning_pfl.testing import (
    QuadraticModule,
    assert_trees_close,
    assert_trees_equal,
    fit,
    quadratic_clients,
)
from lightning_pfl.testing.conformance import small_clients, small_module
from tests.methods.case import DEGREE, Bytes, Case, D
from tests.methods.graphs import PATH, RAGGED, edges_among
from tests.methods.networks import EVERYBODY, SCALARS, cohorts, plain_module
from tests.methods.quadratics import closed_form
from tests.methods.references.gtvmin import gtvmin, resolvent

CASE = Case(
    method=lambda: GTVMin("complete", 0.05),
    bytes={
        "defaults": Bytes(lambda: GTVMin("complete"), 4 * D * DEGREE, 4 * D * DEGREE),
    },
    twin=LocalOnly,
    needed=("complete",),
    above_zero="regularization",
)

LINE = (0.0, 0.1, 1.0, 1.1)
"""Four clients on a line, all pairs neighbours."""
NORMS: tuple[Any, ...] = ("l2", "l1", "squared")
ONE_STEP: dict[str, Any] = {"local_epochs": None, "local_steps": 1}


def on_the_line(method: GTVMin) -> list[float]:
    # With curvature 1 + degree, a step of 1/4 solves the primal update exactly.
    data = quadratic_clients([1.0] * 4, LINE)
    found: list[float] = (
        fit(method, data, QuadraticModule(lr=0.25), 60).models["w"].flatten().tolist()
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_pairs_fuse_and_then_everybody(norm: Any) -> None:
    """The pull from the two others is 2 * 0.1 on each; 0.3 is above the last merge."""
    method = GTVMin("complete", 0.1, norm, **ONE_STEP)
    assert on_the_line(method) == pytest.approx([0.25, 0.25, 0.85, 0.85], abs=1e-6)
    method = GTVMin("complete", 0.3, norm, **ONE_STEP)
    assert on_the_line(method) == pytest.approx([0.55] * 4, abs=1e-6)


def test_the_ratio_of_the_steps_does_not_move_the_solution() -> None:
    """With curvature 1 + 3 / 2 a step of 0.4 solves the primal update."""
    method = GTVMin("complete", 0.1, step_ratio=2.0, **ONE_STEP)
    run = fit(method, quadratic_clients([1.0] * 4, LINE), QuadraticModule(lr=0.4), 60)
    expected = [0.25, 0.25, 0.85, 0.85]
    assert run.models["w"].flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_the_square_shrinks_towards_the_mean() -> None:
    """(I + c L) w = a; c / 2 per edge is 0.1 times the square."""
    laplacian = 4 * np.eye(4) - np.ones((4, 4))
    expected = np.linalg.solve(np.eye(4) + 0.2 * laplacian, LINE)
    method = GTVMin("complete", 0.2, "squared", **ONE_STEP)
    assert on_the_line(method) == pytest.approx(expected.tolist(), abs=1e-6)
    assert expected.tolist() == pytest.approx([0.24444, 0.3, 0.8, 0.85556], abs=1e-5)


class TestGTVMin:
    @closed_form
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize(("participation", "ratio"), [(5, 1.0), (3, 4.0)])
    def test_matches_the_reference(
        self, engine: str, norm: Any, participation: int, ratio: float
    ) -> None:
        """With momentum, weight decay, BatchNorm, unequal weights, absent ends, and no samples."""
        data, rounds = small_clients(), 4
        run = fit(
            GTVMin(RAGGED, 0.05, norm, ratio),
            data,
            small_module(),
            rounds,
            engine,
            participation=participation,
        )
        some = cohorts(rounds, participation, eligible=EVERYBODY)
        client_state, dual = gtvmin(small_module(), data, some, RAGGED, 0.05, norm, ratio)
        assert_trees_close(
            run.models, {n: torch.stack([o[n] for o in client_state]) for n in client_state[0]}
        )
        graph = run.strategy.method.graph
        for i, slot in graph.mask.nonzero().tolist():
            j = int(graph.neighbours[i, slot])
            kept = run.client_state["duals"][i, slot].numpy()
            expected = dual[i, j] if i < j else -dual[j, i]
            np.testing.assert_allclose(kept, expected, rtol=1e-9, atol=1e-12)

    def test_both_ends_keep_the_same_dual(self, engine: str) -> None:
        run = fit(GTVMin(RAGGED, 0.05), small_clients(), small_module(), 3, engine, 3)
        graph, duals = run.strategy.method.graph, run.client_state["duals"]
        assert duals.abs().max() > 0
        for i, slot in graph.mask.nonzero().tolist():
            other = duals[int(graph.neighbours[i, slot]), int(graph.reverse[i, slot])]
            torch.testing.assert_close(duals[i, slot], -other, rtol=1e-13, atol=0)
        torch.testing.assert_close(run.client_state["pull"], duals.sum(1))

    def test_alone_with_one_step_it_is_local_training(self, engine: str) -> None:
        """The proximal term has no gradient where a round begins."""
        data = small_clients()
        a = fit(GTVMin("complete", 0.0, **ONE_STEP), data, small_module(), 3, engine)
        b = fit(LocalOnly(**ONE_STEP), data, small_module(), 3, engine)
        assert_trees_equal(a.models, b.models)


@pytest.mark.slow
def test_the_exact_update_solves_convex_clustering() -> None:
    """The optimality conditions of the sum of norms over all pairs, with points in the plane."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    points = centres.repeat(2, 1) + 0.3 * torch.randn(6, 2, generator=generator).double()
    weight = 0.3
    method = GTVMin("complete", weight, local_solver="exact")
    run = fit(method, quadratic_clients([1.0] * 6, points), QuadraticModule(2), 90)
    w, duals, graph = run.models["w"], run.client_state["duals"], run.strategy.method.graph
    torch.testing.assert_close(w + duals.sum(1), points, rtol=0, atol=1e-5)
    difference = w.unsqueeze(1) - w[graph.neighbours]
    distance = difference.norm(dim=2)
    assert (duals.norm(dim=2) <= weight * (1 + 1e-12)).all()
    split = distance > 1e-3
    direction = difference[split] / distance[split].unsqueeze(1)
    torch.testing.assert_close(duals[split], weight * direction, rtol=0, atol=1e-4)
    # Clients of a cluster are one point, those of different clusters are not.
    assert (distance[:3] > 1e-3).sum(1).tolist() == [4, 4, 4]


@pytest.mark.parametrize("norm", NORMS)
def test_the_dual_update_is_the_resolvent(norm: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    c = torch.rand(3, 4, generator=generator, dtype=torch.float64) * 3
    got = dual_update(u, c, norm)
    for at in np.ndindex(3, 4):
        expected = resolvent(u[at].numpy(), float(c[at]), norm)
        np.testing.assert_allclose(got[at].numpy(), expected, rtol=1e-12)
    # Odd, so that both ends of an edge agree to the last bit.
    assert torch.equal(dual_update(-u, c, norm), -got)
    assert not dual_update(u, 0 * c, norm).any()


def test_one_vector_per_edge_and_direction() -> None:
    run = fit(GTVMin(RAGGED, 0.1), small_clients(), plain_module(), 2, participation=3)
    for round in run.recorder.rounds:
        edges = edges_among(RAGGED, round.info.index)
        assert edges > 0
        assert round.bytes_exchanged == 8 * SCALARS * edges
        assert round.bytes_up == round.bytes_down == 0


def test_a_client_without_neighbours_is_trained_with_a_proximal_term() -> None:
    alone = np.zeros((3, 3))
    alone[0, 1] = alone[1, 0] = 1.0
    data = quadratic_clients([1.0, 1.0, 3.0], [0.0, 1.0, 2.0])
    run = fit(GTVMin(alone, 0.2, local_solver="exact"), data, QuadraticModule(), 1)
    # argmin 3/2 (z - 2)^2 + 1/2 z^2
    assert run.models["w"][2].item() == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize(("norm", "ends"), [("l2", 1 / 2), ("l1", 1 / 2), ("squared", 1 / 3)])
def test_a_client_without_samples_passes_the_pull_on(engine: str, norm: Any, ends: float) -> None:
    """A path 0 - 1 - 2 whose middle has no loss, centres 0 and 2, weight 1/2.

    Norms: either end is pulled with 1/2, and any middle between them is optimal. Squares: the
    middle is (w_0 + w_2) / 2, so that w_0 + (w_0 - w_2) / 4 = 0 and w_2 - 2 + (w_2 - w_0) / 4 = 0.
    """
    data = quadratic_clients([1.0] * 3, [0.0, 9.0, 2.0], [2, 0, 2])
    method = GTVMin(PATH, 0.5, norm, local_solver="exact")
    run = fit(method, data, QuadraticModule(), 60, engine)
    first, middle, last = run.models["w"].flatten().tolist()
    assert [first, last] == pytest.approx([ends, 2 - ends], abs=1e-6)
    assert first - 1e-6 <= middle <= last + 1e-6
    if norm == "squared":
        assert middle == pytest.approx(1, abs=1e-6)


def test_there_is_no_global_model() -> None:
    run = fit(GTVMin("complete", 0.1), small_clients(), plain_module(), 1)
    assert run.strategy.method.global_model(run.server) is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"regularization": -1.0}, "Expected `regularization` to be a finite number >= 0, but got"),
        ({"norm": "linf"}, "Expected `norm` to be 'l2', 'l1' or 'squared', but got norm='linf'"),
        ({"step_ratio": 0.0}, "Expected `step_ratio` to be a finite number > 0, but got"),
        ({"local_solver": "adam"}, "Expected `local_solver` to be 'optimizer' or 'exact'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GTVMin("ring", **settings)


def test_duals_that_do_not_fit_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 50_000)
    # 5 clients, 4 slots, 77 parameters, 8 bytes, seven times
    match = r"GTVMin with 5 clients, up to 4 neighbours each and 77 parameters .* 84.2 KiB and 48.8"
    with pytest.raises(MisconfigurationException, match=match):
        fit(GTVMin("complete", 0.1), small_clients(), plain_module(), 1)
    fit(GTVMin("ring", 0.1), small_clients(), plain_module(), 1)
