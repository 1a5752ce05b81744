"""PDMM on problems whose solutions are known in closed form or by a conic solver."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.graphs import Graph
from lightning_pfl.solvers.blocks import BlockDraws, check_block_share, damping
from lightning_pfl.solvers.pairs import Pairs
from lightning_pfl.solvers.pdmm import PDMMState, objective, solve
from lightning_pfl.solvers.proximal import block_soft_threshold
from recipes.centralized.newtons_method import proximal_newton
from tests.methods.references.convex_clustering import Draw, pdmm
from tests.solvers.problems import L4, Hinges, Quadratics, conic_optimum, ellipses, l4_solution

ZEROS = torch.zeros(4, 1, dtype=torch.float64)
ALL = Pairs.complete(4)


def documented_draws(clients: int, rounds: int, blocks: int, duals: int, seed: int) -> list[Draw]:
    """Models first, then pairs in lexicographic order; the first of a permutation of them."""
    pairs = [(i, j) for i in range(clients) for j in range(clients) if i != j]
    found = []
    for t in range(rounds):
        primal = permutation(clients**2, derive(seed, "primal blocks", t))[:blocks].tolist()
        dual = permutation(len(pairs), derive(seed, "dual blocks", t))[:duals].tolist()
        if blocks >= clients**2:
            primal = list(range(clients**2))
        if duals >= len(pairs):
            dual = list(range(len(pairs)))
        some = {b for b in primal if b < clients}
        chosen = {pairs[b - clients] for b in primal if b >= clients}
        found.append((some, chosen, {pairs[b] for b in dual}))
    return found


def relative_gap(losses: Any, state: PDMMState, pairs: Pairs, weight: float, best: float) -> float:
    value = objective(losses.value(state.models), state.models, pairs, weight)
    return float(value - best) / abs(best)


@pytest.mark.parametrize("weight", [0.0, 0.02, 0.05, 0.1, 0.2, 0.25, 0.4])
@pytest.mark.parametrize(
    ("blocks", "iterations"), [(16, 500), pytest.param(8, 900, marks=pytest.mark.slow)]
)
def test_four_points_on_a_line(weight: float, blocks: int, iterations: int) -> None:
    losses = Quadratics(L4)
    state = solve(losses.prox, ALL, weight, ZEROS, 1.0, blocks, iterations=iterations)
    torch.testing.assert_close(state.models, l4_solution(weight), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [0.1, 1.0])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8, 16])
def test_any_number_of_blocks_finds_the_solution(blocks: int, penalty: float) -> None:
    losses = Quadratics(L4)
    iterations = 40_000 // blocks
    state = solve(losses.prox, ALL, 0.1, ZEROS, penalty, blocks, iterations=iterations)
    torch.testing.assert_close(state.models, l4_solution(0.1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("blocks", "duals"), [(9, 6), (4, 6), (5, 2)])
def test_iterates_match_the_reference(full: bool, blocks: int, duals: int) -> None:
    losses = Quadratics(
        torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]], dtype=torch.float64),
        torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64),
    )

    def prox(i: int, b: np.ndarray, c: float) -> np.ndarray:
        a = float(losses.a[i])
        return (a * losses.c[i].numpy() + c * b) / (a + c)

    weight, rho, eta = 0.3, 0.7, 0.2
    tau, nu = damping(blocks, 9)
    draws = documented_draws(3, 25, blocks, duals, seed=3)
    lam = weight / 2 if full else weight
    *_, (x, z) = pdmm(np.zeros((3, 2)), prox, draws, lam, rho, tau, nu, full, eta)
    state = solve(
        losses.prox,
        Pairs.complete(3),
        weight,
        torch.zeros(3, 2, dtype=torch.float64),
        rho,
        blocks,
        duals,
        "full" if full else "printed",
        iterations=25,
        seed=3,
        proximal=eta,
    )
    np.testing.assert_allclose(state.models.numpy(), x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.split.numpy(), z, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_printed_update_needs_all_blocks() -> None:
    """All at once and from antisymmetric values it is right; with random blocks it may stop
    elsewhere. How far off it stops depends on the draws; some happen to be right.
    """
    losses = Quadratics(L4)
    run = partial(solve, losses.prox, ALL, 0.1, penalty=1.0)
    together = run(ZEROS, step="printed", iterations=600).models
    torch.testing.assert_close(together, l4_solution(0.1), rtol=0, atol=1e-9)
    errors = []
    for seed in range(5):
        some = run(ZEROS, step="printed", blocks=8, iterations=600, seed=seed)
        later = run(some, step="printed", blocks=8, iterations=50, seed=seed + 10)
        torch.testing.assert_close(later.models, some.models, rtol=0, atol=1e-9)
        errors.append(float((some.models - l4_solution(0.1)).abs().max()))
    assert max(errors) > 1e-2
    assert sum(errors) / len(errors) > 1e-3


@pytest.mark.parametrize("forward", [1 / 3, 1.0])
def test_without_backward_step_all_blocks_together_diverge(forward: float) -> None:
    losses = Quadratics(L4)
    state = solve(losses.prox, ALL, 0.1, ZEROS, 1.0, iterations=200, steps=(forward, 0.0))
    assert not float(state.models.abs().max()) < 1e6


def test_step_parameters() -> None:
    assert damping(16, 16) == pytest.approx((1 / 3, 2 / 3))
    assert damping(1, 16) == pytest.approx((1 / 31, 0.0))
    assert damping(2, 16) == pytest.approx((2 / (2 * 30), 1 / 2))


def test_draws_have_the_asked_size_and_cover_everything() -> None:
    members = torch.tensor([True, True, False, True])
    pairs = ALL.among(members)
    draws = BlockDraws(pairs, members, 5, 0.5, seed=0)
    assert draws.total == 3 + 6
    seen = torch.zeros_like(pairs.mask), torch.zeros(4, dtype=torch.bool)
    for number in range(60):
        drawn = draws.of(number)
        assert int(drawn.models.sum() + drawn.pairs.sum()) == 5
        assert int(drawn.duals.sum()) == 3
        seen = seen[0] | drawn.pairs, seen[1] | drawn.models
    assert torch.equal(seen[0], pairs.mask)
    assert torch.equal(seen[1], members)


@pytest.mark.parametrize("percent", [7, 28, 29, 57, 58, 100])
def test_shares_are_decimal(percent: int) -> None:
    """Of 100 clients and 100 pairs: in binary 0.29 of them are a little less than 29."""
    ends = torch.stack([torch.arange(50), torch.arange(1, 51)])
    chain = Pairs.of_graph(Graph.of(51, ends, torch.ones(50)))
    draws = BlockDraws(chain, torch.zeros(51, dtype=torch.bool), percent / 100, 1.0, seed=0)
    assert draws.total == 100
    assert int(draws.of(0).pairs.sum()) == percent


@pytest.mark.parametrize("bad", [0, 0.0, 1.5, -1, True, float("nan")])
def test_shares_are_checked(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected `blocks` to be a share in \(0, 1\] or a numb"):
        check_block_share("blocks", bad)


def test_block_soft_threshold_is_the_proximal_map() -> None:
    """The minimiser of t ||z|| + ||z - v||^2 / 2, by the optimality condition."""
    v = torch.randn(50, 3, dtype=torch.float64)
    t = torch.rand(50, dtype=torch.float64) * 2
    z = block_soft_threshold(v, t)
    norms = z.norm(dim=1)
    moved = norms > 0
    direction = z[moved] / norms[moved].unsqueeze(1)
    residual = t[moved].unsqueeze(1) * direction + z[moved] - v[moved]
    torch.testing.assert_close(residual, torch.zeros_like(residual), rtol=0, atol=1e-14)
    assert (v[~moved].norm(dim=1) <= t[~moved]).all()
    assert 0 < int(moved.sum()) < 50
    zero = torch.zeros(1, 2)
    assert torch.equal(block_soft_threshold(zero, torch.zeros(1)), zero)


def pdmm_prox(losses: Any) -> Any:
    def prox(anchor: Tensor, weight: Tensor, start: Tensor) -> Tensor:
        return proximal_newton(losses, anchor, weight, start)

    return prox


class TestSquaredHinge:
    def test_twelve_clients(self) -> None:
        """Four of each cluster: the optimal value 2.144222, and 26 of 132 differences zero."""
        points, labels = ellipses("separable", 4)
        losses, pairs = Hinges(points, labels), Pairs.complete(12)
        start = torch.zeros(12, 3, dtype=torch.float64)
        state = solve(pdmm_prox(losses), pairs, 0.1, start, 0.3, iterations=500)
        best = conic_optimum(points, labels, 0.1)
        assert best == pytest.approx(2.144222, abs=1e-6)
        gap = relative_gap(losses, state, pairs, 0.1, best)
        assert -1e-9 < gap < 1e-5
        assert int(((state.split == 0).all(2) & pairs.mask).sum()) == 26

    @pytest.mark.parametrize(
        ("blocks", "iterations"), [(1.0, 600), pytest.param(0.5, 900, marks=pytest.mark.slow)]
    )
    def test_matches_a_conic_solver(self, blocks: float, iterations: int) -> None:
        points, labels = ellipses("recovery", 2)
        losses, pairs = Hinges(points, labels), Pairs.complete(6)
        start = torch.zeros(6, 3, dtype=torch.float64)
        best = conic_optimum(points, labels, 0.1)
        state = solve(pdmm_prox(losses), pairs, 0.1, start, 0.3, blocks, iterations=iterations)
        assert abs(relative_gap(losses, state, pairs, 0.1, best)) < 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize(("blocks", "iterations"), [(1.0, 4000), (0.5, 8000), (0.25, 16_000)])
    def test_sixty_clients_match_a_conic_solver(self, blocks: float, iterations: int) -> None:
        points, labels = ellipses("separable")
        losses, pairs = Hinges(points, labels), Pairs.complete(60)
        start = torch.zeros(60, 3, dtype=torch.float64)
        best = conic_optimum(points, labels, 0.05)
        state = solve(pdmm_prox(losses), pairs, 0.05, start, 0.1, blocks, iterations=iterations)
        assert abs(relative_gap(losses, state, pairs, 0.05, best)) < 1e-6


def test_sparse_pairs_are_the_terms_of_the_objective() -> None:
    """A path 0 - 1 - 2 of weights: with small weights x_i = a_i - weight sum of signs."""
    adjacency = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 2.0], [0.0, 2.0, 0.0]])
    losses = Quadratics(torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64))
    start = torch.zeros(3, 1, dtype=torch.float64)
    state = solve(losses.prox, Pairs.weighted(adjacency), 0.1, start, 0.5, iterations=600)
    expected = torch.tensor([[0.1], [1.0 - 0.1 + 0.2], [3.0 - 0.2]], dtype=torch.float64)
    torch.testing.assert_close(state.models, expected, rtol=0, atol=1e-9)
