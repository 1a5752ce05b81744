"""A parameter that is one number without an axis, such as a temperature, in every method."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing import assert_trees_close, fit
from lightning_pfl.testing.conformance import small_clients
from tests.methods.cases import CASES, PROBLEMS

OTHERS = {"APFL"} | {name for name, problem in PROBLEMS.items() if "make_module" in problem}
"""APFL hands out two models; the others need modules of their own."""


class Scale(nn.Module):
    """Multiplies by a learned number, and counts in a number."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full(shape, 1.5))
        self.register_buffer("count", torch.zeros(shape, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def scaled(*shape: int) -> PersonalizedModule:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.Tanh(), Scale(shape))
    return PersonalizedModule(backbone, nn.Linear(4, 3), lr=0.05).double()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", sorted(set(CASES) - OTHERS))
def test_a_number_trains_like_a_vector_of_one(name: str) -> None:
    """Two rounds, so that its client state is used."""
    number, vector = (
        fit(CASES[name](), small_clients(), each, 2) for each in (scaled(), scaled(1))
    )
    for client in range(5):
        # A module, as some methods predict by several models.
        found = dict(number.strategy.client_module(client).state_dict())
        expected = dict(vector.strategy.client_module(client).state_dict())
        assert found["backbone.3.factor"].shape == ()
        assert_trees_close(
            found, {key: leaf.view(found[key].shape) for key, leaf in expected.items()}
        )
