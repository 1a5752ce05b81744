"""Evaluations of parts of the clients become one, in the clients' order."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.federation.evaluate import join


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
