"""The messages of a deployment: a kind, plain values and arrays of numbers. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"PFL1"
"""The first bytes of every message: the version of the format."""
HEADER = 2**22
"""Bytes of a header at most: names and plain values, which never hold a model."""
NUMBERS = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
DTYPES = frozenset(("bool", *NUMBERS))
"""What arrays may hold."""
AXES = 16
"""Axes of an array at most."""
QUOTED = 500
"""Characters of a reason at most."""

Array = NDArray[Any]


class PacketError(ValueError):
    """A message that isn't what it should be.

    Args:
        reason: Text for a log; it may quote the message, so :func:`printable` makes it harmless.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


def printable(text: object) -> str:
    r"""Make foreign text fit for a log and a terminal: no control characters, no long stories.

    Example:
        >>> printable("\x1b[2Jhello")
        '[2Jhello'
    """
    return "".join(c for c in str(text)[:QUOTED] if c.isprintable())


UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""What reading a message that is a lie can raise."""


@dataclass
class Packet:
    """One message.

    Args:
        kind: What it asks or answers.
        meta: Plain values that JSON can hold.
        arrays: Arrays of numbers by path. Numpy knows no bfloat16: such an array holds its bits as
            int16, and ``bfloat16`` names its path.
        bfloat16: Paths of the arrays whose numbers are bfloat16.
    """

    kind: str
    meta: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    bfloat16: frozenset[str] = frozenset()

    def dtype(self, path: str) -> str:
        """Name the dtype of an array."""
        return "bfloat16" if path in self.bfloat16 else str(self.arrays[path].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def to_bytes(self) -> bytes:
        """Write the message: the format's name, the header's length, the header, the numbers."""
        listed = [[path, self.dtype(path), list(a.shape)] for path, a in self.arrays.items()]
        header = json.dumps({"kind": self.kind, "meta": self.meta, "arrays": listed}).encode()
        numbers = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        return b"".join([MAGIC, len(header).to_bytes(8, "little"), header, *numbers])

    @classmethod
    def from_bytes(cls, data: bytes, limit: int | None = None) -> Packet:
        """Read a message; its arrays are views of ``data`` and can't be written to.

        All sizes are compared with the bytes that are there before any array is made.

        Args:
            data: What arrived.
            limit: Bytes at most; None for no bound.

        Raises:
            PacketError: If it is too large, truncated, or no message at all.
        """
        if limit is not None and len(data) > limit:
            raise PacketError(f"message has {len(data)} bytes, more than the {limit} expected")
        if data[:4] != MAGIC:
            raise PacketError("message is of another format")
        size = int.from_bytes(data[4:12], "little")
        if not 0 < size <= min(HEADER, len(data) - 12):
            raise PacketError(f"message has a header of {size} bytes")
        kind, meta, listed = _read_header(data[12 : 12 + size])
        at, arrays, halves = 12 + size, {}, set()
        for entry in listed:
            path, dtype, shape = _read_entry(entry)
            stored = np.dtype("int16" if dtype == "bfloat16" else dtype)
            count = prod(shape)
            if count * stored.itemsize > len(data) - at:
                raise PacketError(
                    f"entry {path!r} says {dtype} {tuple(shape)}, but the message ends before"
                )
            if path in arrays:
                raise PacketError(f"entry {path!r} comes twice")
            arrays[path] = np.frombuffer(data, stored, count, at).reshape(shape)
            halves |= {path} if dtype == "bfloat16" else set()
            at += count * stored.itemsize
        if at != len(data):
            raise PacketError(f"message has {len(data) - at} bytes that no entry names")
        return cls(kind, meta, arrays, frozenset(halves))

    def require(self, kinds: Mapping[str, Any]) -> None:
        """Require plain values of the given types.

        Args:
            kinds: The type, or the types, of each value by its name.

        Raises:
            PacketError: Names the first that is missing or of another type.
        """
        for name, kind in kinds.items():
            if name not in self.meta:
                raise PacketError(f"{self.kind} lacks {name!r}")
            value = self.meta[name]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise PacketError(f"{name!r} of {self.kind} is a {type(value).__name__}")


def _read_header(data: bytes) -> tuple[str, dict[str, Any], list[Any]]:
    try:
        header = json.loads(data)
        kind, meta, listed = header["kind"], header["meta"], header["arrays"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PacketError(f"message has a header that can't be read ({error})") from error
    if not (isinstance(kind, str) and isinstance(meta, dict) and isinstance(listed, list)):
        raise PacketError("message has a header of another form")
    return kind, meta, listed


def _read_entry(entry: Any) -> tuple[str, str, list[int]]:
    match entry:
        case [str(path), str(dtype), list(shape)]:
            sizes = [s for s in shape if isinstance(s, int) and not isinstance(s, bool) and s >= 0]
            if dtype not in DTYPES:
                raise PacketError(f"entry {path!r} is of dtype {dtype!r}, not of numbers")
            if len(sizes) != len(shape) or len(shape) > AXES:
                raise PacketError(f"entry {path!r} has the shape {shape!r}")
            return path, dtype, sizes
    raise PacketError("message has an entry that isn't a path, a dtype and a shape")
