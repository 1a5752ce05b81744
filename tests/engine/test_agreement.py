"""How far a replay may be from its step, and copies on which both run."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from lightning_pfl.engine.agreement import agree, close, copy


@pytest.mark.parametrize(
    ("dtype", "apart"), [(torch.float32, 3e-3), (torch.float64, 1e-11), (torch.complex128, 1e-11)]
)
def test_rounding_is_told_from_other_numbers(dtype: torch.dtype, apart: float) -> None:
    """A sum in another order is as far off as both rounding errors, n units of the terms' sum."""
    numbers = torch.rand(8000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = numbers.to(dtype)
    there, back = (reduce(torch.add, each.split(1)) for each in (terms, terms.flip(0)))
    assert not torch.equal(there, back)
    assert close([there], [back], [terms])
    assert not close([there * (1 + apart)], [there], [terms])
    assert not close([back * apart], [torch.zeros_like(back)], [terms])
    assert close([there * torch.nan], [there * torch.nan], [terms])


def test_results_have_the_rounding_of_what_they_are_computed_from() -> None:
    single = torch.ones(1)
    double = single.double()
    assert close([double * (1 + 1e-6)], [double], [single, double])
    assert not close([double * (1 + 1e-6)], [double], [double, torch.ones(1, dtype=torch.int64)])
    assert close([single * (1 + 1e-6)], [single], [double])


def test_a_replay_on_a_cpu_has_the_bits_of_its_step() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert agree([one], [one.clone()], [one])
    assert agree([nan], [nan.clone()], [one])
    assert not agree([one.nextafter(2 * one)], [one], [one])
    assert not agree([one], [nan], [one])


@pytest.mark.parametrize("clients", [1, 2])
def test_a_row_of_one_client_is_copied_whatever_its_stride(clients: int) -> None:
    """As zeros like a leaf that all clients share: with one client a step may add to it."""
    leaf = torch.ones(3).expand(clients, 3)
    copied = copy(leaf)
    assert copied.stride() == leaf.stride()
    assert (copied.data_ptr() == leaf.data_ptr()) == (clients > 1)
    assert torch.equal(copied, leaf)
