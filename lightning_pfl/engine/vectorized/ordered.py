"""Minibatches of an evaluation, gathered from tensors on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.steps import Limits, epoch_minibatches
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick, tick_rows


class OrderedBatches:
    """One pass over the samples of a chunk's clients, in their order.

    An evaluation has many chunks of small clients, so that none of it runs client by client.

    Args:
        data: The federated dataset.
        clients: Client ids of the chunk, int64 ``(clients,)``, in the chunk's order.
        limits: Limits on minibatches.
        pad: Whether minibatches of different sizes share a padded batch with a mask; otherwise they
            form groups.
        batch_size: Samples per minibatch.

    Attributes:
        steps: Minibatches of each client, int64 ``(clients,)``.
    """

    def __init__(
        self,
        data: FederatedTensorDataset,
        clients: Tensor,
        limits: Limits,
        pad: bool,
        batch_size: int,
    ) -> None:
        self.data, self.pad, self.batch_size = data, pad, batch_size
        self.samples, which = data.num_samples[clients].unique(return_inverse=True)
        found = [
            limits.of_epoch(epoch_minibatches(count, batch_size, data.drop_last))
            for count in self.samples.tolist()
        ]
        self.steps = torch.tensor(found, dtype=torch.int64)[which]
        self.samples = self.samples[which]
        self.positions = data.positions_of(clients)

    def at(self, number: int) -> Iterator[Tick]:
        """Iterate over the minibatches of one number."""
        begin = number * self.batch_size
        sizes = (self.samples - begin).clamp(0, self.batch_size).where(self.steps > number, 0)
        for group in [sizes > 0] if self.pad else [sizes == size for size in sizes.unique()]:
            rows = group.nonzero().flatten()
            here = sizes[rows]
            width = int(here.max()) if len(rows) else 0
            if not width:
                continue
            place = tick_rows(rows, len(sizes), self.data.device)
            mine = self.positions if place is None else self.positions[place]
            mask = None
            if (here != width).any():
                real = torch.arange(width) < here.unsqueeze(1)
                mask = send(real, self.data.device, torch.get_default_dtype())
            samples = self.data.gather(mine[:, begin : begin + width])
            yield Tick(place, [Minibatch(samples, here, mask, number=number)])
