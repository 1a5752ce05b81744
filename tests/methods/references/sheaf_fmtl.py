"""Sheaf-FMTL, edge by edge: every end of an edge has its own map."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.methods.references.edges import Vector, local, neighbours, theta, with_theta
from tests.methods.references.training import State

Maps = dict[tuple[int, int], Vector]


def sheaf_fmtl(
    module: Any,
    data: Any,
    cohorts: list[Any],
    adjacency: Vector,
    maps: Maps,
    strength: float,
    map_lr: float,
    separate: bool,
    lr: float,
) -> tuple[list[State], Maps]:
    """Every client's model, and all maps."""
    client_state: list[State] = [module.state_dict() for _ in range(data.num_clients)]
    maps = {edge: np.array(p, dtype=np.float64) for edge, p in maps.items()}

    def pulls(there: list[int]) -> dict[int, Vector]:
        w = {k: theta(module, client_state[k]) for k in there}
        found = {}
        for i in there:
            total = 0 * w[i]
            for j in neighbours(adjacency, i, there):
                gap = maps[i, j] @ w[i] - maps[j, i] @ w[j]
                total += strength * adjacency[i, j] * maps[i, j].T @ gap
            found[i] = total
        return found

    for t, cohort in enumerate(cohorts):
        there = cohort.tolist()
        pull = dict.fromkeys(there, 0.0) if separate else pulls(there)
        for k in there:
            fixed = torch.as_tensor(pull[k])

            def linear(w: Tensor, fixed: Tensor = fixed) -> Tensor:
                return (fixed * w).sum()

            if data.num_samples[k]:
                client_state[k] = local(module, data, k, t, client_state[k], linear)
            else:
                client_state[k] = with_theta(
                    module, client_state[k], theta(module, client_state[k]) - lr * pull[k]
                )
        if separate:
            for k, step in pulls(there).items():
                client_state[k] = with_theta(
                    module, client_state[k], theta(module, client_state[k]) - lr * step
                )
        w = {k: theta(module, client_state[k]) for k in there}
        before = {edge: p.copy() for edge, p in maps.items()}
        for i in there:
            for j in neighbours(adjacency, i, there):
                gap = before[i, j] @ w[i] - before[j, i] @ w[j]
                maps[i, j] -= map_lr * strength * adjacency[i, j] * np.outer(gap, w[i])
    return client_state, maps
