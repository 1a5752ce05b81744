"""A linear classifier in NumPy: losses and gradients, from the formulas of softmax regression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pfl.models.base import PersonalizedModule
from tests.methods.references.training import batches

Array = np.ndarray
Weights = dict[str, Array]
NAMES = ("head.weight", "head.bias")


def softmax_module(lr: float = 0.05) -> PersonalizedModule:
    """The module whose numbers these functions compute, with plain SGD."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        settings: dict[str, Any] = {"lr": lr, "momentum": 0.0, "weight_decay": 0.0}
        return PersonalizedModule(nn.Flatten(), nn.Linear(25, 3), **settings).double()


def as_numpy(model: Any) -> Weights:
    return {name: model[name].detach().numpy().copy() for name in NAMES}


def minibatches(data: Any, client: int, round: int, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """A client's minibatches as arrays, in their documented order."""
    for x, y in batches(data, client, round, **settings):
        yield x.flatten(1).numpy(), y.numpy()


def log_probabilities(w: Weights, x: Array) -> Array:
    logits = x @ w["head.weight"].T + w["head.bias"]
    largest = logits.max(1, keepdims=True)
    found: Array = logits - largest - np.log(np.exp(logits - largest).sum(1, keepdims=True))
    return found


def losses(w: Weights, x: Array, y: Array) -> Array:
    """The cross-entropy of each sample."""
    found: Array = -log_probabilities(w, x)[np.arange(len(y)), y]
    return found


def gradient(w: Weights, x: Array, y: Array, factors: Array | None = None) -> Weights:
    """The gradient of the mean of the samples' losses, each times its factor."""
    residual = np.exp(log_probabilities(w, x))
    residual[np.arange(len(y)), y] -= 1
    if factors is not None:
        residual = residual * factors[:, None]
    return {"head.weight": residual.T @ x / len(y), "head.bias": residual.mean(0)}


def moved(w: Weights, step: Weights, factor: float) -> Weights:
    return {name: w[name] + factor * step[name] for name in w}


def mean(models: list[Weights], weights: Any) -> Weights:
    """Weighted mean; weights need no normalisation."""
    shares = np.asarray(weights, dtype=float)
    shares = shares / shares.sum()
    return {n: sum(s * m[n] for s, m in zip(shares, models, strict=True)) for n in models[0]}
