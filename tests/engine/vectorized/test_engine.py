"""How a cohort is cut into programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.vectorized.engine import CACHED, FEW_ON_CPU, MOST_ON_CPU, VectorizedEngine
from lightning_pfl.models.base import PersonalizedModule

NUMBERS = 2**20 // 4
"""In a MiB."""


def chunks(numbers: int, clients: int, **settings: Any) -> list[int]:
    """Sizes of the chunks of clients with so many parameters."""
    head = nn.Linear(numbers, 1, bias=False)
    module = PersonalizedModule(nn.Identity(), head, num_classes=2)
    engine = VectorizedEngine(module, ParameterSplit(module), EngineSettings(**settings))
    return [len(part) for part in engine._cut(torch.arange(clients))]


@pytest.mark.parametrize(
    ("numbers", "clients", "expected"),
    [
        (10, 128, [128]),
        (10, 300, [100, 100, 100]),
        (NUMBERS // 4, 32, [32]),  # 8 MiB of models
        (NUMBERS // 4, 33, [17, 16]),
        (NUMBERS, 40, [14, 14, 12]),
        (4 * NUMBERS, 10, [4, 4, 2]),
        (10, 1, [1]),
        (10, 0, [0]),
    ],
)
def test_chunks_are_equal_and_their_models_fit_the_caches(
    numbers: int, clients: int, expected: list[int]
) -> None:
    assert (MOST_ON_CPU, FEW_ON_CPU, CACHED) == (128, 16, 8 * 2**20)
    assert chunks(numbers, clients) == expected


def test_a_chunk_size_that_was_given_is_taken_as_it_is() -> None:
    assert chunks(10, 7, chunk_size=3) == [3, 3, 1]
