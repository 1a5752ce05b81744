"""Times of both engines on a run's own work, for ``engine="timed"``.

All candidates do the same: a whole round of clients of typical sizes, or a piece of it where that
takes long. Each runs until it records nothing any more, on a clock that stands
still while it records. Those that are close then take turns, of which the fastest counts, as
whatever else the machine does can only make a run slower. For the same reason it is the CPU's time
that counts where one thread computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter, process_time
from typing import Protocol

import torch
from torch import Tensor

from lightning_pfl.contract.records import LocalResult
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.base import EvaluationWork, LocalWork
from lightning_pfl.engine.steps import Limits, epoch_minibatches, minibatches_per_epoch, phase_steps
from lightning_pfl.engine.trace import AROUND_RECORDING, WARM_UP
from lightning_pfl.methods.base import Phase

AFFORDABLE = 0.15
"""Seconds that one client after another may take for a piece: longer work is cut."""
LEAST, MOST = WARM_UP + 1, 6
"""Runs of a candidate, until it records nothing: some steps are recorded when they come for the
third time, and compared in the run after it."""
BUDGET = 1.5
"""Seconds after which no other number of clients at once is tried, and no further turn begins."""
FAR = 1.5
"""Where many clients at once took so many times as long as the best, fewer at once aren't tried."""
CLOSE, TURNS = 1.25, 3
"""Candidates that took less than so many times as long as the best have so many turns."""
TRIED, ENOUGH = 1, 0.03
"""Steps of one client that tell how long work is, or four times as many and so on, until they take
enough seconds."""
EVALUATED, SAMPLES = 3, 768
"""Clients that tell how long an evaluation is, and samples of a client in a piece, at most."""
PARTS = (1, 2, 4, 8)
"""Numbers of parts into which a cohort is cut."""
CACHED = 2**25
"""Largest size in bytes of the models of a program on a CPU: far beyond its caches, where more
clients only take longer (``docs/profiles.md``)."""


def clock(device: torch.device) -> float:
    """Read the clock, in seconds, after all that a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return process_time() if alone else perf_counter()


class Stopwatch:
    """A clock that stands still while steps are recorded, or compared when they are used first.

    Args:
        now: Reads a clock, in seconds.

    Attributes:
        stops: How often it stood still.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self._stood, self.stops = now, 0.0, 0

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds of a run."""
        before = AROUND_RECORDING.set(self._standing)
        start, self._stood = self.now(), 0.0
        try:
            run()
        finally:
            AROUND_RECORDING.reset(before)
        return self.now() - start - self._stood

    @contextmanager
    def _standing(self) -> Iterator[None]:
        start, stood = self.now(), self._stood
        try:
            yield
        finally:
            self.stops += 1
            # With what stood still within.
            self._stood = stood + self.now() - start


def fastest(
    candidates: Mapping[int, Callable[[], object]], now: Callable[[], float]
) -> dict[int, float]:
    """Run candidates, and return the seconds of each one's fastest run.

    Args:
        candidates: What to run, by clients per program, 0 for one after another, and the largest
            number first. One that raises an error is left out, as are those of still fewer clients
            than one that is far behind, or took longer than one of more, or when time is up.
        now: Reads a clock, in seconds.
    """
    watch, end, found = Stopwatch(now), now() + BUDGET, dict[int, float]()
    for size, run in candidates.items():
        programs, best = [took for many, took in found.items() if many], _least(found)
        if programs and (now() > end or programs[-1] > min([FAR * best, *programs[:-1]])):
            break
        # Any exception of a user's module under vmap; true errors recur in the run itself.
        with suppress(Exception):
            found[size] = _settled(run, watch)
    close = [size for size, took in found.items() if took < CLOSE * _least(found)]
    for size in close * TURNS if len(close) > 1 else ():
        if now() < end:
            found[size] = min(found[size], watch.time(candidates[size]))
    return found


def _least(found: Mapping[int, float]) -> float:
    return min(found.values(), default=math.inf)


def _settled(run: Callable[[], object], watch: Stopwatch) -> float:
    """Run something until it records nothing, and return the seconds of the last run."""
    for number in range(1, MOST + 1):
        before = watch.stops
        took = watch.time(run)
        if number >= LEAST and watch.stops == before:
            break
    return took


class Runner(Protocol):
    """An engine whose limits on minibatches can be set."""

    limits: Limits

    def train(self, work: LocalWork) -> LocalResult:
        """Train clients."""


def time_training(
    work: LocalWork,
    make: Callable[[int], Runner],
    sizes: Sequence[int],
    limits: Limits,
    now: Callable[[], float],
) -> dict[int, float]:
    """Time the training of a client, in seconds a step, by clients per program.

    Args:
        work: A cohort's training.
        make: Makes an engine for so many clients per program; 0: one client after another.
        sizes: Numbers of clients per program, the largest first.
        limits: The run's limits.
        now: Reads a clock, in seconds.
    """
    runners = {size: make(size) for size in (0, *sizes)}
    affordable = AFFORDABLE / _seconds_a_step(work, runners[0], limits, now)
    clients = len(work.info)
    piece, few, steps = training_piece(work, clients, math.inf, limits)
    if affordable < steps:
        clients = min(clients, sizes[0])
        piece, few, steps = training_piece(work, clients, affordable / clients, limits)
    runs = {size: partial(_train, runner, piece, few) for size, runner in runners.items()}
    return {size: took / steps for size, took in fastest(runs, now).items()}


def _seconds_a_step(
    work: LocalWork, runner: Runner, limits: Limits, now: Callable[[], float]
) -> float:
    """Time steps of one client of a middle size, a few or as many as take a while."""
    steps, (*_, whole) = TRIED, training_piece(work, 1, math.inf, limits)
    while True:
        piece, few, tried = training_piece(work, 1, steps, limits)
        seconds = _settled(partial(_train, runner, piece, few), Stopwatch(now))
        if seconds > ENOUGH or tried >= whole:
            return max(seconds, 1e-9) / tried
        steps *= 4


def time_evaluation(
    work: EvaluationWork,
    alone: Callable[[EvaluationWork], object],
    several: Callable[[EvaluationWork], object],
    groups: Tensor,
    now: Callable[[], float],
) -> dict[int, float]:
    """Time the evaluation of a client, in seconds, by clients of the largest program.

    Args:
        work: The evaluation of all clients.
        alone: Evaluates one client after another.
        several: Evaluates many at once.
        groups: Number of each client's program then, int64 ``(clients,)``.
        now: Reads a clock, in seconds.
    """
    some = work.rows(_spread(work.data.num_samples[work.clients], EVALUATED))
    tried = evaluation_piece(some, torch.zeros(len(some.clients), dtype=torch.int64))
    seconds = _settled(partial(alone, tried), Stopwatch(now)) / len(tried.clients)
    piece = evaluation_piece(work, groups)
    size = len(piece.clients)
    if seconds * len(work.clients) <= AFFORDABLE:
        piece = work
    found = fastest({0: partial(alone, piece), size: partial(several, piece)}, now)
    return {many: took / len(piece.clients) for many, took in found.items()}


def _train(runner: Runner, piece: LocalWork, limits: Limits) -> None:
    runner.limits = limits
    runner.train(piece)


def chunk_sizes(clients: int, most: int) -> list[int]:
    """List the numbers of clients per program that are worth a try, the largest first.

    Args:
        clients: Clients of a cohort.
        most: How many fit the memory.

    Example:
        >>> chunk_sizes(10, 512), chunk_sizes(100, 32), chunk_sizes(1, 32)
        ([10, 5, 3], [25, 13], [1])
    """
    sizes = (-(-clients // parts) for parts in PARTS)
    least = min(clients, 3)
    return [*dict.fromkeys(size for size in sizes if least <= size <= most)] or [most]


def training_piece(
    work: LocalWork, clients: int, steps: float, limits: Limits
) -> tuple[LocalWork, Limits, int]:
    """Cut local training to some clients of typical sizes, and a part of their steps.

    Args:
        work: A cohort's training.
        clients: How many of the clients, at most all. In memory they get sizes that are evenly
            spread over those of all clients that may train, as another round has other clients.
        steps: How many steps of a client, about, or more than there are for all.
        limits: The run's limits.

    Returns:
        The piece, its limits, and the number of its steps, of all clients together.
    """
    some = work.rows(_spread(work.info.steps, clients))
    if some.kept is not None:  # the states of a run's begin, which no step changes
        some = replace(some, kept=[{} for _ in some.kept])
    index, data = some.info.index, some.data
    if isinstance(data, FederatedTensorDataset):
        data = _of_typical_sizes(data, index, limits)
    taken = phase_steps(data, index, some.phases, limits)
    part = steps / max(1.0, float(taken.double().mean()))
    if part >= 1:
        some = replace(some, info=replace(some.info, steps=taken), data=data)
        return some, limits, max(1, int(taken.sum()))
    epochs = _minibatches(data, index, limits)
    complete = limits.accumulate * max(phase.batches_per_step for phase in some.phases)
    # Whole steps of each client, one at least.
    left = ((epochs / complete * part).round().clamp_min(1) * complete).minimum(epochs)
    if any(phase.full_batch for phase in some.phases):
        left = epochs  # fewer samples would be another minibatch
    elif isinstance(data, FederatedTensorDataset):
        # The last minibatch, whose size is another one, stays, unless it never comes.
        every = _minibatches(data, index, Limits())
        ends = data.num_samples[index] - (every - left) * data.batch_size
        counts = torch.zeros(data.num_clients, dtype=torch.int64)
        counts[index] = torch.where(epochs < every, left * data.batch_size, ends).long()
        data, limits = data.resized(counts), Limits(limits.accumulate)
    else:
        limits = replace(limits, batches=int(left.mean().ceil()), overfit=0.0)
    # What is cut from the samples needn't be cut from the epochs.
    shorter = min(1.0, part * float(epochs.sum() / left.sum())) if left is not epochs else part
    phases = tuple(_shortened(phase, part, shorter) for phase in some.phases)
    taken = phase_steps(data, index, phases, limits)
    piece = replace(some, info=replace(some.info, steps=taken), data=data, phases=phases)
    return piece, limits, max(1, int(taken.sum()))


def _of_typical_sizes(
    data: FederatedTensorDataset, clients: Tensor, limits: Limits
) -> FederatedTensorDataset:
    """Give clients as many samples as those of all sizes have, the first of them the most."""
    sizes = data.num_samples
    # The more samples, the more minibatches, of which full batches need none.
    least = next(
        (
            size
            for size in sizes.unique().tolist()
            if limits.of_epoch(epoch_minibatches(size, data.batch_size, data.drop_last))
        ),
        1,
    )
    every, able = sizes[sizes >= least], clients[sizes[clients] >= least]
    counts = torch.zeros_like(sizes)
    counts[clients] = sizes[clients]
    counts[able] = every[_spread(every, len(able))]
    return data if torch.equal(counts[clients], sizes[clients]) else data.resized(counts)


def _minibatches(data: FederatedDataset, clients: Tensor, limits: Limits) -> Tensor:
    """Count the minibatches of each client in an epoch, float64 ``(clients,)``."""
    numbers = [minibatches_per_epoch(data, client, limits) for client in clients.tolist()]
    return torch.tensor(numbers, dtype=torch.float64)


def _shortened(phase: Phase, of_steps: float, of_epochs: float) -> Phase:
    """Keep a part of a phase: a step at least, and two epochs, which may share features."""
    if isinstance(phase.steps, int):
        return replace(phase, steps=min(phase.steps, max(1, round(phase.steps * of_steps))))
    if isinstance(phase.epochs, int):
        return replace(phase, epochs=min(phase.epochs, max(2, round(phase.epochs * of_epochs))))
    return phase


def evaluation_piece(work: EvaluationWork, groups: Tensor) -> EvaluationWork:
    """Cut an evaluation to the clients of a program, and to the first of their samples.

    Args:
        work: The evaluation of all clients.
        groups: Number of each client's program, int64 ``(clients,)``.
    """
    some = work.rows((groups == groups.bincount().argmax()).nonzero().flatten())
    data = some.data
    if not isinstance(data, FederatedTensorDataset):
        return replace(some, limit=1)
    # A part of few minibatches would be none.
    limit = 1 if isinstance(some.limit, float) and some.limit < 1 else some.limit
    counts = torch.zeros(data.num_clients, dtype=torch.int64)
    counts[some.clients] = data.num_samples[some.clients].clamp_max(SAMPLES)
    return replace(some, data=data.resized(counts), limit=limit)


def _spread(sizes: Tensor, count: int) -> Tensor:
    """Choose positions that are evenly spread over the order by size, the largest first."""
    order = torch.argsort(sizes, descending=True, stable=True)
    count = min(count, len(order))
    return order[(torch.arange(count) * 2 + 1) * len(order) // (2 * count)]
