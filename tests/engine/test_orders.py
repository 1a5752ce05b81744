"""Random orders of clients' samples."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine import orders
from lightning_pfl.engine.orders import CohortOrders, draw_orders, order_keys, round_key
from tests.orders_by_hand import order_by_hand

SIZES = (5, 0, 8, 1, 40, 7, 6)


def cohort(clients: Any, sizes: Any = SIZES) -> CohortOrders:
    data = FederatedTensorDataset(torch.arange(sum(sizes)), torch.arange(sum(sizes)).split(sizes))
    return CohortOrders(data, clients, seed=3, stream="local", round=2)


def by_hand(client: int, epoch: int, sizes: Any = SIZES) -> Tensor:
    return order_by_hand(sizes[client], client, epoch, seed=3, round=2)


@pytest.mark.parametrize("epoch", [0, 4])
def test_orders_are_the_documented_ones_whatever_the_cohort(epoch: int) -> None:
    for clients in (range(7), [4], [6, 0, 2], [2, 4, 2]):
        drawn = cohort(clients)
        for client in clients:
            assert torch.equal(drawn.of(client, epoch), by_hand(client, epoch))


def test_clients_may_be_asked_for_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also again, and where few are drawn at once."""
    monkeypatch.setattr(orders, "MOST", 16)
    drawn = cohort(range(7))
    for client, epoch in [(6, 0), (0, 1), (0, 0), (4, 2), (2, 0), (0, 1), (1, 3)]:
        assert torch.equal(drawn.of(client, epoch), by_hand(client, epoch))


def test_orders_are_drawn_for_several_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit, of which half are somebody's samples."""
    drawn: list[tuple[int, ...]] = []

    def counted(keys: Tensor, samples: Tensor, longest: int) -> Tensor:
        drawn.append(tuple(samples.tolist()))
        return draw_orders(keys, samples, longest)

    monkeypatch.setattr(orders, "draw_orders", counted)
    monkeypatch.setattr(orders, "MOST", 20)
    sizes = (5, 5, 5, 5, 5, 1, 1, 9, 2, 1, 30, 1)
    some = cohort(range(len(sizes)), sizes)
    for client in range(len(sizes)):
        some.of(client, 0)
    # 4 of 5; then 5, 1 and 1 are 15, of which 7 are real; 1 and 9 are 18, of which 10; 30 is alone.
    assert drawn == [(5, 5, 5, 5), (5, 1), (1, 9), (2, 1), (30,), (1,)]


def test_all_permutations_are_as_likely() -> None:
    """Chi-squared of 24 orders of four samples; 23 degrees of freedom exceed 49.7 in 0.1 %."""
    draws = 24_000
    keys = order_keys(
        round_key(0, "local", 0), torch.arange(draws // 10)[:, None], torch.arange(10)
    )
    rows = draw_orders(keys, torch.tensor(4), 4).flatten(0, 1)
    found = Counter(map(tuple, rows.tolist()))
    assert set(found) == set(permutations(range(4)))
    expected = draws / 24
    assert sum((count - expected) ** 2 / expected for count in found.values()) < 49.7


def test_a_sample_with_the_last_hash_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two to the power of 64: it shares its hash with what fills a row up."""
    monkeypatch.setattr(orders, "mix", lambda x: torch.full_like(x, orders.LAST))
    order = draw_orders(torch.tensor([0, 0]), torch.tensor([3, 5]), 5)
    assert order[0, :3].tolist() == [0, 1, 2]
    assert order[1].tolist() == list(range(5))


def test_orders_differ_between_clients_epochs_rounds_and_streams() -> None:
    keys = torch.cat(
        [
            order_keys(round_key(seed, stream, round), torch.arange(9)[:, None], torch.arange(9))
            for seed in (0, 1)
            for stream in ("local", "tune")
            for round in range(3)
        ]
    )
    assert len(keys.unique()) == keys.numel() == 12 * 81
