"""Cuts of ragged clients' data into steps and ticks.

A *minibatch* is the argument of the user's step. A *step* is one optimizer step: ``accumulate``
minibatches, fewer at the end of an epoch. At tick ``s`` every client takes its step ``s``;
clients whose minibatches have equal sizes run together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_pfl.data.batch import batch_leaves
from lightning_pfl.data.datasets import DropLast, FederatedDataset, FederatedTensorDataset
from lightning_pfl.methods.base import PerClient, Phase


@dataclass(frozen=True)
class Budget:
    """The length of a phase: exactly one of ``epochs`` and ``steps`` is a number.

    ``batches_per_step`` and ``full_batch`` as in :class:`~lightning_pfl.methods.base.Phase`.
    """

    epochs: PerClient | None
    steps: PerClient | None
    batches_per_step: int = 1
    full_batch: bool = False

    @property
    def passes(self) -> int:
        """Passes over the data of a client; 0 where its steps are counted."""
        return self.epochs if isinstance(self.epochs, int) else 0

    def of(self, client: str) -> Budget:
        """Return the length for a client, by its name, as plain numbers."""
        if not (isinstance(self.epochs, Mapping) or isinstance(self.steps, Mapping)):
            return self
        epochs, steps = (
            each[client] if isinstance(each, Mapping) else each
            for each in (self.epochs, self.steps)
        )
        return replace(self, epochs=epochs, steps=steps)


@dataclass(frozen=True)
class Limits:
    """The limits on minibatches from the Trainer's flags.

    Args:
        accumulate: Minibatches per optimizer step.
        batches: Minibatches per client and epoch: a count or a fraction.
        overfit: When not 0, this number (or fraction) of minibatches, never shuffled.
    """

    accumulate: int = 1
    batches: float | int = 1.0
    overfit: float | int = 0.0

    def of_epoch(self, minibatches: int) -> int:
        """Count the minibatches to use in an epoch."""
        limit = self.overfit if self.overfit else self.batches
        return min(limit, minibatches) if isinstance(limit, int) else int(minibatches * limit)


Drawn = TypeVar("Drawn")


def epoch_minibatches(samples: int, batch_size: int, drop_last: DropLast) -> int:
    """Count the minibatches in a pass over ``samples`` samples.

    Example:
        >>> [epoch_minibatches(9, 4, drop_last) for drop_last in (False, True, "single")]
        [3, 2, 2]
    """
    complete, rest = divmod(samples, batch_size)
    least = 2 if drop_last == "single" else batch_size if drop_last else 1
    return complete + (rest >= least)


def clients_served(
    sizes: Iterable[int], batch_size: int, drop_last: DropLast, together: int, padded: bool = False
) -> tuple[float, bool]:
    """Count the clients of a program, on average over those that a pass over the data needs.

    Args:
        sizes: Samples of each client.
        batch_size: Samples of a minibatch, but for the last one of a client.
        drop_last: As of the data.
        together: Clients that run together at most, the largest first.
        padded: Whether minibatches of different sizes are padded.

    Returns:
        The clients, and whether a minibatch number needs several programs, one for each size.

    Example:
        >>> clients_served([8, 6, 8, 4], 4, False, 4)  # one program, and two for the second ones
        (2.3333333333333335, True)
        >>> clients_served([8, 6, 8, 4], 4, False, 4, padded=True)
        (3.5, False)
    """
    total = programs = 0
    several, ordered = False, sorted(sizes, reverse=True)
    for first in range(0, len(ordered), together):
        kinds: set[tuple[int, int]] = set()
        most = 0
        for samples in ordered[first : first + together]:
            number = epoch_minibatches(samples, batch_size, drop_last)
            kinds |= {(at, min(batch_size, samples - at * batch_size)) for at in range(number)}
            total, most = total + number, max(most, number)
        several |= len(kinds) > most and not padded
        programs += most if padded else len(kinds)
    return max(1.0, total / max(1, programs)), several


def count_steps(per_epoch: int, budget: Budget, accumulate: int) -> int:
    """Count the optimizer steps of a phase for a client with ``per_epoch`` minibatches, maybe 0."""
    if per_epoch == 0:
        return 0
    if isinstance(budget.steps, int):
        return budget.steps
    assert isinstance(budget.epochs, int)
    if budget.batches_per_step > 1:
        return -(-budget.epochs * per_epoch // (budget.batches_per_step * accumulate))
    return budget.epochs * -(-per_epoch // accumulate)


def step_bounds(per_epoch: int, budget: Budget, accumulate: int) -> list[tuple[int, int]]:
    """Compute the first and last-plus-one minibatch number of every step, through all epochs."""
    bounds = []
    steps = count_steps(per_epoch, budget, accumulate)
    if budget.batches_per_step > 1:
        # Every draw is complete, so that steps are cut equally for all clients.
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
    """Count the minibatches of a complete step."""
    return budget.batches_per_step * limits.accumulate


def epochs_used(bounds: list[list[tuple[int, int]]], per_epoch: list[int]) -> list[int]:
    """Count the epochs that each client's steps begin."""
    return [-(-b[-1][1] // n) if b else 0 for b, n in zip(bounds, per_epoch, strict=True)]


def split_draws(
    minibatches: list[Drawn], batches_per_step: int
) -> list[Drawn] | tuple[list[Drawn], ...]:
    """Arrange minibatches for ``client_step``: from 2 per step on, a tuple of equal parts."""
    if batches_per_step == 1:
        return minibatches
    size = len(minibatches) // batches_per_step
    return tuple(minibatches[i * size : (i + 1) * size] for i in range(batches_per_step))


def minibatches_per_epoch(
    data: FederatedDataset, client: int, limits: Limits, full_batch: bool = False
) -> int:
    """Count the minibatches that a client uses in one epoch.

    Raises:
        TypeError: If ``full_batch`` is set for a DataLoader.
    """
    if full_batch and not isinstance(data, FederatedTensorDataset):
        raise TypeError(
            "Expected data in memory for a full batch, but got the DataLoader of client "
            f"{data.names[client]!r}. Use a DataLoader over a TensorDataset, or "
            "FederatedTensorDataset."
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
    """Count the steps of each client over all phases on training data, int64 ``(clients,)``."""
    total, ids = torch.zeros(len(clients), dtype=torch.int64), clients.tolist()
    for phase in phases:
        if phase.data != "training":
            continue
        budget = phase_budget(phase)
        per_epoch = [minibatches_per_epoch(data, k, limits, phase.full_batch) for k in ids]
        each = [budget.of(data.names[k]) for k in ids]
        total += torch.tensor(
            [count_steps(n, b, limits.accumulate) for n, b in zip(per_epoch, each, strict=True)]
        )
    return total


def phase_limits(phase: Phase, limits: Limits) -> Limits:
    """Return the limits of a phase: none on validation and public data."""
    return limits if phase.data == "training" else Limits()


def phase_budget(phase: Phase) -> Budget:
    """Return the length of a phase and the cut of its steps."""
    return Budget(phase.epochs, phase.steps, phase.batches_per_step, phase.full_batch)


def fitting_samples(data: FederatedDataset, images: int, most: int, ids: int) -> int:
    """Choose samples of as many numbers in all as some images have.

    Activations are larger than inputs by a factor that is much the same for images and tables.

    Args:
        data: The dataset.
        images: Greyscale images of 28 x 28 numbers.
        most: Largest number of samples.
        ids: Samples of whole numbers, and of data whose size isn't known.
    """
    if not isinstance(data, FederatedTensorDataset) or not data.pool_size:
        return ids
    inputs = next(batch_leaves(data.fields))
    if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        return ids
    return max(1, min(most, images * 28 * 28 * len(inputs) // max(1, inputs.numel())))


IMAGES, MOST, OF_IDS = 256, 1024, 128
"""Samples of a minibatch of one model on a CPU, of greyscale images of 28 x 28 numbers, at most,
and of ids, which an embedding makes larger: enough for large products, few enough for the
caches."""


def samples_of_one_model(data: FederatedDataset) -> int:
    """Choose the samples of a minibatch on a CPU where any may share one."""
    return fitting_samples(data, IMAGES, MOST, OF_IDS)


def joined(minibatches: int, most: int) -> list[int]:
    """Cut a number of minibatches into groups of powers of two, of which there are few sizes.

    Args:
        minibatches: How many there are.
        most: Largest size of a group.

    Example:
        >>> joined(15, 5), joined(2, 5)
        ([4, 4, 4, 2, 1], [2])
    """
    found, size = [], 1 << (max(1, most).bit_length() - 1)
    while minibatches:
        if size <= minibatches:
            found.append(size)
            minibatches -= size
        else:
            size >>= 1
    return found


class NumberReadError(Exception):
    """A step that reads the number of a minibatch."""


class Unread:
    """The number of a minibatch in a step that is recorded, which mustn't depend on it.

    It may be handed on, and asked for its class; whatever reads its value raises NumberReadError.
    """

    __class__: Any = int

    def _refuse(self, *_: Any) -> Any:
        raise NumberReadError("it reads the number of a minibatch")

    __bool__ = __eq__ = __ne__ = __hash__ = __repr__ = __str__ = __format__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


for _operator in set(dir(int)) - set(dir(object)):
    setattr(Unread, _operator, Unread._refuse)
