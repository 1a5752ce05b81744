"""Times of both engines on short pieces of a run's own work, for ``engine="timed"``.

A piece is some of the clients with the first of their samples and a part of their epochs or steps,
so that networks, minibatches, phases and clients' sizes relative to each other are the run's. The
candidates take turns, of which the first one records programs. The fastest run of each counts, as
whatever else the machine does can only make a run slower. For the same reason it is the CPU's time
that counts where one thread computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, process_time
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_pfl.contract.records import LocalResult
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.base import EvaluationWork, LocalWork
from lightning_pfl.engine.steps import Limits, minibatches_per_epoch, phase_steps
from lightning_pfl.methods.base import Phase

BUDGET = 0.5
"""Seconds after which no further turn begins, but for those that warm up, which have three times as
many."""
WARM_UP = 2
"""Turns in which programs are recorded, and recordings checked."""
TURNS = 8
"""Turns at most."""
FAR = 2.0
"""Candidates that took so many times as long as the best have no further turn."""
LONG = 0.1
"""Seconds of a run beside which its recordings don't count."""
FEWEST, STEPS = 3, 12
"""Steps of a client in a piece; a program is recorded in its third step."""
ALONE = 3
"""Clients in a piece of one client after another, whose cost doesn't depend on their number."""
SAMPLES = 768
"""Samples of a client in a piece of an evaluation, at most."""
PARTS = (1, 2, 4, 8)
"""Numbers of parts into which a cohort is cut."""
CACHED = 2**25
"""Largest size in bytes of the models of a program on a CPU: far beyond its caches, where more
clients only take longer (``docs/profiles.md``)."""

Key = TypeVar("Key")


def clock(device: torch.device) -> float:
    """Read the clock, in seconds, after all that a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return process_time() if alone else perf_counter()


@dataclass
class Candidate:
    """One of several ways to do a work.

    Args:
        runs: Functions that do pieces of it: a long one, perhaps a short one.
        units: How much each of them does.
        whole: How much the work is.

    Attributes:
        seconds: The fastest run of each.
    """

    runs: Sequence[Callable[[], object]]
    units: Sequence[float]
    whole: float
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Seconds for a unit of the long piece; 0 before it has run."""
        return self.seconds[0] / self.units[0] if self.seconds else 0.0

    @property
    def of_all(self) -> float:
        """Seconds for a unit of the whole work, of which a part is the same for any length."""
        if len(self.units) == 1 or self.units[0] <= self.units[1]:
            return self.rate
        (long, short), (more, fewer) = self.seconds, self.units
        slope = max(long - short, 0.0) / (more - fewer)
        return (long + slope * (self.whole - more)) / self.whole

    def take_turn(self, now: Callable[[], float]) -> None:
        """Run all pieces once."""
        took = []
        for run in self.runs:
            start = now()
            run()
            took.append(now() - start)
        self.seconds = list(map(min, took, self.seconds or took))


def run_in_turns(
    candidates: Mapping[Key, Candidate], now: Callable[[], float], known: float = math.inf
) -> set[Key]:
    """Run candidates in turns, and return those that have run.

    Args:
        candidates: What to run. One that raises an error is left out.
        now: Reads a clock, in seconds.
        known: Seconds for a unit of another candidate.
    """
    left, begin = {*candidates}, now()
    for turn in range(TURNS):
        if turn and now() - begin > (BUDGET if turn > WARM_UP else 3 * BUDGET):
            break
        best = min(known, *(candidates[key].rate for key in left)) if turn else math.inf
        for key, one in candidates.items():
            warm = turn > WARM_UP or sum(one.seconds) > LONG
            if key not in left or (warm and one.rate > FAR * best):
                continue
            try:
                one.take_turn(now)
            # Any exception of a user's module under vmap; true errors recur in the run itself.
            except Exception:
                left.remove(key)
    return left


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

    A part of the time is the same for any number of steps. So pieces of two lengths tell what a
    round takes that is longer than both.

    Args:
        work: A cohort's training.
        make: Makes an engine for so many clients per program; 0: one client after another.
        sizes: Numbers of clients per program.
        limits: The run's limits.
        now: Reads a clock, in seconds.
    """
    steps = float(work.info.steps.double().mean())
    found = {0: _seconds_a_step(work, make, {0: STEPS}, steps, limits, now).get(0, 0.0)}
    lengths = {}
    for size in sizes:
        affordable = BUDGET / 6 / max(found[0] * size, 1e-9)
        lengths[size] = max(FEWEST, min(STEPS, int(affordable)))
    found |= _seconds_a_step(work, make, lengths, steps, limits, now, found[0] or math.inf)
    return {size: seconds for size, seconds in found.items() if seconds}


def _seconds_a_step(
    work: LocalWork,
    make: Callable[[int], Runner],
    lengths: Mapping[int, int],
    steps: float,
    limits: Limits,
    now: Callable[[], float],
    known: float = math.inf,
) -> dict[int, float]:
    """Time a client's step in a round with some steps, by clients per program."""
    candidates = {}
    for size, length in lengths.items():
        runner, clients = make(size), min(size or ALONE, len(work.info))
        # Several phases would have other shares in a shorter piece.
        shorter = FEWEST < length < steps and len(work.phases) == 1
        cut = [
            training_piece(work, clients, few, limits)
            for few in ((length, FEWEST) if shorter else (length,))
        ]
        runs = [partial(_train, runner, piece, its) for piece, its, _ in cut]
        candidates[size] = Candidate(runs, [count for *_, count in cut], steps * clients)
    return {size: candidates[size].of_all for size in run_in_turns(candidates, now, known)}


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
    work: LocalWork, clients: int, steps: int, limits: Limits
) -> tuple[LocalWork, Limits, int]:
    """Cut local training to some of the clients and a part of their steps.

    Args:
        work: A cohort's training.
        clients: How many of the clients, at most all.
        steps: How many steps of a client, about.
        limits: The run's limits.

    Returns:
        The piece, its limits, and the number of its steps, of all clients together.
    """
    some = work.rows(_spread(work.info.steps, clients))
    index, data = some.info.index, some.data
    whole = float(phase_steps(data, index, some.phases, limits).double().mean())
    part = min(1.0, steps / max(whole, 1.0))
    epochs = torch.tensor([minibatches_per_epoch(data, int(k), limits) for k in index]).double()
    complete = limits.accumulate * max(phase.batches_per_step for phase in some.phases)
    # Whole steps of each client, one at least.
    kept = (epochs / complete * part).round().clamp_min(1) * complete
    if any(phase.full_batch for phase in some.phases):
        kept = epochs  # fewer samples would be another minibatch
    elif isinstance(data, FederatedTensorDataset):
        counts = torch.zeros(data.num_clients, dtype=torch.int64)
        counts[index] = kept.long() * data.batch_size
        data, limits = data.beginnings(counts), Limits(limits.accumulate)
    else:
        limits = replace(limits, batches=int(kept.mean().ceil()), overfit=0.0)
    # What is cut from the samples needn't be cut from the epochs.
    shorter = part * float(epochs.sum() / torch.minimum(kept, epochs).sum())
    phases = tuple(_shortened(phase, part, min(1.0, shorter)) for phase in some.phases)
    taken = phase_steps(data, index, phases, limits)
    info = replace(some.info, steps=taken)
    piece = replace(some, info=info, data=data, phases=phases, kept=None)
    return piece, limits, max(1, int(taken.sum()))


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
    counts[some.clients] = SAMPLES
    return replace(some, data=data.beginnings(counts), limit=limit)


def _spread(sizes: Tensor, count: int) -> Tensor:
    """Choose positions that are evenly spread over the order by size, int64 ``(count,)``."""
    order = torch.argsort(sizes, descending=True, stable=True)
    count = min(count, len(order))
    return order[(torch.arange(count) * 2 + 1) * len(order) // (2 * count)]
