"""The sheaf Laplacian and the restriction maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.graphs import resolve_graph
from lightning_pfl.methods.support.stability import displacement
from lightning_pfl.solvers.sheaf import (
    Restrictions,
    check_maps,
    disagreement,
    edge_dims,
    given_dims,
    lift,
    map_steps,
    move_maps,
    project,
)
from tests.methods.graphs import PAIR, RAGGED, TWO_MAPS
from tests.methods.references.sheaf_laplacian import sheaf_laplacian

GRAPH = resolve_graph(RAGGED, 5, 0)
SIZES = torch.tensor([7, 10, 4, 6, 9])


def drawn(graph: Any = GRAPH, sizes: Tensor = SIZES, ratio: float = 0.5) -> Restrictions:
    return Restrictions.plan(graph, sizes, "random", ratio, 1.0, 0)


def kept(plan: Restrictions, sizes: Tensor) -> list[Tensor]:
    """Each client's maps, ``(slots, width, scalars)``."""
    found = []
    for client, size in enumerate(sizes.tolist()):
        empty = plan.empty(torch.zeros(size, dtype=torch.float64))["maps"]
        state = {"maps": empty.unsqueeze(0)}
        found.append(plan.filled(state, torch.tensor([client]))["maps"][0])
    return found


def test_the_laplacian_is_symmetric_positive_and_the_sum_over_edges() -> None:
    plan = drawn()
    maps = kept(plan, SIZES)
    laplacian = sheaf_laplacian(GRAPH, maps)
    assert laplacian.shape == (int(SIZES.sum()),) * 2
    assert torch.equal(laplacian, laplacian.T)
    assert float(torch.linalg.eigvalsh(laplacian).min()) > -1e-12
    parts = [torch.randn(size, dtype=torch.float64) for size in SIZES.tolist()]
    total = 0.0
    for i, s in GRAPH.mask.nonzero().tolist():
        j, r = int(GRAPH.neighbours[i, s]), int(GRAPH.reverse[i, s])
        gap = maps[i][s] @ parts[i] - maps[j][r] @ parts[j]
        total += RAGGED[i, j] * float(gap.square().sum()) / 2  # both ends list the edge
    theta = torch.cat(parts)
    assert float(theta @ laplacian @ theta) == pytest.approx(total, rel=1e-12)


def test_identity_maps_make_it_the_graph_s() -> None:
    sizes = torch.full((5,), 3)
    plan = Restrictions.plan(GRAPH, sizes, "identity", 1.0, 1.0, 0).learned()
    laplacian = sheaf_laplacian(GRAPH, kept(plan, sizes))
    of_graph = np.diag(RAGGED.sum(1)) - RAGGED
    np.testing.assert_allclose(laplacian.numpy(), np.kron(of_graph, np.eye(3)), atol=1e-15)


def test_a_pair_of_different_sizes() -> None:
    graph = resolve_graph(PAIR, 2, 0)
    plan = Restrictions.plan(graph, torch.tensor([2, 3]), TWO_MAPS, 0.1, 1.0, 0)
    laplacian = sheaf_laplacian(graph, kept(plan, torch.tensor([2, 3])))
    values = torch.linalg.eigvalsh(laplacian)
    torch.testing.assert_close(values, torch.tensor([0.0, 0, 0, 0, 2], dtype=torch.float64))


def test_projecting_and_lifting_is_the_laplacian() -> None:
    sizes = torch.full((5,), 8)
    plan = drawn(sizes=sizes)
    maps = torch.stack(kept(plan, sizes))
    theta = torch.randn(5, 8, dtype=torch.float64)
    sent = plan.project(theta, {"maps": maps}, torch.arange(5))
    got = sent[GRAPH.neighbours, GRAPH.reverse]
    weights = torch.where(GRAPH.mask, GRAPH.slot_weights, 0.0)
    product = lift(disagreement(sent, got, weights), maps, 8)
    laplacian = sheaf_laplacian(GRAPH, list(maps))
    torch.testing.assert_close(product.flatten(), laplacian @ theta.flatten())


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_identity_needs_no_maps(ratio: float) -> None:
    sizes = torch.tensor([8, 8, 8, 8, 8])
    plan = Restrictions.plan(GRAPH, sizes, "identity", ratio, 1.0, 0)
    assert plan.empty(torch.zeros(8)) == {}
    maps = torch.stack(kept(plan.learned(), sizes))
    theta = torch.randn(5, 8, dtype=torch.float64)
    sent = project(theta, None, plan.dims, plan.width)
    torch.testing.assert_close(sent, project(theta, maps, plan.dims, plan.width))
    torch.testing.assert_close(lift(sent, None, 8), lift(sent, maps, 8))


def test_the_identity_between_clients_of_different_sizes() -> None:
    """An edge of a small client is filled up; a large one's parameters beyond it are free."""
    graph = resolve_graph(RAGGED, 5, 0)
    plan = Restrictions.plan(graph, SIZES, "identity", 1.0, 1.0, 0)
    for client, size in enumerate(SIZES.tolist()):
        theta = torch.arange(1.0, size + 1).unsqueeze(0)
        dims = plan.dims[client : client + 1]
        sent = project(theta, None, dims, plan.width)[0]
        for slot, rank in enumerate(dims[0].tolist()):
            assert sent[slot, :rank].tolist() == list(range(1, rank + 1))
            assert not sent[slot, rank:].any()
        assert lift(sent.unsqueeze(0), None, size).shape == (1, size)


def test_a_step_on_the_maps_is_the_gradient_of_the_penalty() -> None:
    maps = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    theta = torch.randn(2, 5, dtype=torch.float64)
    theirs = torch.randn(2, 3, 4, dtype=torch.float64)
    sent = project(theta, maps, torch.full((2, 3), 4), 4)
    (grad,) = torch.autograd.grad((sent - theirs).square().sum() / 2, maps)
    moved = move_maps(maps.detach(), (sent - theirs).detach(), theta, 0.3)
    torch.testing.assert_close(moved, maps.detach() - 0.3 * grad)


def test_a_step_on_both_maps_shrinks_the_residual_by_its_number() -> None:
    """With both parameters fixed it is multiplied by 1 - s a (|t_i|^2 + |t_j|^2)."""
    graph = resolve_graph(2.0 * PAIR, 2, 0)
    theta = torch.randn(2, 6, dtype=torch.float64)
    maps = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    dims, weights = torch.full((2, 1), 3), graph.slot_weights
    sent = project(theta, maps, dims, 3)
    moved = move_maps(maps, disagreement(sent, sent.flip(0), weights), theta, 0.05)
    after = project(theta, moved, dims, 3)
    step = map_steps(graph, theta.square().sum(1), 0.05)
    factor = 1 - float(step[0, 0])
    assert float(step[0, 0]) == pytest.approx(0.05 * 2 * float(theta.square().sum()))
    torch.testing.assert_close(after - after.flip(0), factor * (sent - sent.flip(0)))


def test_dimensions_of_edges() -> None:
    graph = resolve_graph(PAIR, 2, 0)
    # In floating point 0.57 * 100 is below 57.
    for sizes, ratio, expected in (((100, 300), 0.57, 57), ((30, 40), 0.1, 3), ((9, 20), 0.5, 4)):
        assert edge_dims(graph, torch.tensor(sizes), ratio).tolist() == [[expected]] * 2
    dims = edge_dims(GRAPH, SIZES, 0.5)
    assert dims.shape == GRAPH.mask.shape
    assert not dims[~GRAPH.mask].any()
    with pytest.raises(ValueError, match=r"edge_dim_ratio=0.1 and a client with 9 trainable"):
        edge_dims(graph, torch.tensor([9, 20]), 0.1)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({(1, 0): None}, r"a matrix \(d, 3\) under \(1, 0\), but got nothing"),
        ({(0, 1): torch.ones(1, 3)}, r"a matrix \(d, 2\) under \(0, 1\), but got \(1, 3\)"),
        ({(0, 1): torch.ones(2)}, r"a matrix \(d, 2\) under \(0, 1\), but got \(2,\)"),
        ({(0, 1): torch.ones(2, 2)}, r"one number of rows, but got \(2, 2\) under \(0, 1\) and"),
        ({(0, 0): torch.ones(1, 2)}, r"but got one under \(0, 0\), which is no edge"),
    ],
)
def test_given_maps_must_fit(changed: dict[Any, Any], match: str) -> None:
    maps = {edge: p for edge, p in {**TWO_MAPS, **changed}.items() if p is not None}
    with pytest.raises(ValueError, match=match):
        given_dims(resolve_graph(PAIR, 2, 0), torch.tensor([2, 3]), maps)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ((0.0, "random", 1.0), r"Expected `edge_dim_ratio` to be a number in \(0, 1\], but got"),
        ((1.5, "random", 1.0), "edge_dim_ratio=1.5"),
        ((0.5, "zeros", 1.0), "Expected `maps` to be 'random', 'identity' or a mapping .*'zeros'"),
        ((0.5, "random", 0.0), "Expected `map_std` to be a finite number > 0, but got"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_maps(*settings)


def test_random_maps_are_a_function_of_seed_and_edge() -> None:
    maps = kept(drawn(), SIZES)
    again = kept(drawn(), SIZES)
    assert all(torch.equal(a, b) for a, b in zip(maps, again, strict=True))
    other = Restrictions.plan(GRAPH, SIZES, "random", 0.5, 1.0, 1)
    assert not torch.equal(kept(other, SIZES)[0], maps[0])
    large = Restrictions.plan(resolve_graph(PAIR, 2, 0), torch.full((2,), 200), "random", 1, 0.1, 0)
    both = torch.stack(kept(large, torch.full((2,), 200)))
    # 80,000 numbers: the deviation is off by 0.0005 at four of its own deviations.
    assert float(both.std()) == pytest.approx(0.1, abs=1e-3)
    assert float((both[0] * both[1]).mean()) == pytest.approx(0.0, abs=3e-4)


def test_random_maps_of_a_clients_edges_are_independent() -> None:
    graph, sizes = resolve_graph("complete", 3, 0), torch.full((3,), 200)
    for maps in kept(Restrictions.plan(graph, sizes, "random", 1, 0.1, 0), sizes):
        # The mean of 40,000 products has a deviation of 0.1 * 0.1 / 200 = 5e-5.
        assert float((maps[0] * maps[1]).mean()) == pytest.approx(0.0, abs=3e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_how_far_momentum_goes(momentum: float) -> None:
    velocity = position = 0.0
    for _ in range(5):
        velocity = momentum * velocity + 1
        position += velocity
    assert displacement(5, momentum) == pytest.approx(position)


@pytest.mark.parametrize(
    "given", [[[1.0]], torch.tensor([[1]]), torch.tensor([[torch.nan]]), np.ones((1, 1))]
)
def test_maps_are_finite_tensors(given: Any) -> None:
    with pytest.raises(ValueError, match=r"tensors of finite .* under \(0, 1\)"):
        check_maps(0.5, {(0, 1): given}, 0.01)
