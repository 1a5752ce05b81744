"""Gradients of slices of a tensor, which a program writes side by side.

The gradient of a slice is a tensor of zeros but for the slice's place. Where several slices of a
tensor are read, as attention reads queries, keys and values, these are summed. A program has one
tensor for the sum, of which it writes each part in place: no zeros are made, read or added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.engine.recording import Call

aten = torch.ops.aten
_VIEWS = {
    aten.select_backward.default: aten.select.int,
    aten.slice_backward.default: aten.slice.Tensor,
}
"""By the operator of a slice's gradient the slice."""
KEPT = 2**18
"""Largest number of entries of zeros around slices that a program keeps."""


@dataclass(frozen=True)
class Slice:
    """The gradient of a slice.

    Attributes:
        gradient: Its name.
        operator: The slice.
        shape: The shape of the tensor that was sliced.
        settings: Dimension and positions.
    """

    gradient: str
    operator: Any
    shape: tuple[int, ...]
    settings: tuple[Any, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return the slice of a tensor."""
        view: Tensor = self.operator(whole, *self.settings)
        return view

    def positions(self) -> set[int]:
        """Return what it has of its dimension."""
        dim, *where = self.settings
        every = range(self.shape[dim])
        return {every[where[0]]} if len(where) == 1 else {*every[slice(*where)]}


@dataclass(frozen=True)
class Sum:
    """A sum of gradients of slices that share no entry, or the gradient of one.

    Attributes:
        slices: By the name of each gradient, as zeros surround it, its slice.
        inner: Names of the sums of some of them.
    """

    slices: dict[str, Slice]
    inner: frozenset[str] = frozenset()

    def apart(self, other: Sum) -> bool:
        """Whether two sums share no entry, as far as slices of one dimension show."""
        one, two = self._any(), other._any()
        alike = one.shape == two.shape and one.settings[0] == two.settings[0]
        return alike and self._positions().isdisjoint(other._positions())

    def fills(self) -> bool:
        """Whether the slices have all entries."""
        one = self._any()
        count: int = one.shape[one.settings[0]]
        return len(self._positions()) == count

    def size(self) -> int:
        """Count the entries."""
        return math.prod(self._any().shape)

    def writes(self, name: str, place: str) -> Call:
        """Return the call that writes one of the gradients to its place."""
        gradient = self.slices[name].gradient
        reads, writes = frozenset({gradient}), frozenset({place})
        if len(self.slices) == 1:
            return Call(aten.copy_.default, f"{place}, {gradient}", reads, ("_",), False, writes)
        # As in the sum, where -0 becomes 0.
        text = f"{gradient}, 0, out={place}"
        return Call(aten.add.out, text, reads, ("_",), False, writes)

    def _any(self) -> Slice:
        return next(iter(self.slices.values()))

    def _positions(self) -> set[int]:
        return set[int]().union(*(one.positions() for one in self.slices.values()))


def sums_of_slices(calls: Sequence[Call], kept: Collection[str]) -> dict[str, Sum]:
    """Return the sums of gradients of slices by their names, the largest ones.

    Args:
        calls: The operators of a program.
        kept: Names of tensors that other operators change, or that are wanted in the end.
    """
    reads = Counter(name for call in calls for name in call.reads)
    found: dict[str, Sum] = {}
    for call in calls:
        name, texts = call.makes[0], call.text.split(", ")
        if name in kept or call.several:
            continue
        if call.operator in _VIEWS:
            gradient, _, rest = call.text.partition(", ")
            shape, *settings = eval(f"[{rest}]")
            one = Slice(gradient, _VIEWS[call.operator], tuple(shape), tuple(settings))
            found[name] = Sum({name: one})
        elif call.operator is aten.add.Tensor and len({*texts}) == 2 and {*texts} <= {*found}:
            first, second = (found[text] for text in texts)
            if all(reads[text] == 1 for text in texts) and first.apart(second):
                inner = {name, *first.inner, *second.inner}
                found[name] = Sum({**first.slices, **second.slices}, frozenset(inner))
                del found[texts[0]], found[texts[1]]
    return {name: one for name, one in found.items() if one.fills() or one.size() <= KEPT}
