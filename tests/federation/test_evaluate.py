"""Evaluations of parts of the clients become one, in the clients' order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.engine.base import EvaluationWork
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.federation import evaluate
from lightning_pfl.federation.evaluate import join, models_at_a_time
from lightning_pfl.methods import SCAFFOLD, Ditto
from lightning_pfl.methods.base import Method
from lightning_pfl.testing import fit
from lightning_pfl.testing.conformance import small_clients, small_module


@pytest.mark.parametrize("order", [[[1, 2], [0]], [[2, 0], [3, 1]], [[3], [1], [0, 2]]])
def test_each_client_has_its_own_values(order: list[list[int]]) -> None:
    """None of these orders is its own inverse, as that of two equal halves may be."""
    parts = [
        Evaluation(
            {"val_acc": torch.tensor([10.0 * client for client in clients])},
            torch.tensor([client + 5 for client in clients]),
            {},
            [[f"of {client}"] for client in clients],
        )
        for clients in order
    ]
    found = join(parts, [torch.tensor(clients) for clients in order])
    count = sum(map(len, order))
    assert found.values["val_acc"].tolist() == [10.0 * client for client in range(count)]
    assert found.counts.tolist() == [client + 5 for client in range(count)]
    assert found.predictions == [[f"of {client}"] for client in range(count)]


def test_values_that_only_some_log_are_nan_for_the_others() -> None:
    """The first part has clients 1 and 2, the second client 0."""
    parts = [
        Evaluation({"a": torch.tensor([1.0, 2.0])}, torch.tensor([3, 3])),
        Evaluation({"b": torch.tensor([7.0])}, torch.tensor([3])),
    ]
    found = join(parts, [torch.tensor([1, 2]), torch.tensor([0])]).values
    torch.testing.assert_close(found["a"], torch.tensor([torch.nan, 1, 2]), equal_nan=True)
    torch.testing.assert_close(found["b"], torch.tensor([7, torch.nan, torch.nan]), equal_nan=True)


@pytest.mark.parametrize(
    ("size", "models"),
    [(2**10, 2**14), (2**20, 16), (6 * 2**20, 8), (2**24, 4), (2**26, 1), (2**30, 1)],
)
def test_models_that_are_built_at_once(size: int, models: int) -> None:
    """16 MB of small ones; of larger ones 8, or what 64 MB hold; one of any size."""
    architecture: Any = SimpleNamespace(
        client_states=SimpleNamespace(row_nbytes=lambda _: size),
        not_evaluated=(),
        method=SimpleNamespace(evaluation_phases=lambda: ()),
        module=nn.Linear(1, 1),
    )
    assert models_at_a_time(architecture) == models


@pytest.mark.parametrize("method", [SCAFFOLD, Ditto])
def test_a_model_that_all_have_is_evaluated_at_once(
    method: Callable[[], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where states are large: SCAFFOLD's, which no model has a part of, and Ditto's."""
    monkeypatch.setattr(evaluate, "MEMORY", 64)
    monkeypatch.setattr(evaluate, "FEWEST", 1)
    found, data = list[tuple[bool, int]](), small_clients()
    engine_evaluates = SelectedEngine.evaluate

    def evaluated(engine: SelectedEngine, work: EvaluationWork, listener: Any = None) -> Any:
        found.append((work.is_of_one_model, len(work.clients)))
        return engine_evaluates(engine, work, listener)

    monkeypatch.setattr(SelectedEngine, "evaluate", evaluated)
    fit(method(), data, small_module(), 1, val_data=data)
    own = [(False, 1)] * 4 if method is Ditto else []
    assert found == [*own, (True, 4)]
