"""Objectives that a method differentiates instead of the loss, by minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_pfl.contract.view import Objective
from lightning_pfl.core.tree import Tree, leaves, tmap


@dataclass(frozen=True)
class Term:
    """A method's objective, for the clients of a minibatch or for one of them.

    Args:
        objective: The objective; None for the loss.
        given: What it needs of the client, ``(clients, ...)``, or without client axis.
        weights: Factors of the samples' losses, ``(clients, samples)``; None for 1.
        sample_data: What it needs of the samples, ``(clients, samples, ...)``.
    """

    objective: Objective | None = None
    given: Tree = field(default_factory=dict)
    weights: Tensor | None = None
    sample_data: Tree = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Any]:
        """All of it but the objective."""
        found: dict[str, Any] = {"given": self.given, "sample_data": self.sample_data}
        return found if self.weights is None else {**found, "weights": self.weights}

    def first(self) -> Term:
        """Select the only client's term, without client axis."""
        weights = None if self.weights is None else self.weights[0]
        return Term(self.objective, first(self.given), weights, first(self.sample_data))


def first(tree: Tree) -> Tree:
    """Take the first row of each leaf."""
    return tmap(lambda leaf: leaf[0], tree)


def split_terms(
    widths: Sequence[int],
    objective: Objective | None,
    given: Tree | None,
    weights: Tensor | None,
    sample_data: Tree | None,
) -> list[Term | None]:
    """Make a term for each minibatch of a step; None for the loss itself.

    Args:
        widths: Samples of each minibatch, with padding.
        objective: As for :meth:`~lightning_pfl.contract.local.LocalStep.grad`.
        given: As there.
        weights: As there.
        sample_data: As there.

    Raises:
        ValueError: If weights or data of samples don't have one row per sample.
    """
    if objective is None and weights is None:
        return [None] * len(widths)
    rows = {**(sample_data or {}), **({} if weights is None else {"": weights})}
    for leaf in leaves(rows):
        if leaf.ndim < 2 or leaf.shape[1] != sum(widths):
            raise ValueError(
                f"Expected `weights` and `sample_data` to be (clients, {sum(widths)}, ...), a row "
                f"for each sample of the step, but got {tuple(leaf.shape)}. Take the order and the "
                "number of samples from `client.samples` or `client.losses`."
            )
    terms: list[Term | None] = []
    start = 0
    for width in widths:
        at = slice(start, start + width)
        start += width
        terms.append(
            Term(
                objective,
                given or {},
                None if weights is None else weights[:, at],
                tmap(lambda leaf, at=at: leaf[:, at], sample_data or {}),
            )
        )
    return terms
