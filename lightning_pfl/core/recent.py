"""A dict of limited size."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dict that forgets the entry that was written or read, as ``d[key]``, the longest time ago.

    Args:
        limit: Largest number of entries, >= 1.

    Example:
        >>> known = Recent(2)
        >>> known["a"], known["b"] = 1, 2
        >>> known["a"]
        1
        >>> known["c"] = 3
        >>> list(known)
        ['a', 'c']
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.limit:
            del self[next(iter(self))]  # `popitem` of Python 3.10 reads it, as above
