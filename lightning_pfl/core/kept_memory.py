"""Memory on the host that is used again, as fresh pages cost more than what is copied to them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST = 2**16
"""Bytes from which a tensor's memory is kept; less than this the allocator keeps by itself."""
LIMIT = 2**28
"""Largest number of bytes that are kept, also while clients are evaluated."""
NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


class KeptMemory:
    """Makes tensors in memory of earlier ones that nothing holds any more, no view either.

    A tensor over a NumPy array holds the array for as long as anything holds the tensor's memory.
    So each tensor gets an array of its own, a view of the memory that is kept.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def begin_round(self) -> None:
        """Keep the memory that was used since the last call, and no other."""
        self._pieces = [piece for piece in self._pieces if piece.used]
        for piece in self._pieces:
            piece.used = False

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a contiguous tensor with the type and the device of another, not initialised."""
        length = math.prod(shape)
        size = length * like.element_size()
        if like.device.type != "cpu" or like.dtype not in NUMPY or size < SMALLEST:
            return like.new_empty(shape)
        kind = np.dtype(NUMPY[like.dtype])
        for piece in self._pieces:
            if piece.is_free() and piece.memory.dtype == kind and len(piece.memory) == length:
                break
        else:
            if sum(piece.memory.nbytes for piece in self._pieces) + size > LIMIT:
                return like.new_empty(shape)
            piece = _Piece(np.empty(length, kind))
            self._pieces.append(piece)
        return torch.from_numpy(piece.lend()).view(*shape)


class _Piece:
    """Memory for one tensor at a time.

    Args:
        memory: The memory, as a vector.

    Attributes:
        used: Whether it was lent in this round.
    """

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory, self.used = memory, False
        self._lent: weakref.ref[np.ndarray[Any, Any]] | None = None

    def is_free(self) -> bool:
        """Whether nothing holds what was lent last."""
        return self._lent is None or self._lent() is None

    def lend(self) -> np.ndarray[Any, Any]:
        """Return an array over the memory; once nothing holds it, the memory is free."""
        array: np.ndarray[Any, Any] = self.memory.view()
        self.used, self._lent = True, weakref.ref(array)
        return array
