"""Minibatches gathered from tensors on the device.

A recorded step is of one shape, so clients of unequal sizes have to get along with few shapes.
Where clients have different numbers of samples, all minibatches are padded to one width, under a
mask. As clients finish, the number of those that step is rounded up (:func:`rounded_up`): some that
are done go along for a while, on minibatches of the client with the most steps, and what becomes of
them doesn't count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send
from lightning_pfl.data.batch import map_batch
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.orders import draw_orders, order_keys
from lightning_pfl.engine.steps import (
    Budget,
    Limits,
    epoch_minibatches,
    epochs_used,
    step_bounds,
    step_size,
)
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick, rounded_up, tick_rows

WASTE = 1.25
"""Minibatches of unequal clients have one width if that makes at most so many times the samples."""


class ResidentBatches:
    """Minibatches of a chunk gathered from tensors on the device.

    Args:
        data: The federated dataset.
        clients: Client ids of the chunk, in the chunk's order.
        budget: Length of the phase.
        limits: Accumulation and limits.
        key: The key of the round's orders, of :func:`~lightning_pfl.engine.orders.round_key`; None
            never shuffles.
        pad: Whether minibatches of different sizes may share a padded batch with a mask; otherwise
            they form groups.
        first_epochs: Number of the phase's first epoch within the client's round, for ``key``; None
            for 0.

    Attributes:
        in_one: Whether the clients of every step form one tick.
    """

    def __init__(
        self,
        data: FederatedTensorDataset,
        clients: Sequence[int],
        budget: Budget,
        limits: Limits,
        key: int | None,
        pad: bool = False,
        first_epochs: Sequence[int] | None = None,
    ) -> None:
        first_epochs = first_epochs or [0] * len(clients)
        self.data, self.pad, self.clients = data, pad, list(clients)
        key = key if data.shuffle and not limits.overfit and not budget.full_batch else None
        samples = [int(data.num_samples[client]) for client in clients]
        self.batch_size = max(1, *samples) if budget.full_batch else data.batch_size
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
        self.epochs_used = epochs_used(self.bounds, per_epoch)
        # A batch size beyond every client's data means full batches, without padding to it.
        width = max(min(self.batch_size, max(samples, default=0)), 1)
        self.sizes, self.local, real = self._cut_orders(
            torch.tensor(samples), torch.tensor(per_epoch), width, key, torch.tensor(first_epochs)
        )
        self._counted = self.sizes
        owned = data.positions_of(torch.tensor(self.clients, dtype=torch.int64))
        self.positions = owned.gather(1, self.local.flatten(1)).view_as(self.local)
        self.features: Tensor | None = None
        self._targets: Any = None
        complete = bool(((self.sizes == width) | (self.sizes == 0)).all())
        alike = bool((self.sizes == self.sizes[:1]).all())
        aligned = alike and all(b == self.bounds[0] for b in self.bounds)
        self.in_one = aligned or (self.step_size == 1 and (pad or complete))
        self._real = None if complete or aligned else real
        self._longest = int(self.steps.argmax()) if len(clients) else 0
        self._slots, self._widths = (
            [len(clients)] * self.sizes.shape[1],
            self.sizes[self._longest].tolist(),
        )
        self._gone: Tensor | None = None
        self._leaving: dict[int, Tensor] = {}
        if self.in_one and not aligned:
            self._go_along(width)

    def _cut_orders(
        self,
        samples: Tensor,
        per_epoch: Tensor,
        width: int,
        key: int | None,
        first_epochs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the orders of all clients and epochs, and cut them into minibatches.

        Args:
            samples: Samples of each client.
            per_epoch: Minibatches of each client in an epoch.
            width: Samples of a complete minibatch.
            key: The key of the round's orders; None for samples as they come.
            first_epochs: Number of each client's first epoch.

        Returns:
            sizes: Samples of each minibatch, int64 ``(clients, minibatches)`` on the CPU.
            local: Their positions within the client's, which also index cached features, int64
                ``(clients, minibatches, width)`` on the device. A minibatch is filled up with its
                first sample, as another one might not be finite.
            real: Which of them don't fill up, bool.
        """
        longest = int(samples.max()) if len(samples) else 0
        used = torch.tensor([bounds[-1][1] if bounds else 0 for bounds in self.bounds])
        number = torch.arange(int(used.max()) if len(used) else 0)
        here = number < used.unsqueeze(1)
        per_epoch = per_epoch.clamp_min(1).unsqueeze(1)
        first = number % per_epoch * self.batch_size * here
        sizes = (samples.unsqueeze(1) - first).clamp(0, width) * here
        keys = first[:, :0]
        if key is not None:
            first += number // per_epoch * longest * here
            epochs = first_epochs.unsqueeze(1) + torch.arange(max(self.epochs_used, default=0))
            keys = order_keys(key, torch.tensor(self.clients).unsqueeze(1), epochs)
        # One transfer, whatever the clients and epochs.
        parts = [samples.unsqueeze(1), keys, first, sizes]
        there = send(torch.cat(parts, 1), self.data.device)
        counts, keys, first, counted = there.split([part.shape[1] for part in parts], 1)
        within = torch.arange(width, device=self.data.device)
        real = within < counted.unsqueeze(2)
        local = first.unsqueeze(2) + within * real
        if key is not None:
            orders = draw_orders(keys, counts, longest).flatten(1)
            local = orders.gather(1, local.flatten(1)).view_as(local)
        return sizes, local, real

    def cache(self, features: Tensor, targets: Any = None) -> None:
        """Add cached features to every batch.

        Args:
            features: ``(clients, longest, ...)`` in the order of each client's samples.
            targets: The rest of the batch in the same order, if a step needs nothing else; the
                samples are then no longer gathered.
        """
        self.features, self._targets = features.flatten(0, 1), targets
        first = torch.arange(len(features), device=features.device) * features.shape[1]
        self._feature_rows = self._filled(self.local + first.view(-1, 1, 1))
        if self.in_one:
            self._features_at = self._cut(self._feature_rows)

    def _go_along(self, width: int) -> None:
        """Let clients that are done go along, and choose the shapes of all steps.

        Args:
            width: Samples of a complete minibatch.
        """
        gone = self.sizes == 0
        last = (~gone).T * torch.arange(1, len(gone) + 1)
        self._slots = [min(rounded_up(n), len(gone)) for n in last.amax(1).tolist()]
        widths, slots = self.sizes.amax(0), torch.tensor(self._slots)
        one = int(slots.sum()) * width <= WASTE * int((slots * widths).sum())
        self._widths = [width] * len(widths) if one else widths.tolist()
        leaving: dict[int, list[int]] = {}
        for row, step in enumerate(self.steps.tolist()):
            if step < len(self._slots) and row < self._slots[step]:
                leaving.setdefault(step, []).append(row)
        device = self.positions.device
        rows = send(torch.tensor([row for some in leaving.values() for row in some]), device)
        self._leaving = dict(zip(leaving, rows.split([*map(len, leaving.values())]), strict=True))
        self._gone = send(gone, device)
        self.sizes = torch.where(gone, self.sizes[self._longest], self.sizes)
        self.positions = self._filled(self.positions)
        if self._real is not None:
            self._real = self._filled(self._real)

    def _filled(self, each: Tensor) -> Tensor:
        """Give clients that are done the minibatches of the longest, ``(clients, number, ...)``."""
        if self._gone is None:
            return each
        return torch.where(self._gone.unsqueeze(2), each[self._longest], each)

    def _cut(self, each: Tensor) -> list[Tensor]:
        """Cut ``(clients, number, ...)`` by number, each for the first clients, in one piece."""
        pieces = [(slots, len(list(group))) for slots, group in groupby(self._slots)]
        # Few operators, as there may be thousands of numbers.
        parts = each.transpose(0, 1).contiguous().split([length for _, length in pieces])
        cut = zip(pieces, parts, strict=True)
        return [one for (slots, _), part in cut for one in part[:, :slots].unbind()]

    @cached_property
    def _positions_at(self) -> list[Tensor]:
        return self._cut(self.positions)

    @cached_property
    def _masks_at(self) -> list[Tensor] | None:
        if self._real is None:
            return None
        return self._cut(self._real.to(torch.get_default_dtype()))

    @cached_property
    def _sizes_at(self) -> list[Tensor]:
        return self._cut(self.sizes)

    @cached_property
    def _counted_at(self) -> list[Tensor]:
        return self._cut(self._counted)

    def at(self, step: int, along: bool = False) -> Iterator[Tick]:
        """Iterate over the ticks of one step number.

        Args:
            step: The number.
            along: Whether clients that are done go along, where ticks have all clients.
        """
        active = (self.steps > step).nonzero().flatten()
        if self.in_one:
            yield self._together(step, None if along else active)
            return
        groups: dict[Any, list[int]] = {}
        for row in active.tolist():
            begin, end = self.bounds[row][step]
            sizes = tuple(self.sizes[row, begin:end].tolist())
            groups.setdefault(len(sizes) if self.pad else sizes, []).append(row)
        for signature, members in groups.items():
            count = signature if isinstance(signature, int) else len(signature)
            yield self._tick(
                torch.tensor(members),
                [self.bounds[r][step][0] for r in members],
                count,
                step * self.step_size,
            )

    def _together(self, step: int, active: Tensor | None) -> Tick:
        """Make the tick of all clients of a step; None: with those that go along."""
        begin, end = self.bounds[self._longest][step]
        first, slots, clients = step * self.step_size, self._slots[step], len(self.steps)
        if active is not None:
            some = None if len(active) == slots else active
            minibatches = [self._minibatch(n, first + n - begin, some) for n in range(begin, end)]
            return Tick(tick_rows(active, clients, self.positions.device), minibatches)
        minibatches = [self._minibatch(n, first + n - begin) for n in range(begin, end)]
        rows = None if slots == clients else slice(0, slots)
        counted = None if self._gone is None else self._counted_at[begin]
        return Tick(rows, minibatches, counted, self._leaving.get(step))

    def _minibatch(self, place: int, number: int, some: Tensor | None = None) -> Minibatch:
        """Make a minibatch of the first clients, or of some of them, at a place in their orders."""
        width = self._widths[place]

        def of(each: list[Tensor]) -> Tensor:
            one = each[place] if some is None else each[place][send(some, each[place].device)]
            return one if one.ndim == 1 or one.shape[1] == width else one[:, :width].contiguous()

        def gather() -> Any:
            return self.data.gather(of(self._positions_at))

        features, data = None, None
        if self.features is not None:
            features, data = self._cached(of(self._features_at))
        data, later = (gather(), None) if data is None else (data, gather)
        mask = None if self._masks_at is None else of(self._masks_at)
        size = width if mask is None else None
        return Minibatch(data, of(self._sizes_at), mask, features, number, size, later)

    def _cached(self, at: Tensor) -> tuple[Tensor, Any]:
        """Select features, and the rest of the batch if its samples aren't needed."""
        flat = at.flatten()

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, flat).view(*at.shape, *leaf.shape[1:])

        assert self.features is not None
        features = pick(self.features)
        if self._targets is None:
            return features, None
        return features, (features, *map_batch(self._targets, pick))

    def _tick(self, rows: Tensor, starts: list[int], count: int, number: int) -> Tick:
        minibatches = []
        device = self.positions.device
        index = send(rows, device)
        for offset in range(count):
            numbers = torch.tensor([start + offset for start in starts])
            sizes = self.sizes[rows, numbers]
            width = int(sizes.max())
            at = (index, send(numbers, device))
            data: Any = None
            features, later, mask = None, None, None
            gather = partial(self.data.gather, self.positions[at][:, :width])
            if self.features is not None:
                features, data = self._cached(self._feature_rows[at][:, :width])
            data, later = (gather(), None) if data is None else (data, gather)
            if self.pad and bool((sizes != width).any()) and self._real is not None:
                mask = self._real[at][:, :width].contiguous().to(torch.get_default_dtype())
            minibatches.append(
                Minibatch(data, sizes, mask, features, number + offset, gather=later)
            )
        return Tick(tick_rows(rows, len(self.steps), device), minibatches)
