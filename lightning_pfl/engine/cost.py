"""An estimate of which engine is faster on a CPU, from a step's floating-point operations.

Batching over clients saves the time that Python and torch take for each call, and pays with
arithmetic that is further from the caches: weights and activations of many clients at once. So it
wins on small networks and loses on large ones. The unit of the estimate is the time of a million
operations in the sequential engine, and its constants are a fit to the ratios in
``docs/speed.md``.

It is no clock, because a seed must give the same numbers in every run, and the engines differ in
the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CALL_ALONE = 62.0
"""Cost of the calls in a gradient of one client."""
CALL_TOGETHER = 7.0
"""A client's share of the calls in a gradient of many clients."""
PROGRAM = 70.0
"""Cost of the calls in a gradient of many clients, which few share where minibatches of other sizes
can't be padded."""
BATCHED = 1.5
"""Cost of a million operations for many clients at once."""
CALL_REPLAYED = 12.0
"""Cost of the calls in a gradient of one client, if whole steps are recorded and replayed."""
REPLAYED = 0.75
"""Cost of a million operations of matrix products in a replayed step, of which oneDNN runs the
large ones (``kernels.py``)."""
FORWARD = 1 / 3
"""The forward pass's share of a gradient's operations."""


@dataclass(frozen=True)
class Share:
    """Gradients of one client in a phase.

    Args:
        gradients: Their number.
        cached: Whether the frozen backbone's features are cached when clients run together, so that
            hardly any operations are left after the first pass over the data.
        passes: Passes over the data, where features are cached.
        served: Clients of unequal sizes that one program serves on average; None for equal ones,
            and where minibatches are padded.
    """

    gradients: int
    cached: bool = False
    passes: int = 1
    served: float | None = None


def batching_pays(operations: float, shares: Iterable[Share], replayed: bool = False) -> bool:
    """Whether clients train faster together than one after another.

    Args:
        operations: Floating-point operations of one client's gradient, on average over the shares.
        shares: Its gradients in a round, one share of each phase.
        replayed: Whether one client's step would be replayed, and has no convolutions, which
            torch's operators run.

    Example:
        >>> batching_pays(17e6, [Share(60)]), batching_pays(700e6, [Share(5)])
        (True, False)
    """
    shares = list(shares)
    # Above a frozen backbone a gradient has the forward pass alone, a third of the operations.
    parts = [FORWARD if share.cached else 1.0 for share in shares]
    full = operations / 1e6 * len(shares) / sum(parts)
    alone = together = 0.0
    for share, part in zip(shares, parts, strict=True):
        work = full * part
        one = REPLAYED * work + CALL_REPLAYED if replayed else work + CALL_ALONE
        alone += share.gradients * one
        # The first pass computes the features.
        batched = share.gradients / share.passes if share.cached else share.gradients
        calls = CALL_TOGETHER
        if share.served is not None:
            calls = max(calls, PROGRAM / share.served)
        together += batched * BATCHED * work + share.gradients * calls
    return together <= alone
