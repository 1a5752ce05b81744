"""Means over owners, on numbers."""

from fractions import Fraction

import pytest
import torch

from lightning_pfl.solvers.owners import owners_mean


def test_entries_are_averaged_over_those_that_own_them() -> None:
    """(1, 2, 3, 4) of full width, (5, 6) and (9, 10) of half of it."""
    uploads = {"w": torch.tensor([[1.0, 2, 3, 4], [5, 6, 0, 0], [9, 10, 0, 0]])}
    owned = {"w": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()}
    found = owners_mean({"w": torch.zeros(4)}, uploads, owned, torch.full((3,), 1 / 3))
    assert found["w"].tolist() == [5, 6, 3, 4]


def test_what_nobody_owns_stays_and_counters_take_the_maximum() -> None:
    old = {"w": torch.tensor([7.0, 8.0]), "n": torch.tensor(3), "all": torch.tensor(1.0)}
    uploads = {
        "w": torch.tensor([[1.0, torch.nan], [4.0, 2.0]]),
        "n": torch.tensor([5, 9]),
        "all": torch.tensor([2.0, 6.0]),
    }
    owned = {
        "w": torch.tensor([[True, False], [True, False]]),
        "n": torch.tensor([True, False]),
    }
    found = owners_mean(old, uploads, owned, torch.tensor([0.25, 0.75]).double())
    assert found["w"].tolist() == [3.25, 8.0]
    assert int(found["n"]) == 5
    assert float(found["all"]) == 5.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_mean_is_exact(dtype: torch.dtype) -> None:
    """By fractions; entries that nobody moves stay, though the weights' sum isn't exact."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(6, generator=generator).to(dtype)
    uploads = old.expand(7, 6).clone()
    uploads[:, 3:] = torch.randn(7, 3, generator=generator).to(dtype)
    owned = torch.rand(7, 6, generator=generator) < 0.7
    weights = torch.tensor([0.1, 0.2, 0.05, 0.15, 0.2, 0.2, 0.1]).double()
    found = owners_mean({"w": old}, {"w": uploads}, {"w": owned}, weights)["w"]
    assert found.dtype == dtype
    assert torch.equal(found[:3], old[:3])
    for column in range(3, 6):
        mine = [k for k in range(7) if owned[k, column]]
        total = sum(Fraction(float(weights[k])) for k in mine)
        exact = sum(Fraction(float(weights[k])) * Fraction(float(uploads[k, column])) for k in mine)
        want = torch.tensor(float(exact / total), dtype=torch.float64).to(dtype)
        assert torch.equal(found[column], want)


def test_masks_take_the_maximum_over_their_owners() -> None:
    uploads = {"m": torch.tensor([[True, True, False], [True, False, False]])}
    owned = {"m": torch.tensor([[False, True, True], [False, True, True]])}
    old = {"m": torch.tensor([False, False, True])}
    found = owners_mean(old, uploads, owned, torch.full((2,), 0.5).double())
    assert found["m"].tolist() == [False, True, False]
