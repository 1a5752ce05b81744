"""Saddle-point dynamics under homological constraints, with the sheaf Laplacian edge by edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.methods.references.edges import Vector, local, neighbours, theta, with_theta
from tests.methods.references.training import State


def homological(
    module: Any,
    data: Any,
    cohorts: list[Any],
    adjacency: Vector,
    maps: dict[tuple[int, int], Vector],
    step: float,
    penalty: float,
    lr: float,
) -> tuple[list[State], list[Vector]]:
    """Every client's model and multiplier."""
    client_state: list[State] = [module.state_dict() for _ in range(data.num_clients)]
    y = [0 * theta(module, state) for state in client_state]

    def times_laplacian(vectors: dict[int, Vector]) -> dict[int, Vector]:
        found = {}
        for i in vectors:
            found[i] = 0 * vectors[i]
            for j in neighbours(adjacency, i, list(vectors)):
                gap = maps[i, j] @ vectors[i] - maps[j, i] @ vectors[j]
                found[i] += adjacency[i, j] * maps[i, j].T @ gap
        return found

    for t, cohort in enumerate(cohorts):
        there = cohort.tolist()
        sent = {k: penalty * theta(module, client_state[k]) + y[k] for k in there}
        pull = times_laplacian(sent)
        for k in there:
            fixed = torch.from_numpy(pull[k])

            def linear(w: Tensor, fixed: Tensor = fixed) -> Tensor:
                return (fixed * w).sum()

            if data.num_samples[k]:
                client_state[k] = local(module, data, k, t, client_state[k], linear)
            else:
                client_state[k] = with_theta(
                    module, client_state[k], theta(module, client_state[k]) - lr * pull[k]
                )
        for k, product in times_laplacian(
            {k: theta(module, client_state[k]) for k in there}
        ).items():
            y[k] = y[k] + step * product
    return client_state, y


def kkt(hessian: Vector, linear: Vector, laplacian: Vector) -> Vector:
    """The minimiser of 1/2 x H x - b x subject to L x = 0."""
    values, vectors = np.linalg.eigh(laplacian)
    kernel = vectors[:, values < 1e-9]
    inner = np.linalg.solve(kernel.T @ hessian @ kernel, kernel.T @ linear)
    found: Vector = kernel @ inner
    return found
