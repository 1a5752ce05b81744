"""Clients are dealt to processes so that each has about as much to do."""

from __future__ import annotations

import pytest
import torch

from lightning_pfl.federation.dealing import deal, deal_evenly


class TestDeal:
    def test_equal_clients_are_dealt_evenly(self) -> None:
        owners = deal([2.0] * 10, 3)
        assert sorted(owners.count(rank) for rank in range(3)) == [3, 3, 4]

    def test_the_largest_clients_come_first(self) -> None:
        # 6 | 5 | then 4 to the second, 3 to the first, 2 to both's 9: 9 + 2 and 9.
        assert deal([4.0, 2.0, 6.0, 3.0, 5.0], 2) == [1, 0, 0, 0, 1]

    def test_as_few_states_move_as_need_to(self) -> None:
        assert deal([1.0] * 10, 2, homes=[0] * 7 + [1] * 3) == [0] * 5 + [1] * 5
        even = [0, 1, 1, 0]
        assert deal([1.0, 1.0, 1.0, 1.0], 2, homes=even) == even

    def test_a_little_more_to_do_moves_no_state(self) -> None:
        costs, homes = [52.0, 48.0], [0, 1]
        assert deal(costs, 2, homes) == homes
        assert deal([30.0, 30.0, 30.0, 31.0], 2, [0, 0, 1, 1]) == [0, 0, 1, 1]

    def test_clients_without_work_are_dealt_evenly_too(self) -> None:
        assert sorted(deal([0.0] * 4, 2)) == [0, 0, 1, 1]
        assert deal([], 2) == []


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_owned_clients_and_samples_are_about_as_many(size: int, count: int) -> None:
    sizes = torch.distributions.LogNormal(4.0, 0.8)
    torch.manual_seed(count)
    samples = sizes.sample((count,)).long()
    owners = deal_evenly(samples, size)
    clients = torch.bincount(owners, minlength=size)
    held = torch.bincount(owners, samples.double(), minlength=size)
    assert clients.max() - clients.min() <= 1
    # Neighbours in the order differ by at most the largest client all together.
    assert held.max() - held.min() <= samples.max()
