"""Means over owners, on numbers."""

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
