"""An estimate of which engine is faster on a CPU, from a step's operators and their arithmetic.

Batching over clients saves the time that Python and torch take for each operator, and pays with
arithmetic that is further from the caches: weights and activations of many clients at once. So it
wins on small networks and loses on large ones, and the more clients share a program, the more it
saves. Random numbers need no term of their own: a mask is two dozen operators. The unit of the
estimate is 15 microseconds, and its constants are a fit to the times in ``docs/profiles.md``.

It is no clock, because a seed must give the same numbers in every run, and the engines differ in
the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from operator import add

CALL, CALL_WATCHED = 0.23, 0.65
"""Cost of an operator's call in a step of one client: replayed, and where it isn't."""
PROGRAM, SHARED = 13.0, 0.04
"""Cost of a program of many clients, and of an operator in it for each of them."""
CALL_OF_PROGRAM, CALL_OF_GROUP, CALL_OF_PROGRAM_WATCHED = 0.22, 1.0, 3.0
"""Cost of an operator's call in a program: where steps are replayed as a whole, where gradients
alone are, as the clients' minibatches have several sizes, and where nothing is."""
CONVOLUTION, CONVOLUTION_OF_PROGRAM = 22.0, 32.0
"""Cost of a convolution in a gradient of one client, whose channels are few for its operators, and
in a program of many."""
ALONE, TOGETHER, RECURRENT_TOGETHER = 1.0, 1.16, 1.6
"""Cost of a million operations of matrix products in a gradient of one client, and of many; in
recurrent layers more, as theirs are of one word each."""
WEIGHTS_TOGETHER = 15.0
"""Cost of a million weights in a gradient of many, whose models share the caches."""
TOGETHER_IN_THREADS = 1.1
"""Cost of a million operations of many with several threads, but in recurrent layers, for which one
client's operators are too small: with two threads products of ten clients take half of the time, a
client's step four fifths."""
ALONE_BY_BLAS = 1.4
"""Cost of a million operations of one client where torch's BLAS computes its products, too: without
AVX-512 oneDNN is no faster."""
CONVOLVED, CONVOLVED_TOGETHER = 0.56, 0.65
"""The same in networks with convolutions, with any number of threads."""
FORWARD = 1 / 3
"""The forward pass's share of a gradient."""

CALLS_ON_FEATURES = 2 / 3
"""The share of a step's calls that counts on cached features: the head's operators, and what each
step costs beside operators."""

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
class Gradient:
    """The parts of one client's gradient and step, on average over all phases.

    Args:
        operations: Floating-point operations.
        calls: Operators that are called, without views.
        convolutions: Convolutions, forward.
        recurrent: Those of the operations that are in recurrent layers.
        weights: Parameters of the network.
    """

    operations: float
    calls: float
    convolutions: float = 0.0
    recurrent: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class Share:
    """Gradients of one client in a phase.

    Args:
        gradients: Their number.
        served: Clients that one program serves on average.
        grouped: Whether clients of one step run in several programs, as their minibatches have
            several sizes and can't be padded.
        cached: Whether the frozen backbone's features are cached when clients run together, so that
            hardly any operations are left after the first pass over the data.
        passes: Passes over the data, where features are cached.
        cached_alone: Whether they also are where one client runs after another.
    """

    gradients: int
    served: float
    grouped: bool = False
    cached: bool = False
    passes: int = 1
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
    gradient: Gradient,
    shares: Iterable[Share],
    replayed: bool = False,
    threads: int = 1,
    by_onednn: bool = True,
) -> bool:
    """Whether clients train faster together than one after another.

    Args:
        gradient: A gradient's parts, on average over the shares.
        shares: A client's gradients in a round, one share of each phase.
        replayed: Whether steps are replayed.
        threads: Threads within an operator.
        by_onednn: Whether oneDNN computes one client's large products.

    Example:
        >>> [batching_pays(Gradient(1e6, 60), [Share(6, served)], True) for served in (2, 10)]
        [False, True]
        >>> [batching_pays(Gradient(80e6, 60), [Share(6, 10)], True, some) for some in (1, 2)]
        [False, True]
    """
    shares = list(shares)
    rate = ALONE if by_onednn else ALONE_BY_BLAS
    rate_together = TOGETHER if threads == 1 else TOGETHER_IN_THREADS
    if gradient.convolutions > 0:
        rate, rate_together = CONVOLVED, CONVOLVED_TOGETHER
    elif gradient.operations > 0:
        recurrent = gradient.recurrent / gradient.operations
        rate_together += recurrent * (RECURRENT_TOGETHER - rate_together)
        if threads == 1:
            rate_together += WEIGHTS_TOGETHER * gradient.weights / gradient.operations
    call = CALL if replayed else CALL_WATCHED
    # Above a frozen backbone a gradient has the forward pass alone, a third of the operations.
    parts = [FORWARD if share.cached else 1.0 for share in shares]
    full = gradient.operations / 1e6 * len(shares) / sum(parts)
    alone = together = 0.0
    for share, part in zip(shares, parts, strict=True):
        work, convolutions = full * part, part * gradient.convolutions
        # The first pass computes the features.
        batched = share.gradients / share.passes if share.cached else share.gradients
        computed = batched if share.cached_alone else share.gradients
        alone += computed * (convolutions * CONVOLUTION + rate * work)
        calls = gradient.calls * (CALLS_ON_FEATURES if share.cached else 1.0)
        alone += share.gradients * calls * call
        of_program = CALL_OF_GROUP if share.grouped else CALL_OF_PROGRAM
        of_program = of_program if replayed else CALL_OF_PROGRAM_WATCHED
        program = (PROGRAM + calls * of_program) / share.served
        together += share.gradients * (calls * SHARED + program)
        convolved_once = convolutions * CONVOLUTION_OF_PROGRAM / share.served
        together += batched * (convolved_once + rate_together * work)
    return together <= alone


def evaluating_pays(
    operations: float,
    load: Load,
    replayed: bool,
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
