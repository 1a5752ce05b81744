"""The primal-dual method for total variation on a graph: one dual variable per edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.methods.references.edges import Vector, local, theta, with_theta
from tests.methods.references.training import State


def resolvent(u: Vector, c: float, norm: str, sigma: float = 0.5) -> Vector:
    if norm == "l1":
        return np.clip(u, -c, c)
    if norm == "squared":
        return u / (1 + sigma / c)
    length = float(np.linalg.norm(u))
    return u if length <= c else c / length * u


def gtvmin(
    module: Any,
    data: Any,
    cohorts: list[Any],
    adjacency: Vector,
    strength: float,
    norm: str,
    ratio: float = 1.0,
) -> tuple[list[State], dict[tuple[int, int], Vector]]:
    """Every client's model, and the dual of each edge (i, j) with i < j."""
    client_state: list[State] = [module.state_dict() for _ in range(data.num_clients)]
    edges = [(i, j) for i, j in zip(*np.nonzero(np.triu(adjacency)), strict=True)]
    dual = {(int(i), int(j)): 0 * theta(module, client_state[0]) for i, j in edges}
    held = np.maximum((adjacency != 0).sum(1), 1) / ratio
    for t, cohort in enumerate(cohorts):
        there = cohort.tolist()
        before = {k: theta(module, client_state[k]) for k in there}
        for k in there:
            pull = sum((u if k == i else -u) for (i, j), u in dual.items() if k in (i, j))
            center = torch.from_numpy(before[k] - np.asarray(pull) / held[k])

            def prox(w: Tensor, k: int = k, center: Tensor = center) -> Tensor:
                return (w - center).square().sum() * (float(held[k]) / 2)

            if data.num_samples[k]:
                client_state[k] = local(module, data, k, t, client_state[k], prox)
            else:  # the minimiser of the quadratic alone
                client_state[k] = with_theta(module, client_state[k], center.numpy())
        after = {k: theta(module, client_state[k]) for k in there}
        for i, j in dual:
            if i in there and j in there:
                ahead = 2 * (after[i] - after[j]) - (before[i] - before[j])
                c = strength * adjacency[i, j]
                dual[i, j] = resolvent(dual[i, j] + 0.5 / ratio * ahead, c, norm, 0.5 / ratio)
    return client_state, dual
