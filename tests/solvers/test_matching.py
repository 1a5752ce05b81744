"""Assignments of units: against all orders, and the numbers of a known small problem."""

from __future__ import annotations

from itertools import permutations, product
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pfl.solvers.matching import assignment, match_units, nearest_order

NETWORKS = [
    torch.tensor([[3.0, 0.0], [0.0, 3.0]]).double(),
    torch.tensor([[0.1, 2.9], [3.2, -0.1]]).double(),
    torch.tensor([[-3.0, -3.0], [2.9, 0.2]]).double(),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_an_assignment_has_the_largest_sum() -> None:
    profit = draw(3, 5)
    best = max(permutations(range(5), 3), key=lambda c: sum(profit[i, j] for i, j in enumerate(c)))
    assert assignment(profit).tolist() == list(best)


def test_units_get_the_nearest_order_of_all() -> None:
    units, targets = draw(4, 3), draw(4, 3, seed=2)
    best = min(
        permutations(range(4)), key=lambda o: float((units[list(o)] - targets).square().sum())
    )
    assert best != (0, 1, 2, 3)
    assert nearest_order(units, targets).tolist() == list(best)


def test_equal_units_stay_where_they_are() -> None:
    assert nearest_order(torch.ones(3, 2), draw(3, 2).float()).tolist() == [0, 1, 2]


def gain(
    v: Tensor, group: list[Tensor], networks: int, s: float, s0: float, weight: float
) -> float:
    """What a unit adds to an atom's log posterior, one that other units have."""
    a, b = s * torch.stack(group).sum(0), s0 + s * len(group)
    squares = (s * v + a).square().sum() / (s + b) - a.square().sum() / b
    return float(squares) + weight * log(len(group) / (networks - len(group)))


def fresh(v: Tensor, rank: int, networks: int, s: float, s0: float, weight: float) -> float:
    """What it adds as the only unit of the rank-th new atom; concentration 1, prior mean 0."""
    return (
        float((s * v).square().sum() / (s + s0)) - weight * log(rank) + weight * log(1 / networks)
    )


def test_two_networks_profits_are_the_known_ones() -> None:
    """The reference of the next test, on printed numbers."""
    one, two, _ = NETWORKS
    old = [[gain(v, [a], 3, 1.0, 0.1, 2.0) for a in one] for v in two]
    np.testing.assert_allclose(old, [[-0.98716, 7.01284], [8.741411, -0.68716]], rtol=1e-5)
    new = [[fresh(v, r, 3, 1.0, 0.1, 2.0) for r in (1, 2)] for v in two]
    np.testing.assert_allclose(new, [[5.457321, 4.071027], [7.120957, 5.734663]], rtol=1e-6)


def test_three_networks_have_the_known_atoms() -> None:
    atoms = match_units(NETWORKS, variance=1.0, prior_variance=10.0)
    assert [of.tolist() for of in atoms.members] == [[0, 1], [1, 0], [2, 0]]
    expected = [[2.935484, 0.032258], [0.047619, 2.809524], [-2.727273, -2.727273]]
    np.testing.assert_allclose(atoms.means, expected, atol=5e-7)


@pytest.mark.parametrize("weight", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_no_network_has_a_better_assignment(weight: float, seed: int) -> None:
    """Given those of the others; all assignments of two units are tried."""
    networks = [1.5 * draw(2, 2, seed=10 * seed + k) for k in range(4)]
    s, s0 = 1 / 0.5, 1 / 2.0
    atoms = match_units(networks, variance=0.5, prior_variance=2.0, count_weight=weight)
    for number, units in enumerate(networks):
        groups: dict[int, list[Tensor]] = {}
        for k, of in enumerate(atoms.members):
            for unit, atom in enumerate(of.tolist()) if k != number else ():
                groups.setdefault(atom, []).append(networks[k][unit])
        fresh_ones = ("first new", "second new")

        def total(chosen: Any, units: Tensor = units, groups: Any = groups) -> float:
            parts = [
                gain(v, groups[c], 4, s, s0, weight)
                if c in groups
                else fresh(v, 1 + ("first new", "second new").index(c), 4, s, s0, weight)
                for v, c in zip(units, chosen, strict=True)
            ]
            return sum(parts)

        best = max(total(c) for c in product([*groups, *fresh_ones], repeat=2) if c[0] != c[1])
        mine = atoms.members[number].tolist()
        new = iter(fresh_ones)
        found = total(tuple(atom if atom in groups else next(new) for atom in mine))
        assert found == pytest.approx(best, rel=1e-12)


def test_counts_have_twice_their_logarithm() -> None:
    """Units 1 and -1, of which two atoms explain the squares better by 1/2 + 1/2; a new atom costs
    log 2 times the factor: one atom with the model's factor 2, two with the factor 1."""
    networks = [torch.tensor([[1.0]]), torch.tensor([[-1.0]])]
    assert match_units(networks).means.tolist() == [[0.0]]
    assert match_units(networks, count_weight=1.0).means.tolist() == [[0.5], [-0.5]]


def test_permuted_copies_are_one_network() -> None:
    network = 3 * draw(5, 4)
    orders = [torch.randperm(5, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    atoms = match_units([network[order] for order in orders], prior_variance=1e8)
    assert len(atoms.means) == 5
    for order, of in zip(orders, atoms.members, strict=True):
        torch.testing.assert_close(atoms.means[of], network[order], rtol=1e-6, atol=1e-6)


def test_one_network_is_shrunk_towards_the_prior_mean() -> None:
    """A unit v has the posterior mean (v / 1 + mu / 0.5) / (1 / 1 + 1 / 0.5)."""
    network, mean = draw(3, 2), torch.tensor([0.5, -1.0]).double()
    atoms = match_units([network], variance=1.0, prior_variance=0.5, prior_mean=mean)
    torch.testing.assert_close(atoms.means, (network + 2 * mean) / 3)


def test_the_concentration_decides_how_many_atoms_there_are() -> None:
    networks = [draw(3, 2, seed=k) for k in range(3)]
    few, many = (match_units(networks, concentration=c) for c in (1e-6, 1e6))
    assert (len(few.means), len(many.means)) == (3, 9)
