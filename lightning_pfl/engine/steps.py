"""From ragged clients to ticks: groups of clients whose next batches have the same shape.

A *minibatch* is what the user's step sees. A *step* is one optimizer step: ``accumulate``
minibatches, fewer at the end of an epoch. At tick ``s`` every client takes its own step ``s``;
clients whose minibatches have equal sizes run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lightning_pfl.core.randomness import derive
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.methods.base import Phase


@dataclass(frozen=True)
class Budget:
    """How far a phase goes: exactly one of ``epochs`` and ``steps`` is a number.

    ``batches_per_step`` and ``full_batch`` as in :class:`~lightning_pfl.methods.base.Phase`.
    """

    epochs: int | None
    steps: int | None
    batches_per_step: int = 1
    full_batch: bool = False


@dataclass(frozen=True)
class Limits:
    """How minibatches are cut and grouped; the Trainer's flags.

    Args:
        accumulate: Minibatches per optimizer step.
        batches: Minibatches per client and epoch: a count or a fraction.
        overfit: When not 0, that many (or that fraction of) minibatches, never shuffled.
    """

    accumulate: int = 1
    batches: float | int = 1.0
    overfit: float | int = 0.0

    def of_epoch(self, minibatches: int) -> int:
        """How many of an epoch's minibatches are used."""
        limit = self.overfit if self.overfit else self.batches
        return min(limit, minibatches) if isinstance(limit, int) else int(minibatches * limit)


Drawn = TypeVar("Drawn")


def epoch_minibatches(samples: int, batch_size: int, drop_last: bool) -> int:
    """Minibatches in a pass over ``samples`` samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def count_steps(per_epoch: int, budget: Budget, accumulate: int) -> int:
    """Optimizer steps of a phase for a client with ``per_epoch`` minibatches.

    None for a client without any.
    """
    if per_epoch == 0:
        return 0
    if budget.steps is not None:
        return budget.steps
    assert budget.epochs is not None
    if budget.batches_per_step > 1:
        return -(-budget.epochs * per_epoch // (budget.batches_per_step * accumulate))
    return budget.epochs * -(-per_epoch // accumulate)


def step_bounds(per_epoch: int, budget: Budget, accumulate: int) -> list[tuple[int, int]]:
    """First and last-plus-one minibatch number of every step.

    Minibatches are numbered through all epochs.
    """
    bounds = []
    steps = count_steps(per_epoch, budget, accumulate)
    if budget.batches_per_step > 1:
        # Every draw is complete, so that all clients' steps are cut alike.
        size = budget.batches_per_step * accumulate
        return [(step * size, (step + 1) * size) for step in range(steps)]
    for step in range(steps):
        epoch, within = divmod(step, -(-per_epoch // accumulate))
        start = within * accumulate
        bounds.append(
            (epoch * per_epoch + start, epoch * per_epoch + min(start + accumulate, per_epoch))
        )
    return bounds


def step_size(budget: Budget, limits: Limits) -> int:
    """Minibatches of a complete step."""
    return budget.batches_per_step * limits.accumulate


def epochs_used(bounds: list[list[tuple[int, int]]], per_epoch: list[int]) -> list[int]:
    """How many epochs each client's steps begin."""
    return [-(-b[-1][1] // n) if b else 0 for b, n in zip(bounds, per_epoch, strict=True)]


def split_draws(
    minibatches: list[Drawn], batches_per_step: int
) -> list[Drawn] | tuple[list[Drawn], ...]:
    """Give ``client_step`` its minibatches: from 2 per step on, a tuple of equal parts."""
    if batches_per_step == 1:
        return minibatches
    size = len(minibatches) // batches_per_step
    return tuple(minibatches[i * size : (i + 1) * size] for i in range(batches_per_step))


def minibatches_per_epoch(
    data: FederatedDataset, client: int, limits: Limits, full_batch: bool = False
) -> int:
    """Minibatches that a client uses in one epoch.

    Raises:
        TypeError: If all samples at once are asked of a DataLoader.
    """
    if full_batch and not isinstance(data, FederatedTensorDataset):
        raise TypeError(
            "Expected data that are held in memory, as the method needs all samples of a client at "
            f"once, but got the DataLoader of client {data.names[client]!r}. Use a DataLoader over "
            "a TensorDataset, or FederatedTensorDataset."
        )
    if full_batch:
        return limits.of_epoch(min(1, int(data.num_samples[client])))
    if isinstance(data, FederatedTensorDataset):
        number = epoch_minibatches(int(data.num_samples[client]), data.batch_size, data.drop_last)
    else:
        number = len(data.loaders[client])
    return limits.of_epoch(number)


def phase_steps(
    data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...], limits: Limits
) -> Tensor:
    """Optimizer steps of each client over all phases, int64 ``(clients,)``."""
    total = torch.zeros(len(clients), dtype=torch.int64)
    for phase in phases:
        budget = phase_budget(phase)
        per_epoch = [minibatches_per_epoch(data, int(k), limits, phase.full_batch) for k in clients]
        total += torch.tensor([count_steps(n, budget, limits.accumulate) for n in per_epoch])
    return total


def phase_budget(phase: Phase) -> Budget:
    """How far a phase goes, and how its steps are cut."""
    return Budget(phase.epochs, phase.steps, phase.batches_per_step, phase.full_batch)


def order_key(seed: int, stream: str, round: int, client: int, epoch: int) -> int:
    """The key of a client's order of samples in one epoch of one round."""
    return derive(seed, "order", stream, round, client, epoch)
