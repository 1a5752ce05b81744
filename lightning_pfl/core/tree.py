"""Arithmetic on trees: nested dicts of tensors, with or without a leading client axis.

``(clients, ...)`` in a docstring means that every leaf has a leading client axis of that length. A
leaf whose client axis has stride 0 is *expanded*: one tensor that all clients share, at no cost in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def merge(parts: Sequence[tuple[slice | Tensor, Tree]], count: int) -> Tree:
    """Trees of several groups as one ``(count, ...)``, in the order of the list they come from.

    Raises:
        KeyError: If they have different names.
    """
    if len(parts) == 1 and isinstance(parts[0][0], slice):
        return parts[0][1]
    order = torch.cat([at for at, _ in parts if isinstance(at, Tensor)])
    place = torch.empty(count, dtype=torch.int64)
    place[order] = torch.arange(count)
    joined = tmap(lambda *found: torch.cat(found), *(tree for _, tree in parts))
    return tmap(lambda leaf: leaf.index_select(0, place.to(leaf.device)), joined)


def values(
    parts: Sequence[tuple[slice | Tensor, Mapping[str, Tensor]]], count: int
) -> dict[str, Tensor]:
    """Logged values of several groups, ``(count,)``; NaN where a group logs no such value."""
    if len(parts) == 1 and isinstance(parts[0][0], slice):
        return dict(parts[0][1])
    found: dict[str, Tensor] = {}
    for at, logged in parts:
        for name, value in logged.items():
            gap = torch.full((count,), torch.nan, dtype=value.dtype, device=value.device)
            found.setdefault(name, gap)[at] = value
    return found


def split_rows(tree: Tree, at: slice | Tensor) -> Tree:
    """A group's rows of a tree; views where there is one group."""
    if isinstance(at, slice):
        return tree
    device = next((leaf.device for leaf in leaves(tree)), None)
    return rows(tree, at.to(device))


Tree = dict[str, Any]
"""A nested dict whose leaves are tensors."""
Model = dict[str, Tensor]
"""A flat tree: parameter or buffer name to tensor, named as in the module's ``state_dict()``."""


def tmap(fn: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply ``fn`` to the leaves of ``tree`` and to the leaves of ``others`` of the same names.

    ``others`` may have more names than ``tree`` (a model beside its gradients); they must not have
    fewer.
    """
    return {
        name: tmap(fn, leaf, *(other[name] for other in others))
        if isinstance(leaf, dict)
        else fn(leaf, *(other[name] for other in others))
        for name, leaf in tree.items()
    }


def leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree, in its order."""
    for leaf in tree.values():
        if isinstance(leaf, dict):
            yield from leaves(leaf)
        else:
            yield leaf


def shapes(tree: Tree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The leaves' shapes by their path, such as ``"model/head.weight"``."""
    found: dict[str, tuple[int, ...]] = {}
    for name, leaf in tree.items():
        key = f"{prefix}{name}"
        found |= shapes(leaf, f"{key}/") if isinstance(leaf, dict) else {key: tuple(leaf.shape)}
    return found


def select(model: Model, names: Iterable[str]) -> Model:
    """The entries of ``model`` that are in ``names``, in the order of ``model``."""
    wanted = frozenset(names)
    return {name: leaf for name, leaf in model.items() if name in wanted}


def floats(model: Model) -> Model:
    """The floating-point entries: everything but integer counters and masks."""
    return {name: leaf for name, leaf in model.items() if leaf.is_floating_point()}


# --- the client axis ---


def expand(tree: Tree, clients: int) -> Tree:
    """Give every leaf a leading client axis of stride 0: the same tensor for all, no copy.

    ``as_strided`` and not ``expand``, so that the stride is 0 for a single client as well: stride 0
    is how :func:`is_expanded` knows that the memory belongs to somebody else.
    """
    return tmap(lambda leaf: leaf.as_strided((clients, *leaf.shape), (0, *leaf.stride())), tree)


def repeat(tree: Tree, clients: int) -> Tree:
    """Give every leaf a leading client axis: a copy for each client."""

    def copies(leaf: Tensor) -> Tensor:
        wide = leaf.expand(clients, *leaf.shape)
        return wide.clone(memory_format=torch.contiguous_format)

    return tmap(copies, tree)


def is_expanded(leaf: Tensor) -> bool:
    """Whether the leaf's client axis has stride 0, so that all clients share one tensor."""
    return leaf.ndim > 0 and leaf.stride(0) == 0


def rows(tree: Tree, index: slice | Tensor) -> Tree:
    """The given clients of a ``(clients, ...)`` tree.

    Views for a slice, copies for a tensor of positions.
    """

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
    """A ``(clients, ...)`` tree with the rows of some clients replaced; the old one stays.

    Args:
        tree: All clients'.
        index: Whose rows, int64 ``(some,)``.
        new: Their new ones, ``(some, ...)``.
    """
    return tmap(lambda old, rows: old.index_copy(0, index.to(old.device), rows), tree, new)


def unshared(tree: Tree) -> Tree:
    """Copies of the leaves that each client has its own of, which local training may change.

    Expanded leaves stay what they are: whoever trains one gives it memory first.
    """
    return tmap(lambda leaf: leaf if is_expanded(leaf) else leaf.clone(), tree)


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


def per_client(scalar: Tensor, leaf: Tensor) -> Tensor:
    """Reshape a ``(clients,)`` scalar so that it broadcasts against a ``(clients, ...)`` leaf."""
    return scalar.to(leaf.dtype).view(-1, *[1] * (leaf.ndim - 1))


def as_rows(leaf: Tensor) -> Tensor:
    """One row of numbers per client; ``flatten(1)`` refuses a scalar per client."""
    return leaf.flatten(1) if leaf.ndim > 1 else leaf.unsqueeze(1)


def where(chosen: Tensor, new: Tree, old: Tree) -> Tree:
    """``new`` for some clients and ``old`` for the others, on the names of ``new``.

    Args:
        chosen: For whom it is new, bool ``(clients,)``.
        new: ``(clients, ...)``.
        old: ``(clients, ...)``.
    """

    def choose(ours: Tensor, theirs: Tensor) -> Tensor:
        mask = chosen.to(ours.device).view(-1, *[1] * (ours.ndim - 1))
        return torch.where(mask, ours, theirs)

    return tmap(choose, new, old)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    """Multiply by a number, or by one number per client (shape ``(clients,)``)."""
    if isinstance(factor, Tensor) and factor.ndim == 1:
        return tmap(lambda leaf: leaf * per_client(factor, leaf), tree)
    return tmap(lambda leaf: leaf * factor, tree)


def add(a: Tree, b: Tree) -> Tree:
    """``a + b`` on the names of ``a``."""
    return tmap(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """``a - b`` on the names of ``a``."""
    return tmap(torch.sub, a, b)


def dot(a: Tree, b: Tree) -> Tensor:
    """Inner product of each client's two trees, shape ``(clients,)``; on the names of ``a``."""
    parts = [
        as_rows(x * y).sum(1)
        for x, y in zip(leaves(a), leaves(tmap(lambda _, y: y, a, b)), strict=True)
    ]
    return torch.stack(parts).sum(0)


def sqnorm(tree: Tree) -> Tensor:
    """Squared Euclidean norm of each client's tree, shape ``(clients,)``."""
    return dot(tree, tree)


def finite(tree: Tree) -> Tensor:
    """Which clients' trees hold neither NaN nor Inf, bool ``(clients,)``.

    An empty tree is finite for nobody to see.
    """
    checks = [as_rows(leaf.isfinite()).all(1) for leaf in leaves(tree) if leaf.is_floating_point()]
    return torch.stack(checks).all(0) if checks else torch.ones((), dtype=torch.bool)


def weighted_mean(tree: Tree, weights: Tensor) -> Tree:
    """Average a ``(clients, ...)`` tree over its client axis.

    Float leaves are averaged with ``weights`` (shape ``(clients,)``, summing to 1); integer and
    bool leaves, such as BatchNorm's batch counters, take the maximum, since an average of counters
    counts nothing.
    """

    def mean(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf.amax(0)
        return torch.mv(as_rows(leaf).T, weights.to(leaf)).view(leaf.shape[1:])

    return tmap(mean, tree)


def whole_nbytes(tree: Tree) -> int:
    """Bytes of a whole tree, whatever its axes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def nbytes(tree: Tree) -> int:
    """Bytes of one client's share of a ``(clients, ...)`` tree.

    What one upload or download puts on the wire.
    """
    return sum(leaf[0].numel() * leaf.element_size() for leaf in leaves(tree) if len(leaf))


def flat(model: Model, names: Iterable[str]) -> Tensor:
    """The named entries of ``(clients, ...)`` models as vectors, ``(clients, dim)``."""
    return torch.cat([as_rows(model[name]) for name in names], 1)


def unflat(vectors: Tensor, like: Model, names: Iterable[str]) -> Model:
    """Undo :func:`flat`.

    Args:
        vectors: ``(clients, dim)``.
        like: Entries of the wanted shapes, ``(anything, ...)``.
        names: The entries, in the order of :func:`flat`.
    """
    wanted = [(name, like[name]) for name in names]
    parts = vectors.split([leaf.shape[1:].numel() for _, leaf in wanted], 1)
    return {
        name: part.view(len(vectors), *leaf.shape[1:]).to(leaf.dtype)
        for (name, leaf), part in zip(wanted, parts, strict=True)
    }


def materialize(model: Model, names: tuple[str, ...]) -> None:
    """Give expanded leaves memory of their own before a forward pass writes to them."""
    for name in names:
        if name in model and is_expanded(model[name]):
            model[name] = model[name].clone(memory_format=torch.contiguous_format)
