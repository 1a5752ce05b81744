"""Counting and cutting: minibatches, steps, and the documented order of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pfl.data.datasets import DropLast, FederatedTensorDataset
from lightning_pfl.engine.orders import loader_key, round_key
from lightning_pfl.engine.steps import (
    Budget,
    Limits,
    NumberReadError,
    Unread,
    count_steps,
    epoch_minibatches,
    step_bounds,
)
from lightning_pfl.engine.vectorized.resident import ResidentBatches
from tests.orders_by_hand import order_by_hand

SIZES = (9, 4, 1, 0)
KEY = round_key(0, "local", 3)


@pytest.mark.parametrize(("samples", "size"), list(product(range(7), (1, 2, 3, 10))))
def test_minibatches_of_an_epoch(samples: int, size: int) -> None:
    cut = [list(range(samples))[at : at + size] for at in range(0, samples, size)]
    assert epoch_minibatches(samples, size, drop_last=False) == len(cut)
    assert epoch_minibatches(samples, size, drop_last=True) == sum(len(b) == size for b in cut)
    if size > 1:  # else the datasets refuse it
        assert epoch_minibatches(samples, size, drop_last="single") == sum(len(b) > 1 for b in cut)


@pytest.mark.parametrize(
    ("minibatches", "accumulate", "epochs"), list(product(range(6), (1, 2, 3), (0, 1, 2)))
)
def test_steps_of_epochs(minibatches: int, accumulate: int, epochs: int) -> None:
    """As Lightning does: groups of minibatches, of which an epoch's last may be incomplete."""
    expected = []
    for epoch in range(epochs):
        numbers = list(range(epoch * minibatches, (epoch + 1) * minibatches))
        groups = [numbers[at : at + accumulate] for at in range(0, minibatches, accumulate)]
        expected += [(group[0], group[-1] + 1) for group in groups]
    budget = Budget(epochs, None)
    assert step_bounds(minibatches, budget, accumulate) == expected
    assert count_steps(minibatches, budget, accumulate) == len(expected)


def test_steps_cycle_through_the_epochs() -> None:
    assert step_bounds(3, Budget(None, 4), 2) == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert step_bounds(0, Budget(None, 4), 1) == []


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), 10),
        (Limits(batches=3), 3),
        (Limits(batches=30), 10),
        (Limits(batches=0.25), 2),
        (Limits(batches=1), 1),
        (Limits(batches=0), 0),
        (Limits(overfit=2), 2),
        (Limits(overfit=0.5, batches=3), 5),
    ],
)
def test_limits(limits: Limits, expected: int) -> None:
    assert limits.of_epoch(10) == expected


def test_the_key_of_a_loaders_epoch_is_documented() -> None:
    digest = hashlib.blake2b(b"5/order/local/2/7/1", digest_size=8).digest()
    assert loader_key(5, "local", 2, 7, 1) == int.from_bytes(digest, "little") >> 1


def make(
    pad: bool,
    budget: Budget,
    limits: Limits,
    drop_last: DropLast,
    shuffle: bool = True,
    batch_size: int = 4,
) -> ResidentBatches:
    total = sum(SIZES)
    positions = torch.arange(total).split(SIZES)
    data = FederatedTensorDataset(
        torch.arange(total), positions, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last
    )
    return ResidentBatches(data, range(4), budget, limits, KEY, pad)


def by_hand(client: int, minibatches: int, drop_last: DropLast) -> list[list[int]]:
    """The documented order: epoch by epoch a permutation of the client's samples, cut in fours."""
    first, size, epoch = sum(SIZES[:client]), SIZES[client], 0
    least = {False: 1, True: 4, "single": 2}[drop_last]
    found: list[list[int]] = []
    while len(found) < minibatches:
        order = order_by_hand(size, client, epoch, round=3)
        cut = [(first + some).tolist() for some in order.split(4)]
        found += [some for some in cut if len(some) >= least]
        epoch += 1
    return found[:minibatches]


def collect(batches: ResidentBatches) -> list[list[list[int]]]:
    """Every client's minibatches in the order in which its steps see them."""
    seen: list[list[list[int]]] = [[] for _ in SIZES]
    for step in range(int(batches.steps.max())):
        clients: list[int] = []
        for tick in batches.at(step):
            everyone = torch.arange(len(SIZES))
            rows = everyone if tick.rows is None else everyone[tick.rows]
            clients += rows.tolist()
            for minibatch in tick.minibatches:
                for row, client in enumerate(rows.tolist()):
                    real: Tensor = minibatch.data[row]
                    if minibatch.mask is not None:
                        real = real[minibatch.mask[row] > 0]
                    # Filled up with samples of its own, as others might not be finite.
                    assert set(minibatch.data[row].tolist()) == set(real.tolist())
                    assert len(real) == minibatch.sizes[row]
                    seen[client].append(real.tolist())
        assert len(clients) == len(set(clients))
        assert set(clients) == {c for c in range(4) if batches.steps[c] > step}
    return seen


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("drop_last", [True, False, "single"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("budget", [Budget(1, None), Budget(3, None), Budget(None, 5)])
def test_clients_see_their_samples_in_the_documented_order(
    pad: bool, drop_last: DropLast, accumulate: int, budget: Budget
) -> None:
    batches = make(pad, budget, Limits(accumulate), drop_last)
    for client, seen in enumerate(collect(batches)):
        per_epoch = epoch_minibatches(SIZES[client], 4, drop_last)
        bounds = step_bounds(per_epoch, budget, accumulate)
        assert int(batches.steps[client]) == len(bounds)
        assert seen == by_hand(client, bounds[-1][1] if bounds else 0, drop_last)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("sizes", [(20, 16, 13, 9, 12, 5, 7, 0), (0, 5, 20, 7, 12, 9, 16, 13)])
def test_clients_that_are_done_go_along(sizes: tuple[int, ...], drop_last: bool) -> None:
    """Up to the last client that steps, rounded up to 1, 2, 3, 4, 6 or 8."""
    positions = torch.arange(sum(sizes)).split(sizes)
    data = FederatedTensorDataset(
        torch.arange(sum(sizes)), positions, batch_size=4, drop_last=drop_last
    )
    batches = ResidentBatches(data, range(8), Budget(1, None), Limits(), KEY, pad=True)
    steps = [epoch_minibatches(size, 4, drop_last) for size in sizes]
    longest = steps.index(max(steps))

    def samples(client: int, step: int) -> list[int]:
        found: list[int] = positions[client][4 * step : 4 * step + 4].tolist()
        return found

    left: list[int] = []
    for step in range(max(steps)):
        (tick,) = batches.at(step, along=True)
        active = [client for client in range(8) if steps[client] > step]
        going = next(n for n in (1, 2, 3, 4, 6, 8) if n > active[-1])
        assert tick.rows == (None if going == 8 else slice(0, going))
        (minibatch,) = tick.minibatches
        assert tick.counted is not None
        left += [] if tick.leaving is None else tick.leaving.tolist()
        # What clients were after their last step is read before they go along.
        assert {client for client in range(going) if client not in active} <= set(left)
        assert all(steps[client] <= step for client in left)
        for client in range(going):
            expected = samples(client if client in active else longest, step)
            mask = minibatch.mask
            real = (
                minibatch.data[client] if mask is None else minibatch.data[client][mask[client] > 0]
            )
            assert real.tolist() == expected
            assert int(minibatch.sizes[client]) == len(expected)
            counted = len(expected) if client in active else 0
            assert int(tick.counted[client]) == counted
        assert (minibatch.mask is None) == drop_last
        assert minibatch.size == (4 if drop_last else None)
        assert minibatch.width == 4
    assert len(left) == len(set(left))


@pytest.mark.parametrize(
    ("sizes", "widths", "masks"),
    [
        # Equal clients: their last minibatch is as small as it is.
        ((9, 9, 9), [4, 4, 1], [False] * 3),
        # 11 and 10 samples in 3 minibatches, of at most 4, 4 and 3: 12 are less than 1.25 times 11.
        ((11, 10, 10), [4, 4, 4], [True] * 3),
        # 4 and 1 to 2: twice 4 would be 8 samples instead of 6.
        ((6, 5, 5), [4, 2], [True] * 2),
    ],
)
def test_widths_of_minibatches(
    sizes: tuple[int, ...], widths: list[int], masks: list[bool]
) -> None:
    data = FederatedTensorDataset(
        torch.arange(sum(sizes)), torch.arange(sum(sizes)).split(sizes), batch_size=4
    )
    batches = ResidentBatches(data, range(3), Budget(1, None), Limits(), KEY, pad=True)
    for along in (True, False):
        found = [next(batches.at(step, along)).minibatches[0] for step in range(len(widths))]
        assert [one.width for one in found] == widths
        assert [one.mask is not None for one in found] == masks


def test_without_shuffling_and_when_overfitting_samples_come_in_order() -> None:
    for batches in (
        make(False, Budget(1, None), Limits(), False, shuffle=False),
        make(False, Budget(1, None), Limits(overfit=1.0), False),
    ):
        flat = [[s for some in seen for s in some] for seen in collect(batches)]
        assert sum(flat, []) == list(range(sum(SIZES)))  # noqa: RUF017


def test_full_batches_cost_the_memory_of_the_data() -> None:
    batches = make(False, Budget(1, None), Limits(), False, batch_size=10**9)
    assert batches.local.numel() <= 4 * max(SIZES)
    assert [sorted(sum(seen, [])) for seen in collect(batches)][0] == list(range(9))  # noqa: RUF015, RUF017


@pytest.mark.parametrize(
    "read",
    [
        lambda number: number % 100 == 0,
        lambda number: 1 + number,
        lambda number: number < 3,
        lambda number: number <= 3,
        lambda number: -number,
        lambda number: number or 2,
        lambda number: {number: 1},
        lambda number: f"{number}",
        lambda number: f"{number:03d}",
        lambda number: float(number),
        lambda number: [1, 2, 3][number],
        lambda number: divmod(7, number),
        lambda number: 2.0**number,
        lambda number: torch.ones(3) * number,
        lambda number: number in (1, 2),
        lambda number: range(number),
        lambda number: round(number),
    ],
)
def test_a_number_that_is_not_to_be_read(read: Callable[[Any], Any]) -> None:
    number = Unread()
    assert isinstance(number, int)
    with pytest.raises(NumberReadError, match="reads the number of a minibatch"):
        read(number)
