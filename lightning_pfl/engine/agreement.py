"""Whether a replay agrees with its step, for which both run on copies of the same tensors."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 1e-3, 1e-5
"""Largest relative and absolute difference of a replay from its step in single precision: 8,400
roundings, as of a sum of so many terms in another order. In double precision it is as many."""


def put_back(leaves: list[Tensor], before: list[Tensor]) -> None:
    """Undo what has written to tensors, of which there are copies by :func:`copy`."""
    with torch.no_grad():
        for leaf, old in zip(leaves, before, strict=True):
            if old is not leaf:
                leaf.copy_(old)


def copy(leaf: Tensor) -> Tensor:
    """Copy a tensor with its strides; one whose entries share memory is returned as it is."""
    # No step writes to a leaf whose entries share memory, as expanded ones of all clients do. One
    # client's row shares its memory with none, whatever its stride.
    if any(not n and size > 1 for n, size in zip(leaf.stride(), leaf.shape, strict=True)):
        return leaf
    # A recording has the strides of its arguments, which clone() keeps of dense ones alone.
    copied = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return copied.copy_(leaf)


def agree(replayed: list[Tensor], real: list[Tensor], given: list[Tensor]) -> bool:
    """Whether a replay agrees with its step: by the bits on a CPU, else up to rounding.

    A CPU repeats its sums, so that any difference comes from something else that the step reads.

    Args:
        replayed: Results of a replay.
        real: Those of the step.
        given: What both have computed with.
    """
    if [leaf.shape for leaf in replayed] != [leaf.shape for leaf in real]:
        return False
    if all(leaf.device.type == "cpu" for leaf in (*replayed, *real)):
        return all(map(_has_bits, replayed, real))
    return close(replayed, real, given)


def _has_bits(replayed: Tensor, real: Tensor) -> bool:
    # NaN isn't equal to itself.
    return torch.equal(replayed, real) or bool(
        torch.isclose(replayed, real, 0.0, 0.0, equal_nan=True).all()
    )


def close(replayed: list[Tensor], real: list[Tensor], given: list[Tensor]) -> bool:
    """Whether two results agree up to the rounding of what they are computed from.

    Waits for a device once.
    """
    unit = max(map(_rounding, given), default=0.0)
    pairs = zip(replayed, real, strict=True)
    found = [_close(*pair, unit).all() for pair in pairs]
    return bool(torch.stack([one.to(found[0].device) for one in found]).all())


def _rounding(leaf: Tensor) -> float:
    """Return the unit of rounding of a tensor's numbers; 0 for integers."""
    inexact = leaf.is_floating_point() or leaf.is_complex()
    return torch.finfo(leaf.dtype).eps if inexact else 0.0


def _close(replayed: Tensor, real: Tensor, unit: float) -> Tensor:
    units = max(unit, _rounding(real)) / torch.finfo(torch.float32).eps
    relative, absolute = (bound * min(1.0, units) for bound in CLOSE)
    return torch.isclose(replayed, real, relative, absolute, equal_nan=True)
