"""Minibatches drawn from users' DataLoaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.randomness import restoring_once
from lightning_pfl.core.transfer import send
from lightning_pfl.data.batch import batch_length
from lightning_pfl.data.datasets import FederatedLoaders
from lightning_pfl.engine.minibatches import fetch
from lightning_pfl.engine.steps import Budget, Limits, epochs_used, step_bounds, step_size
from lightning_pfl.engine.vectorized.resident import ResidentBatches
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick, active_rows, tick_rows


class LoaderBatches:
    """Minibatches of a chunk, drawn from the users' DataLoaders.

    Attributes:
        in_one: As of resident ones; shapes decide here.
    """

    in_one = False

    def __init__(
        self,
        data: FederatedLoaders,
        clients: Sequence[int],
        budget: Budget,
        limits: Limits,
        key: Callable[[int, int], int],
        device: torch.device,
        first_epochs: Sequence[int] | None = None,
    ) -> None:
        self.clients, self.device, self._key = list(clients), device, key
        self.first_epochs = first_epochs or [0] * len(clients)
        self.loaders = [data.loaders[client] for client in clients]
        self.names = [data.names[client] for client in clients]
        self.per_epoch = [limits.of_epoch(len(loader)) for loader in self.loaders]
        self.bounds = [
            step_bounds(n, budget.of(name), limits.accumulate)
            for n, name in zip(self.per_epoch, self.names, strict=True)
        ]
        self.steps = torch.tensor([len(b) for b in self.bounds])
        self.step_size = step_size(budget, limits)
        self.epochs_used = epochs_used(self.bounds, self.per_epoch)
        self._iterators: list[Iterator[Any] | None] = [None] * len(self.loaders)

    def at(self, step: int, along: bool = False) -> Iterator[Tick]:
        """Iterate over the ticks of one step: clients whose minibatches have equal shapes.

        Args:
            step: Its number.
            along: As of resident ones; here nobody goes along.
        """
        groups: dict[Any, list[tuple[int, list[Any]]]] = {}
        with restoring_once():
            for row in active_rows(self.steps, step):
                batches = [self._next(row, number) for number in range(*self.bounds[row][step])]
                groups.setdefault(tuple(map(signature, batches)), []).append((row, batches))
        for members in groups.values():
            rows = torch.tensor([row for row, _ in members])
            number = step * self.step_size
            minibatches = []
            for offset, parts in enumerate(zip(*(batches for _, batches in members), strict=True)):
                data = stack_batches(parts, self.device)
                sizes = torch.full((len(rows),), batch_length(parts[0]))
                minibatches.append(Minibatch(data, sizes, number=number + offset))
            yield Tick(tick_rows(rows, len(self.steps), self.device), minibatches)

    def _next(self, row: int, number: int) -> Any:
        epoch, within = divmod(number, self.per_epoch[row])
        if within == 0:
            key = self._key(self.clients[row], self.first_epochs[row] + epoch)
            self._iterators[row] = fetch(
                self.loaders[row], key, self.per_epoch[row], self.names[row]
            )
        iterator = self._iterators[row]
        assert iterator is not None
        return next(iterator)


Batches = ResidentBatches | LoaderBatches


def signature(batch: Any) -> Any:
    """Return structure, shapes and dtypes; batches with equal signatures can be stacked."""
    if isinstance(batch, Tensor):
        return ("tensor", tuple(batch.shape), batch.dtype)
    if isinstance(batch, dict):
        return ("dict", *((key, signature(value)) for key, value in batch.items()))
    if isinstance(batch, (list, tuple)):
        return (type(batch).__name__, *map(signature, batch))
    return ("object", id(batch))


def stack_batches(batches: Sequence[Any], device: torch.device) -> Any:
    """Stack batches of equal signature along a new client axis, on the device."""
    first = batches[0]
    if isinstance(first, Tensor):
        return send(torch.stack(list(batches)), device)
    if isinstance(first, dict):
        return {key: stack_batches([batch[key] for batch in batches], device) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(stack_batches(parts, device) for parts in zip(*batches, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(stack_batches(parts, device) for parts in zip(*batches, strict=True))
    return first
