"""The server's tree of a method with a prior: shared entries, the prior's mean, its parameters."""

from __future__ import annotations

from collections.abc import Collection

from lightning_pfl.core.tree import Model, Tree, select


def packed(shared: Model, gamma: Tree) -> Tree:
    """Build the server's tree, without empty entries; the prior's mean is part of the model.

    Args:
        shared: Shared entries of the model that aren't under the prior.
        gamma: The prior's parameters.
    """
    rest = {name: entry for name, entry in gamma.items() if name != "mean"}
    server = {"model": {**shared, **gamma.get("mean", {})}, "prior": rest}
    return {name: entry for name, entry in server.items() if entry}


def unpacked(tree: Tree, under: Collection[str]) -> Tree:
    """Return the prior's parameters, from the server's or a received tree.

    Args:
        tree: What :func:`packed` has built, with or without a client axis.
        under: Names of the parameters under the prior.
    """
    mean = select(tree.get("model", {}), under)
    return {**({"mean": mean} if mean else {}), **tree.get("prior", {})}
