"""HeteroFL: Diao et al. (2021), Algorithm 1, on networks of one hidden layer in plain arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray
Weights = dict[str, Array]
HIDDEN, BIAS, HEAD, OFFSET = "backbone.1.weight", "backbone.1.bias", "head.weight", "head.bias"


def gradient(w: Weights, x: Array, y: Array) -> Weights:
    """Of the mean cross-entropy of head(tanh(hidden(x)))."""
    hidden = np.tanh(x @ w[HIDDEN].T + w[BIAS])
    logits = hidden @ w[HEAD].T + w[OFFSET]
    residual = np.exp(logits - logits.max(1, keepdims=True))
    residual /= residual.sum(1, keepdims=True)
    residual[np.arange(len(y)), y] -= 1
    residual /= len(y)
    inner = residual @ w[HEAD] * (1 - hidden**2)
    return {HIDDEN: inner.T @ x, BIAS: inner.sum(0), HEAD: residual.T @ hidden,
            OFFSET: residual.sum(0)}  # fmt: skip


def cut(w: Weights, units: int) -> Weights:
    """The network of the first hidden units."""
    return {HIDDEN: w[HIDDEN][:units], BIAS: w[BIAS][:units], HEAD: w[HEAD][:, :units],
            OFFSET: w[OFFSET]}  # fmt: skip


def client(w: Weights, has: Array, minibatches: Iterable[Any], lr: float) -> Weights:
    """A narrow network after its steps, whose outputs for classes that it lacks are 0.

    Args:
        w: The network.
        has: The classes of the client, bool.
        minibatches: Inputs and class numbers.
        lr: The learning rate.
    """
    w = {**w, HEAD: w[HEAD] * has[:, None], OFFSET: w[OFFSET] * has}
    for x, y in minibatches:
        g = gradient(w, x, y)
        g |= {HEAD: g[HEAD] * has[:, None], OFFSET: g[OFFSET] * has}
        w = {name: w[name] - lr * g[name] for name in w}
    return w


def merged(old: Weights, sent: list[tuple[Array, Weights]]) -> Weights:
    """The mean of each entry over those who have it; the old one where nobody does."""
    new = {name: leaf.copy() for name, leaf in old.items()}
    for name, leaf in new.items():
        for at in np.ndindex(leaf.shape):
            mine = [
                w[name][at]
                for has, w in sent
                if all(i < n for i, n in zip(at, w[name].shape, strict=True))
                and (name not in (HEAD, OFFSET) or has[at[0]])
            ]
            if mine:
                leaf[at] = np.mean(mine)
    return new
