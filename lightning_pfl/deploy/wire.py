"""Trees of tensors as the arrays of a message, and back; what arrives is checked leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.tree import Tree, expand, is_expanded
from lightning_pfl.deploy.packet import Array, Packet, PacketError

EMPTY = "~"
"""Ends the path of an empty subtree, which is not the same as none; in names "~" is escaped."""

Form = dict[str, tuple[tuple[int, ...], str]]
"""Path of a leaf to its shape without the client axis, and its dtype."""


def escape(name: str) -> str:
    """Write a name as a part of a path; names may hold slashes (as in JSON pointers).

    Example:
        >>> escape("head/0~")
        'head~10~0'
    """
    return name.replace("~", "~0").replace("/", "~1")


def unescape(part: str) -> str:
    """Read a part of a path as a name."""
    return part.replace("~1", "/").replace("~0", "~")


def flatten(tree: Tree, prefix: str) -> Iterator[tuple[str, Tensor | None]]:
    """Walk over paths and leaves; None stands for an empty subtree.

    Example:
        >>> list(flatten({"model": {}, "w": torch.zeros(1)}, "up"))
        [('up/model/~', None), ('up/w', tensor([0.]))]
    """
    if not tree:
        yield f"{prefix}/{EMPTY}", None
    for name, leaf in tree.items():
        path = f"{prefix}/{escape(name)}"
        if isinstance(leaf, dict):
            yield from flatten(leaf, path)
        else:
            yield path, leaf


def unflatten(leaves: Iterable[tuple[str, Tensor | None]], prefix: str) -> Tree:
    """Undo :func:`flatten`."""
    tree: Tree = {}
    for path, leaf in leaves:
        *parents, last = path[len(prefix) + 1 :].split("/")
        place = tree
        for part in parents:
            place = place.setdefault(unescape(part), {})
        if leaf is not None:
            place[unescape(last)] = leaf
    return tree


def form_of(tree: Tree, prefix: str) -> Form:
    """Describe a ``(clients, ...)`` tree: the shapes of one client, and the dtypes."""
    return {
        path: ((), "") if leaf is None else (tuple(leaf.shape[1:]), dtype_name(leaf.dtype))
        for path, leaf in flatten(tree, prefix)
    }


def form_nbytes(form: Form) -> int:
    """Bytes of one client's leaves."""
    return sum(
        int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize
        for shape, dtype in form.values()
        if dtype
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as messages do.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def is_float(dtype: str) -> bool:
    """Return whether a dtype's name is one of floats."""
    found: torch.dtype = getattr(torch, dtype)
    return found.is_floating_point


class Writer:
    """Collects the arrays of a message."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.halves: set[str] = set()

    def add(self, path: str, leaf: Tensor | None) -> None:
        """Add a leaf; None for an empty subtree."""
        held = torch.empty(0, dtype=torch.uint8) if leaf is None else leaf.detach().cpu()
        if held.dtype == torch.bfloat16:
            self.halves.add(path)
            held = held.contiguous().view(torch.int16)
        self.arrays[path] = held.contiguous().numpy()

    def add_tree(self, tree: Tree, prefix: str) -> None:
        """Add all leaves of a tree as they are."""
        for path, leaf in flatten(tree, prefix):
            self.add(path, leaf)

    def add_rows(self, tree: Tree, prefix: str) -> None:
        """Add a ``(clients, ...)`` tree; a leaf that all clients share is sent once."""
        for path, leaf in flatten(tree, ""):
            shared = leaf is not None and is_expanded(leaf)
            kind = "same" if shared else "rows"
            self.add(f"{prefix}.{kind}{path}", leaf[0] if leaf is not None and shared else leaf)

    def packet(self, kind: str, meta: dict[str, object]) -> Packet:
        """Make the message."""
        return Packet(kind, meta, self.arrays, frozenset(self.halves))


def read_leaf(packet: Packet, path: str) -> Tensor | None:
    """Copy a leaf out of a message; None for an empty subtree."""
    if path.endswith(f"/{EMPTY}"):
        return None
    leaf = torch.from_numpy(np.array(packet.arrays[path]))
    return leaf.view(torch.bfloat16) if path in packet.bfloat16 else leaf


def read_tree(packet: Packet, prefix: str) -> Tree:
    """Read what :meth:`Writer.add_tree` has written."""
    paths = [path for path in packet.arrays if path.startswith(f"{prefix}/")]
    return unflatten(((path, read_leaf(packet, path)) for path in paths), prefix)


def read_rows(packet: Packet, prefix: str, clients: int) -> Tree:
    """Read what :meth:`Writer.add_rows` has written; shared leaves come as expanded ones.

    Raises:
        PacketError: If a leaf has another number of rows.
    """
    found: list[tuple[str, Tensor | None]] = []
    for path in packet.arrays:
        for kind in ("same", "rows"):
            start = f"{prefix}.{kind}"
            if not path.startswith(f"{start}/"):
                continue
            leaf = read_leaf(packet, path)
            if leaf is not None and kind == "same":
                leaf = expand({"": leaf}, clients)[""]
            if leaf is not None and len(leaf) != clients:
                raise PacketError(f"entry {path!r} has {len(leaf)} rows for {clients} clients")
            found.append((path[len(start) :], leaf))
    return unflatten(found, "")


def read_form(packet: Packet, prefix: str, form: Form, clients: int) -> Tree:
    """Read a ``(clients, ...)`` tree of exactly the expected leaves.

    Args:
        packet: What arrived.
        prefix: The tree's name.
        form: The expected leaves.
        clients: The expected rows.

    Raises:
        PacketError: Names the first leaf that is missing, unknown, or of another shape or dtype.
    """
    mine = [path for path in packet.arrays if path.startswith(f"{prefix}/")]
    if len(mine) != len(packet.arrays):
        raise PacketError(f"unknown entry {next(p for p in packet.arrays if p not in mine)!r}")
    for path in (*form, *mine):
        if path not in form:
            raise PacketError(f"unknown entry {path!r}")
        if path not in packet.arrays:
            raise PacketError(f"entry {path!r} is missing")
    for path, (shape, dtype) in form.items():
        if not dtype:
            continue
        array = packet.arrays[path]
        if packet.dtype(path) != dtype or array.shape != (clients, *shape):
            raise PacketError(
                f"entry {path!r} is {packet.dtype(path)} {array.shape}, "
                f"not {dtype} {(clients, *shape)}"
            )
    return unflatten(((path, read_leaf(packet, path)) for path in form), prefix)


def read_numbers(values: object, clients: int, what: str, largest: float) -> list[float]:
    """Read one number per client; NaN stands for no value.

    Args:
        values: What arrived.
        clients: How many numbers are expected.
        what: Their name, for the reason.
        largest: The largest absolute value.

    Raises:
        PacketError: If they are of another kind or number, or too large.
    """
    if not isinstance(values, list) or len(values) != clients:
        raise PacketError(f"{what!r} isn't one number for each of {clients} clients")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PacketError(f"{what!r} holds a {type(value).__name__}")
        if value == value and not abs(value) <= largest:
            raise PacketError(f"{what!r} holds {value}, which is not within {largest}")
    return [float(value) for value in values]


def read_counts(values: object, limits: Mapping[str, int], what: str) -> list[int]:
    """Read one count per client, each at most its limit.

    Raises:
        PacketError: If they are of another kind or number, negative or too large.
    """
    if not isinstance(values, list) or len(values) != len(limits):
        raise PacketError(f"{what!r} isn't one count for each of {len(limits)} clients")
    for (client, limit), value in zip(limits.items(), values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
            raise PacketError(f"{what!r} of {client!r} is {value!r}, not a count up to {limit}")
    return list(values)
