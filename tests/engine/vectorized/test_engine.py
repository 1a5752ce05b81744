"""How a cohort is cut into programs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.program import NotVectorizableError
from lightning_pfl.engine.vectorized.engine import CACHED, FEW_ON_CPU, MOST_ON_CPU, VectorizedEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import local_round

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


class Known(PersonalizedModule):
    """Linear, so that its code is known."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), nn.Linear(2, 2), num_classes=2)


def trained(where: str, draw: Any) -> Any:
    """Train in a round with a function of the data's, of which the module knows nothing."""

    def function(batch: Any) -> Any:
        draw()
        return batch

    fields = torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)
    functions: dict[str, Any] = {where: function} if where else {}
    data = FederatedTensorDataset(fields, torch.arange(8).split(4), batch_size=4, **functions)
    torch.manual_seed(0)
    found = local_round(FedAvg(), Known(), data, engine="vectorized")
    assert found.engine.checks.known
    return found


@pytest.mark.parametrize("where", ["transform", "augment"])
@pytest.mark.parametrize("draw", [np.random.rand, random.random])
def test_what_data_draw_from_other_generators_is_refused_also_where_steps_are_known(
    where: str, draw: Any
) -> None:
    with pytest.raises(NotVectorizableError, match="draws from Python's or NumPy's"):
        trained(where, draw)


def test_known_steps_leave_all_generators_as_they_are() -> None:
    def states() -> Any:
        numpys: Any = np.random.get_state()
        return random.getstate(), numpys[1].tolist(), torch.get_rng_state().tolist()

    trained("", None)
    torch.manual_seed(0)
    Known()
    before = states()
    trained("", None)
    assert states() == before
