"""Arithmetic on trees: nested dicts of tensors, with or without a leading client axis.

``(clients, ...)`` in a docstring means that every leaf has a leading client axis of that length. A
leaf whose client axis has stride 0 is *expanded*: one tensor that all clients share, at no cost in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.kept_memory import KeptMemory
from lightning_pfl.core.sums import as_rows, double_sum, means_of_rows
from lightning_pfl.core.transfer import send

Tree = dict[str, Any]
"""A nested dict whose leaves are tensors."""
Path = tuple[str, ...]
"""Where a leaf is: the names on the way from the root, such as ``("model", "head.weight")``."""
Model = dict[str, Tensor]
"""A flat tree: tensors by parameter or buffer name, as in the module's ``state_dict()``."""


def tmap(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply ``fn`` to the leaves of ``tree`` and to the leaves of ``others`` of the same names.

    ``others`` may have more names than ``tree``, never fewer.
    """
    if not others:  # a third of the time
        return {
            name: tmap(fn, leaf) if isinstance(leaf, dict) else fn(leaf)
            for name, leaf in tree.items()
        }
    return {
        name: tmap(fn, leaf, *(other[name] for other in others))
        if isinstance(leaf, dict)
        else fn(leaf, *(other[name] for other in others))
        for name, leaf in tree.items()
    }


def map_items(fn: Callable[[Path, Any], Any], tree: Tree, root: Path = ()) -> Tree:
    """Apply ``fn`` to the path and the leaf of every entry; ``root`` is where the tree begins."""
    return {
        name: map_items(fn, leaf, (*root, name))
        if isinstance(leaf, dict)
        else fn((*root, name), leaf)
        for name, leaf in tree.items()
    }


def items(tree: Tree, root: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Iterate over the paths and the leaves of a tree, in its order.

    Args:
        tree: The tree.
        root: Where it begins.

    Example:
        >>> list(items({"model": {"weight": 1}, "count": 2}))
        [(('model', 'weight'), 1), (('count',), 2)]
    """
    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            yield from items(leaf, (*root, name))
        else:
            yield (*root, name), leaf


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Iterate over the tensors of a tree, in its order."""
    for leaf in tree.values():
        if isinstance(leaf, dict):
            yield from leaves(leaf)
        else:
            yield leaf


def named_leaves(tree: Tree) -> dict[str, Tensor]:
    """Return the leaves by path, such as ``"model/head.weight"``."""
    return {"/".join(path): leaf for path, leaf in items(tree)}


def leaf_at(tree: Tree, path: Path) -> Tensor | None:
    """Return the leaf at a path; None where there is none."""
    found: Any = tree
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, Tensor) else None


def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Return the leaves' shapes by path, such as ``"model/head.weight"``."""
    return {path: tuple(leaf.shape) for path, leaf in named_leaves(tree).items()}


def select(model: Model, names: Iterable[str]) -> Model:
    """Keep the entries of ``model`` that are in ``names``, in the order of ``model``."""
    wanted = frozenset(names)
    return {name: leaf for name, leaf in model.items() if name in wanted}


def floats(model: Model) -> Model:
    """Keep the floating-point entries: no integer counters, no masks."""
    return {name: leaf for name, leaf in model.items() if leaf.is_floating_point()}


# --- the client axis ---


def expand(tree: Tree, clients: int) -> Tree:
    """Give every leaf a leading client axis of stride 0: the same tensor for all, no copy.

    ``as_strided`` sets the stride to 0 for a single client too, where ``expand`` doesn't;
    :func:`is_expanded` needs it.
    """
    return tmap(lambda leaf: leaf.as_strided((clients, *leaf.shape), (0, *leaf.stride())), tree)


def repeat(tree: Tree, clients: int) -> Tree:
    """Give every leaf a leading client axis with one copy per client."""

    def copies(leaf: Tensor) -> Tensor:
        wide = leaf.expand(clients, *leaf.shape)
        return wide.clone(memory_format=torch.contiguous_format)

    return tmap(copies, tree)


def is_expanded(leaf: Tensor) -> bool:
    """Whether the leaf's client axis has stride 0, so that all clients share one tensor."""
    return leaf.ndim > 0 and leaf.stride(0) == 0


def rows(tree: Tree, index: slice | Tensor) -> Tree:
    """Select clients of a ``(clients, ...)`` tree: views for a slice, copies for a tensor.

    A tensor of positions may be on another device.
    """
    if isinstance(index, Tensor):
        index = send(index, next((leaf.device for leaf in leaves(tree)), index.device))

    def take(leaf: Tensor) -> Tensor:
        if isinstance(index, slice):
            return leaf[index]
        if is_expanded(leaf):
            return leaf.as_strided(
                (len(index), *leaf.shape[1:]), leaf.stride(), leaf.storage_offset()
            )
        return leaf.index_select(0, index)

    return tmap(take, tree)


def put_rows(tree: Tree, index: Tensor, new: Tree) -> Tree:
    """Replace the rows of some clients in a copy of a ``(clients, ...)`` tree.

    Args:
        tree: Rows of all clients, ``(clients, ...)``.
        index: Clients to replace, int64 ``(selected,)``.
        new: Their new rows, ``(selected, ...)``.
    """
    return tmap(lambda old, rows: old.index_copy(0, send(index, old.device), rows), tree, new)


def put_corner(tree: Tree, axes: int, corner: Tree) -> Tree:
    """Replace the first entries along some leading axes in a copy of a tree.

    Args:
        tree: Leaves with at least ``axes`` axes.
        axes: Number of these axes.
        corner: Leaves that are no longer than those of ``tree`` along them.

    Example:
        >>> put_corner({"w": torch.eye(2)}, 2, {"w": torch.tensor([[5.0]])})["w"].tolist()
        [[5.0, 0.0], [0.0, 1.0]]
    """

    def put(leaf: Tensor, first: Tensor) -> Tensor:
        new = leaf.clone()
        new[tuple(slice(size) for size in first.shape[:axes])] = first.to(leaf)
        return new

    return tmap(put, tree, corner)


def merge(parts: Sequence[tuple[slice | Tensor, Tree]], count: int) -> Tree:
    """Merge trees of some clients each into one of all, ``(count, ...)``, in their order.

    Args:
        parts: Positions of clients and their tree, ``(clients, ...)``; together each position once.
            A slice is of all clients.
        count: Number of clients.

    Raises:
        KeyError: If the trees have different names.
    """
    if len(parts) == 1 and isinstance(parts[0][0], slice):
        return parts[0][1]
    order = torch.cat([at for at, _ in parts if isinstance(at, Tensor)])
    place = torch.empty(count, dtype=torch.int64)
    place[order] = torch.arange(count)
    joined = tmap(lambda *found: torch.cat(found), *(tree for _, tree in parts))
    return tmap(lambda leaf: leaf.index_select(0, send(place, leaf.device)), joined)


def separated(tree: Tree, *others: Tree) -> Tree:
    """Copy the leaves that share memory with another leaf of ``tree`` or ``others``.

    Local training changes leaves in place, without effect on others. Expanded leaves stay expanded
    until they are trained.
    """
    taken = {memory for other in others for leaf in leaves(other) if (memory := _memory(leaf))}

    def with_own_memory(leaf: Tensor) -> Tensor:
        if is_expanded(leaf):
            return leaf
        if _memory(leaf) in taken:
            leaf = leaf.clone()
        taken.add(_memory(leaf))
        return leaf

    return tmap(with_own_memory, tree)


def _memory(leaf: Tensor) -> tuple[torch.device, int]:
    return leaf.device, leaf.untyped_storage().data_ptr()


def stack(trees: list[Tree]) -> Tree:
    """Concatenate trees along their client axes; leaves that all share one tensor stay expanded."""
    if len(trees) == 1:
        return trees[0]

    def join(*parts: Tensor) -> Tensor:
        first = parts[0]
        if all(is_expanded(part) and part.data_ptr() == first.data_ptr() for part in parts):
            return first.as_strided(
                (sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset()
            )
        return torch.cat(parts)

    return tmap(join, trees[0], *trees[1:])


class Stacked:
    """Trees of some clients, ``(some, ...)`` each, copied to their rows one after another.

    The result is that of :func:`stack`; nothing needs a tree after its :meth:`put`.

    Args:
        clients: Number of clients.
        memory: Where the rows are made.
    """

    def __init__(self, clients: int, memory: KeptMemory) -> None:
        self._clients, self._memory, self._columns = clients, memory, Tree()

    def put(self, at: int | Tensor, tree: Tree) -> None:
        """Copy the tree of a client, or of several at these positions; each once."""
        if not self._columns:
            self._columns = tmap(lambda _: _Column(self._clients, self._memory), tree)
        tmap(lambda column, leaf: column.put(at, leaf), self._columns, tree)

    def tree(self) -> Tree:
        """Return all rows, ``(clients, ...)``; a leaf that all share stays expanded."""
        return tmap(lambda column: column.leaf(), self._columns)


class _Column:
    """One leaf of all clients."""

    def __init__(self, clients: int, memory: KeptMemory) -> None:
        self._clients, self._memory = clients, memory
        self._rows: Tensor | None = None
        self._shared: Tensor | None = None

    def put(self, at: int | Tensor, leaf: Tensor) -> None:
        if self._rows is None:
            before = self._shared
            if is_expanded(leaf) and (before is None or leaf.data_ptr() == before.data_ptr()):
                self._shared = leaf
                return
            self._rows = self._memory.empty((self._clients, *leaf.shape[1:]), leaf)
            if before is not None:
                self._rows[:] = before[0]
        self._rows[at] = leaf[0] if isinstance(at, int) else leaf

    def leaf(self) -> Tensor:
        if self._rows is not None:
            return self._rows
        assert self._shared is not None
        leaf = self._shared
        shape, strides = (self._clients, *leaf.shape[1:]), leaf.stride()
        return leaf.as_strided(shape, strides, leaf.storage_offset())


def per_client(scalar: Tensor, leaf: Tensor) -> Tensor:
    """Reshape a ``(clients,)`` tensor so that it broadcasts against a ``(clients, ...)`` leaf."""
    return scalar.to(leaf.dtype).view(-1, *[1] * (leaf.ndim - 1))


def where(chosen: Tensor, new: Tree, old: Tree) -> Tree:
    """Take ``new`` for some clients and ``old`` for the others, on the names of ``new``.

    Args:
        chosen: Clients that take ``new``, bool ``(clients,)``.
        new: ``(clients, ...)``.
        old: ``(clients, ...)``.
    """

    def choose(ours: Tensor, theirs: Tensor) -> Tensor:
        mask = send(chosen, ours.device).view(-1, *[1] * (ours.ndim - 1))
        return torch.where(mask, ours, theirs)

    return tmap(choose, new, old)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    """Multiply by a number, or by one number per client, ``(clients,)``."""
    if isinstance(factor, Tensor) and factor.ndim == 1:
        return tmap(lambda leaf: leaf * per_client(factor, leaf), tree)
    return tmap(lambda leaf: leaf * factor, tree)


def add(a: Tree, b: Tree) -> Tree:
    """Add: ``a + b`` on the names of ``a``."""
    return tmap(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Subtract: ``a - b`` on the names of ``a``."""
    return tmap(torch.sub, a, b)


def dot(a: Tree, b: Tree) -> Tensor:
    """Compute each client's inner product of two trees, ``(clients,)``, on the names of ``a``."""
    parts = [
        as_rows(x * y).sum(1)
        for x, y in zip(leaves(a), leaves(tmap(lambda _, y: y, a, b)), strict=True)
    ]
    return torch.stack(parts).sum(0)


def sqnorm(tree: Tree) -> Tensor:
    """Compute the squared Euclidean norm of each client's tree, ``(clients,)``."""
    return dot(tree, tree)


def finite(tree: Tree) -> Tensor:
    """Find the clients whose trees hold neither NaN nor Inf, bool ``(clients,)``."""
    found = [as_rows(leaf) for leaf in leaves(tree) if leaf.is_floating_point()]
    if not found:
        return torch.ones((), dtype=torch.bool)
    # A sum is finite only if all of its terms are, and reads them once. It may overflow, and a
    # device other than the CPU would wait for the answer.
    sums = torch.stack([flat.sum(1).double() for flat in found]).isfinite().all(0)
    if sums.device.type == "cpu" and sums.all():
        return sums
    return torch.stack([flat.isfinite().all(1) for flat in found]).all(0)


def weighted_mean(tree: Tree, weights: Tensor) -> Tree:
    """Average a ``(clients, ...)`` tree over its client axis.

    Float leaves are averaged with ``weights`` (shape ``(clients,)``, summing to 1); integer and
    bool leaves, such as BatchNorm's batch counters, take the maximum. Differences to the smallest
    row are averaged, in double precision: equal rows have exactly their own mean. No order of the
    clients changes a bit, see ``core/sums.py``.
    """
    averaged = [leaf for leaf in leaves(tree) if leaf.is_floating_point() and not is_expanded(leaf)]
    means = iter(means_of_rows(averaged, weights))

    def mean(leaf: Tensor) -> Tensor:
        if is_expanded(leaf):
            return leaf[0]
        return next(means) if leaf.is_floating_point() else leaf.amax(0)

    return tmap(mean, tree)


def weighted_sum(tree: Tree, weights: Tensor, origin: Tree | None = None) -> Tree:
    """Sum the differences of a ``(clients, ...)`` tree of floats to ``origin`` with weights.

    Args:
        tree: ``(clients, ...)``; only its names are summed.
        weights: ``(clients,)``.
        origin: What is subtracted from each client's rows, without client axis; None for 0.
    """
    if origin is None:
        return tmap(lambda leaf: double_sum(leaf, weights).to(leaf.dtype), tree)
    return tmap(
        lambda leaf, start: double_sum(leaf, weights, start.unsqueeze(0)).to(leaf.dtype),
        tree,
        origin,
    )


def total_nbytes(tree: Tree) -> int:
    """Count the bytes of a tree."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def nbytes(tree: Tree) -> int:
    """Count the bytes of one client's rows of a ``(clients, ...)`` tree: one upload or download."""
    return sum(leaf[0].numel() * leaf.element_size() for leaf in leaves(tree) if len(leaf))


def flat(model: Model, names: Iterable[str]) -> Tensor:
    """Flatten the named entries of ``(clients, ...)`` models to vectors, ``(clients, dim)``."""
    return torch.cat([as_rows(model[name]) for name in names], 1)


def unflat(vectors: Tensor, like: Model, names: Iterable[str]) -> Model:
    """Undo :func:`flat`.

    Args:
        vectors: ``(clients, dim)``.
        like: Entries with the wanted shapes; the length of their first axis doesn't matter.
        names: Names of the entries, in the order of :func:`flat`.
    """
    wanted = [(name, like[name]) for name in names]
    parts = vectors.split([leaf.shape[1:].numel() for _, leaf in wanted], 1)
    return {
        name: part.view(len(vectors), *leaf.shape[1:]).to(leaf.dtype)
        for (name, leaf), part in zip(wanted, parts, strict=True)
    }


def materialize(model: Model, names: tuple[str, ...]) -> None:
    """Copy expanded leaves in place of them, before a forward pass writes to them."""
    for name in names:
        if name in model and is_expanded(model[name]):
            model[name] = model[name].clone(memory_format=torch.contiguous_format)
