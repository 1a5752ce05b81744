"""Minibatches gathered from tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.randomness import permutation
from lightning_pfl.data.batch import map_batch
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.steps import (
    Budget,
    Limits,
    epoch_minibatches,
    epochs_used,
    step_bounds,
    step_size,
)
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick, active_rows, tick_rows


class ResidentBatches:
    """Minibatches of a chunk gathered from tensors on the device.

    Args:
        data: The federated dataset.
        clients: Client ids of the chunk, in the chunk's order.
        budget: Length of the phase.
        limits: Accumulation and limits.
        key: From (client id, epoch) to the key of its order; None never shuffles (evaluation).
        pad: Whether minibatches of different sizes may share a padded batch with a mask; otherwise
            they form groups.
        first_epochs: Number of the phase's first epoch within the client's round, for ``key``; None
            for 0.
        batch_size: Samples per minibatch; None for the dataset's.
    """

    def __init__(
        self,
        data: FederatedTensorDataset,
        clients: Sequence[int],
        budget: Budget,
        limits: Limits,
        key: Callable[[int, int], int] | None,
        pad: bool = False,
        first_epochs: Sequence[int] | None = None,
        batch_size: int | None = None,
    ) -> None:
        first_epochs = first_epochs or [0] * len(clients)
        self.data, self.pad, self.clients = data, pad, list(clients)
        key = key if data.shuffle and not limits.overfit and not budget.full_batch else None
        samples = [int(data.num_samples[client]) for client in clients]
        self.batch_size = max(1, *samples) if budget.full_batch else batch_size or data.batch_size
        drop_last = False if budget.full_batch else data.drop_last
        per_epoch = [
            limits.of_epoch(epoch_minibatches(n, self.batch_size, drop_last)) for n in samples
        ]
        self.bounds = [
            step_bounds(n, budget.of(data.names[client]), limits.accumulate)
            for n, client in zip(per_epoch, clients, strict=True)
        ]
        self.step_size = step_size(budget, limits)
        self.steps = torch.tensor([len(b) for b in self.bounds])
        self._counts = self.steps.tolist()
        self._longest_first = self._counts == sorted(self._counts, reverse=True)
        total = max((b[-1][1] for b in self.bounds if b), default=0)
        # Positions within each client's samples, which also index the feature cache; -1 pads.
        longest = max(samples, default=0)
        # A batch size beyond every client's data means full batches, without padding to it.
        width = max(min(self.batch_size, longest), 1)
        local = torch.full((len(clients), total, width), -1)
        for row, client in enumerate(clients):
            used = self.bounds[row][-1][1] if self.bounds[row] else 0
            for epoch in range(-(-used // per_epoch[row]) if used else 0):
                self._fill(
                    local[row],
                    samples[row],
                    per_epoch[row],
                    epoch,
                    used,
                    key(client, first_epochs[row] + epoch) if key is not None else None,
                )
        sizes = (local >= 0).sum(2)
        self.sizes = sizes
        self._full = bool((sizes == width).all())
        device = data.device
        owned = data.positions_of(torch.tensor(self.clients, dtype=torch.int64))
        # By number first, so that those of some clients lie together.
        self._sizes_at = [] if self._full else sizes.T.tolist()
        self._mask = None if self._full else (local >= 0).to(device)
        self.local = local.clamp_min(0).to(device)
        flat = self.local.flatten(1)
        self.positions = owned.gather(1, flat).view_as(self.local)
        self.features: Tensor | None = None
        self._targets: Any = None
        self._aligned = self._full and all(b == self.bounds[0] for b in self.bounds)
        self.epochs_used = epochs_used(self.bounds, per_epoch)

    def _fill(
        self, out: Tensor, samples: int, per_epoch: int, epoch: int, used: int, key: int | None
    ) -> None:
        order = torch.arange(samples) if key is None else permutation(samples, key)
        minibatches = min(per_epoch, used - epoch * per_epoch)
        taken = order[: minibatches * self.batch_size]
        out[epoch * per_epoch : epoch * per_epoch + minibatches].view(-1)[: len(taken)] = taken

    def cache(self, features: Tensor, targets: Any = None) -> None:
        """Add cached features to every batch.

        Args:
            features: ``(clients, longest, ...)`` in the order of each client's samples.
            targets: The rest of the batch in the same order, if a step needs nothing else; the
                samples are then no longer gathered.
        """
        self.features, self._targets = features.flatten(0, 1), targets
        first = torch.arange(len(features), device=features.device) * features.shape[1]
        self._feature_rows = self.local + first.view(-1, 1, 1)

    @property
    def in_one(self) -> bool:
        """Whether the clients of every step form one tick for certain."""
        return self._aligned or (self.pad and self.step_size == 1)

    def at(self, step: int) -> Iterator[Tick]:
        """Iterate over the ticks of one step number."""
        number = step * self.step_size
        if self._aligned:
            yield self._aligned_tick(len(self.steps), range(*self.bounds[0][step]), number)
            return
        active = self._active(step)
        first = self.bounds[active[0]][step]
        # The chunk is sorted by its steps on training data, longest first.
        leading = isinstance(active, range) and (self._full or self.pad)
        if leading and all(self.bounds[row][step] == first for row in active):
            yield self._aligned_tick(len(active), range(*first), number)
            return
        groups: dict[Any, list[int]] = {}
        for row in active:
            begin, end = self.bounds[row][step]
            sizes = tuple(self.sizes[row, begin:end].tolist())
            groups.setdefault(len(sizes) if self.pad else sizes, []).append(row)
        for signature, members in groups.items():
            count = signature if isinstance(signature, int) else len(signature)
            yield self._tick(
                torch.tensor(members),
                [self.bounds[r][step][0] for r in members],
                count,
                number,
            )

    def _active(self, step: int) -> Sequence[int]:
        if not self._longest_first:
            return active_rows(self.steps, step)
        return range(sum(count > step for count in self._counts))

    def _aligned_tick(self, active: int, places: range, number: int) -> Tick:
        """Make a tick of minibatches at equal positions of the first ``active`` clients."""
        minibatches = []
        for offset, place in enumerate(places):
            width, equal = self.local.shape[2], True
            if not self._full:
                counts = self._sizes_at[place][:active]
                width = max(counts)
                equal = min(counts) == width
            features, data = self._cached(slice(0, active), place, width)
            gather = partial(self.data.gather, self.positions[:active, place, :width])
            data, later = (gather(), None) if data is None else (data, gather)
            mask = None if equal else self._real(slice(0, active), place, width)
            # In memory of their own, as recordings depend on strides.
            sizes = self.sizes[:active, place].clone()
            size = width if equal else None
            minibatches.append(Minibatch(data, sizes, mask, features, number + offset, size, later))
        return Tick(None if active == len(self.steps) else slice(0, active), minibatches)

    def _real(self, rows: Any, numbers: Any, width: int) -> Tensor | None:
        """Return the mask of real samples of some minibatches."""
        if self._mask is None:
            return None
        mask = self._mask[rows, numbers][:, :width]
        # Contiguous also where nothing is converted.
        return mask.to(torch.get_default_dtype(), memory_format=torch.contiguous_format)

    def _cached(self, rows: slice | Tensor, numbers: Any, width: int) -> tuple[Tensor | None, Any]:
        """Select features, and the rest of the batch if its samples aren't needed."""
        if self.features is None:
            return None, None
        at = self._feature_rows[rows, numbers][:, :width]
        flat = at.flatten()

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, flat).view(*at.shape, *leaf.shape[1:])

        features = pick(self.features)
        if self._targets is None:
            return features, None
        return features, (features, *map_batch(self._targets, pick))

    def _tick(self, rows: Tensor, starts: list[int], count: int, number: int) -> Tick:
        minibatches = []
        device = self.positions.device
        index = rows.to(device)
        for offset in range(count):
            numbers = torch.tensor([start + offset for start in starts])
            sizes = self.sizes[rows, numbers]
            width = int(sizes.max())
            at = (index, numbers.to(device))
            positions = self.positions[at][:, :width]
            ragged = self.pad and bool((sizes != width).any())
            features, data = self._cached(*at, width)
            gather = partial(self.data.gather, positions)
            data, later = (gather(), None) if data is None else (data, gather)
            mask = self._real(*at, width) if ragged else None
            minibatches.append(
                Minibatch(data, sizes, mask, features, number + offset, gather=later)
            )
        return Tick(tick_rows(rows, len(self.steps), device), minibatches)
