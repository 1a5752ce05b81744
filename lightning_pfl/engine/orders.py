"""Random orders of clients' samples, drawn for many clients and epochs at once, on any device.

A sample's place in an order is the rank of a hash of its number, so that a client's order depends
on nothing but the seed, the round, the client and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pfl.core.draws import GOLDEN, mix
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.transfer import send
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset

LAST = (1 << 63) - 1
"""A hash that no sample comes behind."""
MOST = 2**15
"""Samples whose orders are drawn at once, where one client trains after another."""


def round_key(seed: int, stream: str, round: int) -> int:
    """Derive the key of all orders of samples in memory in one round."""
    return derive(seed, "orders", stream, round)


def loader_key(seed: int, stream: str, round: int, client: int, epoch: int) -> int:
    """Derive the key that seeds a DataLoader's order of a client's samples in one epoch."""
    return derive(seed, "order", stream, round, client, epoch)


def order_keys(key: int, clients: Tensor, epochs: Tensor) -> Tensor:
    """Derive a key for each order, of the shape to which the clients and epochs broadcast.

    Args:
        key: The key of :func:`round_key`.
        clients: Client ids, int64.
        epochs: Numbers of epochs within a client's round, int64.
    """
    of_client = mix(torch.add(clients, 1).mul_(GOLDEN).add_(key))
    return mix(torch.add(of_client, epochs + 1, alpha=GOLDEN))


def draw_orders(keys: Tensor, samples: Tensor, longest: int) -> Tensor:
    """Draw a random permutation for each key.

    Args:
        keys: Keys of :func:`order_keys`, int64 ``(...)``.
        samples: Length of each permutation, int64, broadcast to the keys' shape.
        longest: The largest of them.

    Returns:
        int64 ``(..., longest)`` on the keys' device, of which the first ``samples`` are the order.
    """
    at = torch.arange(longest, device=keys.device)
    # A bijection of different numbers, so no two samples have the same hash.
    hashes = mix(torch.add(keys.unsqueeze(-1), at + 1, alpha=GOLDEN))
    hashes.masked_fill_(at >= samples.unsqueeze(-1), LAST)
    # Stable: should a sample have the last hash, it still comes before what fills up.
    return hashes.argsort(stable=True, dim=-1)


class CohortOrders:
    """The orders of a cohort whose clients train one after another.

    To draw one takes ten small operators, so those of several clients are drawn at once. Only
    these are kept.

    Args:
        data: The clients' data.
        clients: Client ids, in the order in which they train.
        seed: The run's seed.
        stream: Name of the random stream.
        round: The communication round.
    """

    def __init__(
        self, data: FederatedDataset, clients: Sequence[int], seed: int, stream: str, round: int
    ) -> None:
        self.data = data
        self._stream = seed, stream, round
        self._clients = list(clients)
        self._places = {client: place for place, client in enumerate(self._clients)}
        self._first = self._end = 0
        self._drawn: dict[int, Tensor] = {}

    def key(self, client: int, epoch: int) -> int:
        """Return the key that seeds a DataLoader's epoch."""
        return loader_key(*self._stream, client, epoch)

    def of(self, client: int, epoch: int) -> Tensor:
        """Return the order of a client's samples in an epoch, int64 ``(samples,)``."""
        place = self._places[client]
        if not self._first <= place < self._end:
            self._first, self._end = place, place + self._count(place)
            self._drawn.clear()
        if epoch not in self._drawn:
            self._drawn[epoch] = self._draw(epoch)
        return self._drawn[epoch][place - self._first, : int(self.data.num_samples[client])]

    def _count(self, first: int) -> int:
        """Count the clients from one on whose orders are drawn at once, at least 1."""
        sizes = self.data.num_samples[self._clients[first : first + MOST]]
        drawn = sizes.cummax(0).values * torch.arange(1, len(sizes) + 1)
        # Orders are as long as the longest, of which no more than half is to be in vain.
        few = (drawn <= MOST) & (drawn <= 2 * sizes.cumsum(0))
        return max(1, int(few.long().cumprod(0).sum()))

    def _draw(self, epoch: int) -> Tensor:
        clients = torch.tensor(self._clients[self._first : self._end])
        samples = self.data.num_samples[clients]
        keys = order_keys(round_key(*self._stream), clients, torch.tensor(epoch))
        assert isinstance(self.data, FederatedTensorDataset)
        keys, counts = send(torch.stack([keys, samples]), self.data.device)
        return draw_orders(keys, counts, int(samples.max()))
