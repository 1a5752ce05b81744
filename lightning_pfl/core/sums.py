"""Sums over the rows of a tensor in double precision, some columns at a time.

A row is a client's entries: tensors are ``(clients, ...)``. Neither the order of the clients nor
which process has which of them changes a bit of :func:`mean_of_rows` and :func:`sum_above`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send

DOUBLED = 2**17
"""Number of entries that a sum on the CPU copies to double precision at once."""
FEW = 2**14
"""Number of entries up to which calling operators takes longer than their arithmetic."""
NUDGE = 1 + 2.0**-36
"""What a mean is multiplied by before it is rounded. Exact means of equal weights are often halfway
between two numbers, of four every fourth one. So they round away from zero, whichever way a sum in
double precision has rounded, and a mean moves by a few thousandths of what rounding may move it."""


def as_rows(leaf: Tensor) -> Tensor:
    """Flatten each client's entries to one row, ``(clients, dim)``; scalars too."""
    return leaf.flatten(1) if leaf.ndim > 1 else leaf.unsqueeze(1)


def means_of_rows(leaves: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Average the rows of each leaf, as :func:`mean_of_rows` does, the small ones together.

    Args:
        leaves: Floats, ``(clients, ...)``.
        weights: At least 0, ``(clients,)``; they sum to 1.

    Returns:
        Means that share no memory, ``(...)``.
    """
    together: dict[torch.dtype, list[int]] = defaultdict(list)
    for at, leaf in enumerate(leaves):
        if leaf.numel() <= FEW:
            together[leaf.dtype].append(at)
    found: dict[int, Tensor] = {}
    for some in together.values():
        wide = torch.cat([as_rows(leaves[at]) for at in some], 1)
        means = _mean(wide, weights).split([leaves[at].shape[1:].numel() for at in some])
        for at, mean in zip(some, means, strict=True):
            found[at] = mean.clone().view(leaves[at].shape[1:])
    return [
        found[at] if at in found else mean_of_rows(leaf, weights) for at, leaf in enumerate(leaves)
    ]


def mean_of_rows(leaf: Tensor, weights: Tensor) -> Tensor:
    """Average the rows of a leaf with the bits of :func:`sum_above`, rounded once to its dtype.

    On a CPU a plain mean in double precision takes a third of the time, and is within a bound of
    that of ``sum_above``. Where both ends of this interval round to the same number, so do both
    means. The others are hardly any, see :data:`NUDGE`.

    Args:
        leaf: Floats, ``(clients, ...)``.
        weights: At least 0, ``(clients,)``; they sum to 1.

    Returns:
        The means, ``(...)``.
    """
    return _mean(as_rows(leaf), weights).view(leaf.shape[1:])


def _mean(flat: Tensor, weights: Tensor) -> Tensor:
    if not flat.shape[1]:
        return flat.new_empty(0)
    wide = send(weights, flat.device, torch.float64)
    if flat.device.type != "cpu" or flat.dtype == torch.float64 or flat.numel() <= FEW:
        return _exact_mean(flat, wide)
    mean, together = flat.new_empty(flat.shape[1]), _columns_at_once(flat)
    bound = rounding(len(flat), float(wide.sum())) * largest(flat)
    unsure = torch.empty(flat.shape[1], dtype=torch.bool)
    # One buffer: a new one for each part costs as much as the arithmetic.
    buffer = wide.new_empty(len(flat) * min(together, flat.shape[1]))
    for first in range(0, flat.shape[1], together):
        at = slice(first, first + together)
        rows = flat[:, at]
        total = wide @ buffer[: rows.numel()].view(rows.shape).copy_(rows)
        mean[at], unsure[at] = rounded(total, bound, flat.dtype)
    if len(doubtful := unsure.nonzero().flatten()):
        mean[doubtful] = _exact_mean(flat.index_select(1, doubtful), wide)
    return mean


def largest(leaf: Tensor) -> float:
    """Return the largest absolute value; NaN if there is one."""
    # Two reads by the processor's wide registers, which `aminmax` doesn't use.
    return float(torch.maximum(-leaf.amin(), leaf.amax()))


def rounding(count: int, weight: float) -> float:
    """Bound how far a plain mean in double precision is from that of :func:`sum_above`.

    Args:
        count: Number of rows, in parts that are summed in any order.
        weight: The sum of their weights.

    Returns:
        The bound, for rows within 1 in absolute value.
    """
    # Of products and sums, and of the terms of `sum_above` to multiples of a spacing.
    return (8 * count + 16) * 2.0**-53 + abs(1 - weight)


def rounded(total: Tensor, bound: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round means in double precision, and say which may round to another number in truth.

    Args:
        total: The means, float64, which are changed.
        bound: How far they may be from the truth.
        dtype: What they are rounded to, of less precision.

    Returns:
        The rounded means, and a mask of the unsure ones.
    """
    mean = round_to(total - bound, dtype)
    # NaN, of which a bound would be anything, isn't equal to itself.
    return mean, mean.ne(round_to(total.add_(bound), dtype))


def round_to(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round means in double precision, float64, which are changed; see :data:`NUDGE`."""
    return total if dtype == torch.float64 else total.mul_(NUDGE).to(dtype)


def _exact_mean(rows: Tensor, weights: Tensor) -> Tensor:
    low, total = sum_above(rows, weights)
    return round_to(low.double() + total, rows.dtype)


def sum_above(
    leaf: Tensor, weights: Tensor, within: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Sum how far a leaf's rows are above the smallest entries, with weights that sum to 1.

    Each term is rounded to a multiple of the spacing of doubles at the column's largest difference.
    Sums of such multiples are exact, so that parts may be summed in any order and grouping: each
    process can sum the rows that it has. The error is at most the number of clients times that
    spacing, as for any sum in double precision.

    Args:
        leaf: Floats, ``(clients, ...)``.
        weights: At least 0, ``(clients,)``; with ``within`` those of some clients alone.
        within: The smallest and the largest entries of all clients, ``(...)``; None: these are all.

    Returns:
        The smallest entries, ``(...)`` in the dtype of the leaf, and the sums, float64 ``(...)``.

    References:
        Rump, Ogita, Oishi. Accurate floating-point summation. SIAM J. Sci. Comput. 2008, section 3.
    """
    flat = as_rows(leaf)
    wide = send(weights, flat.device, torch.float64).unsqueeze(1)
    bounds = None if within is None else [bound.flatten() for bound in within]
    lowest, total = flat.new_empty(flat.shape[1]), wide.new_empty(flat.shape[1])
    together = _columns_at_once(flat)
    buffer = wide.new_empty(len(flat) * min(together, flat.shape[1]))
    for first in range(0, flat.shape[1], together):
        at = slice(first, first + together)
        some = flat[:, at]
        low, high = (some.amin(0), some.amax(0)) if bounds is None else [b[at] for b in bounds]
        lowest[at] = low
        terms = buffer[: some.numel()].view(some.shape).copy_(some)
        terms.sub_(low).mul_(wide)
        # Adding a power of two that is larger than any term, and subtracting it, rounds a term.
        power = 2 * _power_of_two_below(high.double() - low)
        total[at] = terms.add_(power).sub_(power).sum(0)
    shape = leaf.shape[1:]
    return lowest.view(shape), total.view(shape)


def _power_of_two_below(numbers: Tensor) -> Tensor:
    """Return the largest powers of two that aren't above numbers >= 0; 0 for those below 2^-1022.

    Infinity and NaN give infinity.
    """
    exponents = numbers.view(torch.int64) & 0x7FF0000000000000
    return exponents.view(torch.float64)


def double_sum(leaf: Tensor, weights: Tensor, origin: Tensor | None = None) -> Tensor:
    """Sum a leaf's rows with weights in double precision, some columns at a time.

    Args:
        leaf: Floats, ``(clients, ...)``.
        weights: ``(clients,)``, or ``(groups, clients)`` for several sums.
        origin: What is subtracted from the rows first, ``(clients, ...)`` or ``(1, ...)``; None for
            0.

    Returns:
        float64, ``(...)`` or ``(groups, ...)``.
    """
    weights = send(weights, leaf.device, torch.float64)
    flat = as_rows(leaf)
    start = None if origin is None else as_rows(origin).expand_as(flat)
    together = _columns_at_once(flat)
    total = weights.new_empty((*weights.shape[:-1], flat.shape[1]))
    for first in range(0, flat.shape[1], together):
        at = slice(first, first + together)
        some = _doubled(flat, start, at)
        total[..., at] = weights @ some
    return total.view((*weights.shape[:-1], *leaf.shape[1:]))


def double_sqnorm(leaf: Tensor, origin: Tensor | None = None) -> Tensor:
    """Compute the squared norm of each row, summed in double precision, float64 ``(clients,)``.

    Args:
        leaf: Floats, ``(clients, ...)``.
        origin: What is subtracted from the rows first, ``(clients, ...)``; None for 0. Differences
            have the precision of the leaf, at least single.
    """
    flat = as_rows(leaf)
    start = None if origin is None else as_rows(origin)
    wide = torch.promote_types(leaf.dtype, torch.float32)
    together = _columns_at_once(flat)
    parts: list[Tensor] = []
    for first in range(0, max(flat.shape[1], 1), together):
        at = slice(first, first + together)
        some = flat[:, at] if start is None else flat[:, at].to(wide) - start[:, at]
        # Reads single precision as double, where a copy would cost more than the sum.
        parts.append(torch.linalg.vector_norm(some, dim=1, dtype=torch.float64).square())
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _doubled(flat: Tensor, start: Tensor | None, at: slice) -> Tensor:
    """Copy some columns to double precision, less those of ``start``."""
    if start is None:
        return flat[:, at].double()
    return flat[:, at].to(torch.float64, copy=True).sub_(start[:, at])


def _columns_at_once(flat: Tensor) -> int:
    """Count the columns of rows ``(clients, dim)`` to copy to double precision at once."""
    # A processor's cache is small, and launching a kernel takes time on a GPU.
    return max(1, DOUBLED * (1 if flat.device.type == "cpu" else 64) // max(len(flat), 1))
