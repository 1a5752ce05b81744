"""Checks of what a method's functions return, which name the function and what it should return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_pfl.core.tree import Path, Tree, items, leaves


def require_tree(tree: Any, function: str, method: object, clients: int | None = None) -> Tree:
    """Return what a method's function returned, if it is a tree of tensors.

    Args:
        tree: The result.
        function: The function's name.
        method: The method.
        clients: Number of rows that every tensor must have; None for any.

    Raises:
        TypeError: If it is no dict, or has entries that are no tensors.
        ValueError: If an entry has another number of rows.
    """
    start = f"Expected `{function}` of {type(method).__name__} to return "
    if not isinstance(tree, dict):
        remedy = "Does it end with `return`?" if tree is None else "Return a dict of tensors."
        raise TypeError(f"{start}a dict of tensors, but got {_named(tree)}. {remedy}")
    for path, leaf in items(tree):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{start}tensors, but its entry {_written(path)} is {_named(leaf)}. Make it a "
                "tensor."
            )
        if clients is not None and (not leaf.ndim or leaf.shape[0] != clients):
            raise ValueError(
                f"{start}tensors with a row for each client, {clients} at work, but its entry "
                f"{_written(path)} has the shape {tuple(leaf.shape)}. Keep the first axis, that of "
                "clients."
            )
    return tree


def require_pair(pair: Any, method: object, clients: int) -> tuple[Tree, Tree]:
    """Return the two trees that ``client_final`` returned.

    Raises:
        TypeError: If it returned something else.
        ValueError: If an entry has another number of rows.
    """
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(
            f"Expected `client_final` of {type(method).__name__} to return the upload and the "
            f"client state, but got {_named(pair)}. End it with `return upload, client_state`."
        )
    upload, client_state = pair
    return (
        require_tree(upload, "client_final", method, clients),
        require_tree(client_state, "client_final", method, clients),
    )


def require_same_tree(before: Tree, after: Any, method: object) -> Tree:
    """Return the server's tree after ``server_update``, if it has the entries of the one before.

    New ones may come, such as the state of an optimizer.

    Raises:
        TypeError: If it is no tree of tensors.
        ValueError: If an entry is missing or has another shape.
    """
    tree = require_tree(after, "server_update", method)
    old, new = (
        {"/".join(map(str, path)): leaf.shape for path, leaf in items(one)}
        for one in (before, tree)
    )
    name = next((name for name in old if old[name] != new.get(name)), None)
    if name is not None:
        found = f"the shape {tuple(new[name])}" if name in new else "no tensor"
        raise ValueError(
            f"Expected `server_update` of {type(method).__name__} to return the server's tree with "
            f"the shape {tuple(old[name])} as {name!r}, but it has {found}. Return all entries of "
            "`init_server`, without the axis of clients."
        )
    return tree


def versions(*trees: Tree) -> list[int]:
    """Count the writes to each tensor so far."""
    return [leaf._version for tree in trees for leaf in leaves(tree) if not leaf.is_inference()]


def require_unwritten(
    before: list[int], function: str, method: object, received: Tree, client_state: Tree
) -> None:
    """Require that a client's function didn't write to what it was given.

    Args:
        before: :func:`versions` of the two trees, before the call.
        function: The function's name.
        method: The method.
        received: What the server sent.
        client_state: The clients' states.

    Raises:
        ValueError: If it did: these tensors are the server's, or the next round's.
    """
    if versions(received, client_state) != before:
        raise ValueError(
            f"Expected `{function}` of {type(method).__name__} to leave `received` and "
            "`client_state` as they are, but it changes a tensor in place. Return new tensors: "
            "`0.9 * leaf` in the place of `leaf.mul_(0.9)`."
        )


def _written(path: Path) -> str:
    return repr("/".join(map(str, path)))


def _named(found: Any) -> str:
    if found is None:
        return "None"
    name = type(found).__name__
    name = f"{'an' if name[0] in 'aeio' else 'a'} {name}"
    return f"{name}, {found!r}" if isinstance(found, (bool, int, float, str)) else name
