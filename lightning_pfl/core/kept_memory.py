"""Memory on the host that is used again, as fresh pages cost more than what is copied to them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALLEST = 2**16
"""Bytes from which a tensor's memory is kept; less than this the allocator keeps by itself."""
LIMIT = 2**27
"""Largest number of bytes that are kept."""
UNHELD = 3
"""References to an array in a list, in a loop over it, and in the call that counts them."""
NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


class KeptMemory:
    """Makes tensors in memory of earlier ones that nothing holds any more, no view either.

    A tensor over a NumPy array holds the array for as long as anything holds the tensor's memory.
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._used: set[int] = set()

    def begin_round(self) -> None:
        """Keep the memory that was used since the last call, and no other."""
        self._arrays = [array for array in self._arrays if id(array) in self._used]
        self._used = set()

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a contiguous tensor with the type and the device of another, not initialised."""
        length = math.prod(shape)
        size, kept = length * like.element_size(), sum(array.nbytes for array in self._arrays)
        if like.device.type != "cpu" or like.dtype not in NUMPY or size < SMALLEST:
            return like.new_empty(shape)
        kind = NUMPY[like.dtype]
        for array in self._arrays:
            if array.dtype == kind and len(array) == length and sys.getrefcount(array) == UNHELD:
                break
        else:
            if kept + size > LIMIT:
                return like.new_empty(shape)
            array = np.empty(length, kind)
            self._arrays.append(array)
        self._used.add(id(array))
        return torch.from_numpy(array).view(*shape)
