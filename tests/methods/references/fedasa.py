"""FedASA in NumPy on softmax regression, whose cells are the weights and the biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.methods.references import softmax
from tests.methods.references.softmax import NAMES, Weights

Selection = set[tuple[int, str]]
"""Pairs of a client and a cell that it shares."""


def agreeing(mine: np.ndarray, theirs: np.ndarray, threshold: float) -> bool:
    lengths = np.linalg.norm(mine) * np.linalg.norm(theirs)
    return bool(lengths == 0 or (mine * theirs).sum() / lengths > threshold)


def fedasa(
    data: Any,
    start: Weights,
    cohorts: list[list[int]],
    selected: Callable[[int], Selection] | None,
    sizes: tuple[int, ...],
    threshold: float = 0.0,
    every: int = 1,
    lr: float = 0.05,
) -> tuple[Weights, list[Weights], Selection]:
    """Run some rounds.

    ``selected`` gives a round's selection; None for the selection by drift.

    Returns:
        The server's model, each client's personal model, and who shares what.
    """
    x = {name: leaf.copy() for name, leaf in start.items()}
    own = [{name: leaf.copy() for name, leaf in start.items()} for _ in sizes]
    last = {name: np.zeros_like(leaf) for name, leaf in x.items()}
    shares = {(k, name) for k in range(len(sizes)) for name in NAMES}
    for number, cohort in enumerate(cohorts):
        shares = selected(number) if selected is not None else shares
        for k in cohort:
            begin = {name: (x if (k, name) in shares else own[k])[name] for name in NAMES}
            w = begin
            for batch in softmax.minibatches(data, k, number, epochs=1):
                w = softmax.moved(w, softmax.gradient(w, *batch), -lr)
            own[k] = w
            if selected is None and number > 0 and number % every == 0:
                for name in NAMES:
                    shares.discard((k, name))
                    if agreeing(w[name] - begin[name], last[name], threshold):
                        shares.add((k, name))
        new = dict(x)
        for name in NAMES:
            mine = [k for k in cohort if (k, name) in shares]
            if mine:
                total = sum(sizes[k] for k in mine)
                new[name] = sum(sizes[k] / total * own[k][name] for k in mine)
        last = {name: new[name] - x[name] for name in NAMES}
        x = new
    models = [
        {name: (x if (k, name) in shares else own[k])[name] for name in NAMES}
        for k in range(len(sizes))
    ]
    return x, models, shares
