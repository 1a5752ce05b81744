"""An estimate of which engine is faster on a CPU, from a step's floating-point operations.

Batching over clients saves the time that Python and torch take for each call, and pays with
arithmetic that is further from the caches: weights and activations of many clients at once. So it
wins on small networks and loses on large ones. The unit of the estimate is the time of a million
operations in the sequential engine, and its constants are a fit to the ratios in
``docs/profiles.md``.

It is no clock, because a seed must give the same numbers in every run, and the engines differ in
the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from operator import add

CALL_ALONE = 62.0
"""Cost of the calls in a gradient of one client."""
CALL_REPLAYED = 12.0
"""The same, if whole steps are recorded and replayed."""
CALL_TOGETHER = 7.0
"""A client's share of the calls in a gradient of many clients."""
PROGRAM, PROGRAM_CONVOLUTION = 70.0, 60.0
"""Cost of the calls in a gradient of many clients, and more for each convolution, which few clients
share where minibatches of other sizes can't be padded."""
CONVOLUTION = 28.0
"""Cost of a convolution in a gradient of one client, whose channels are few for its operators."""
ALONE, TOGETHER = 0.75, 1.5
"""Cost of a million operations of matrix products in a gradient of one client, and of many."""
TOGETHER_IN_THREADS = 0.85
"""The same of many with several threads, for which one client's operators are too small: with two
threads products of ten clients take half of the time, a client's step four fifths."""
CONVOLVED, CONVOLVED_TOGETHER = 2 / 3, 1.2
"""The same in networks with convolutions, with any number of threads."""
FORWARD = 1 / 3
"""The forward pass's share of a gradient's operations."""

EVALUATED, WATCHED = 5.0, 7.0
"""Cost of the calls in an evaluated minibatch of one client, and more where it isn't replayed."""
EVALUATED_PROGRAM, EVALUATED_TOGETHER = 45.0, 1.0
"""Cost of the calls in an evaluated program, and more for each client in it."""
EVALUATED_COPIED = 13.0
"""More for each client in a program that has copies of torchmetrics objects."""
EVALUATED_CONVOLUTION, EVALUATED_PROGRAM_CONVOLUTION = 14.0, 32.0
"""More for each convolution, of one client and in a program."""
FORWARD_ALONE, FORWARD_TOGETHER, FORWARD_SHARED = 1.4, 3.0, 0.75
"""Cost of a million operations in a forward pass: of one client, whose weights are read for few
samples, of many, and of layers that many have in common."""
FORWARD_CONVOLVED, FORWARD_CONVOLVED_TOGETHER = 0.5, 2.0
"""The same in networks with convolutions."""


@dataclass(frozen=True)
class Share:
    """Gradients of one client in a phase.

    Args:
        gradients: Their number.
        cached: Whether the frozen backbone's features are cached when clients run together, so that
            hardly any operations are left after the first pass over the data.
        passes: Passes over the data, where features are cached.
        cached_alone: Whether they also are where one client runs after another.
        served: Clients of unequal sizes that one program serves on average; None for equal ones,
            and where minibatches are padded.
    """

    gradients: int
    cached: bool = False
    passes: int = 1
    served: float | None = None
    cached_alone: bool = False


@dataclass(frozen=True)
class Load:
    """The parts of an evaluation of some clients.

    Args:
        minibatches: Minibatches of one client after another.
        programs: Programs of many clients.
        parts: Clients in these, summed.
        samples: Samples.
        padded: Samples in the programs, with those that fill them up.
    """

    minibatches: int
    programs: int
    parts: int
    samples: int
    padded: int

    def __add__(self, other: Load) -> Load:
        """Add what another one consists of."""
        return Load(*map(add, astuple(self), astuple(other)))


def batching_pays(
    operations: float,
    shares: Iterable[Share],
    replayed: bool = False,
    convolutions: float = 0.0,
    threads: int = 1,
) -> bool:
    """Whether clients train faster together than one after another.

    Args:
        operations: Floating-point operations of one client's gradient, on average over the shares.
        shares: Its gradients in a round, one share of each phase.
        replayed: Whether one client's step would be replayed.
        convolutions: Convolutions in a gradient.
        threads: Threads within an operator.

    Example:
        >>> batching_pays(17e6, [Share(60)]), batching_pays(700e6, [Share(5)])
        (True, False)
        >>> [batching_pays(44e6, [Share(60)], replayed=True, threads=some) for some in (1, 2)]
        [False, True]
    """
    shares = list(shares)
    convolved = convolutions > 0
    rates = ALONE, TOGETHER if threads == 1 else TOGETHER_IN_THREADS
    rate, rate_together = (CONVOLVED, CONVOLVED_TOGETHER) if convolved else rates
    # Above a frozen backbone a gradient has the forward pass alone, a third of the operations.
    parts = [FORWARD if share.cached else 1.0 for share in shares]
    full = operations / 1e6 * len(shares) / sum(parts)
    call = CALL_REPLAYED if replayed else CALL_ALONE
    alone = together = 0.0
    for share, part in zip(shares, parts, strict=True):
        work = full * part
        # The first pass computes the features.
        batched = share.gradients / share.passes if share.cached else share.gradients
        computed = batched if share.cached_alone else share.gradients
        alone += computed * (part * convolutions * CONVOLUTION + rate * work)
        alone += share.gradients * call
        calls = CALL_TOGETHER
        if share.served is not None:
            program = PROGRAM + part * convolutions * PROGRAM_CONVOLUTION
            calls = max(calls, program / share.served)
        together += batched * rate_together * work + share.gradients * calls
    return together <= alone


def evaluating_pays(
    operations: float,
    load: Load,
    replayed: bool = False,
    convolutions: float = 0.0,
    shared: float = 0.0,
    copied: bool = False,
) -> bool:
    """Whether clients are evaluated faster together than one after another.

    Args:
        operations: Floating-point operations for a sample.
        load: What there is to evaluate.
        replayed: Whether one client's step would be replayed.
        convolutions: Convolutions in a forward pass.
        shared: The fraction of the operations that is in layers which clients have in common.
        copied: Whether clients in a program have copies of torchmetrics objects.

    Example:
        >>> few, many = Load(30, 12, 30, 480, 480), Load(100, 1, 100, 1600, 1600)
        >>> evaluating_pays(1e4, few, replayed=True), evaluating_pays(1e4, many, replayed=True)
        (False, True)
    """
    work = operations / 1e6
    if convolutions > 0:
        rate, rate_together = FORWARD_CONVOLVED, FORWARD_CONVOLVED_TOGETHER
    else:
        rate = FORWARD_ALONE
        rate_together = shared * FORWARD_SHARED + (1 - shared) * FORWARD_TOGETHER
    call = EVALUATED + (0.0 if replayed else WATCHED) + convolutions * EVALUATED_CONVOLUTION
    program = EVALUATED_PROGRAM + convolutions * EVALUATED_PROGRAM_CONVOLUTION
    alone = load.minibatches * call + rate * work * load.samples
    each = EVALUATED_TOGETHER + (EVALUATED_COPIED if copied else 0.0)
    together = load.programs * program + load.parts * each
    return together + rate_together * work * load.padded <= alone
