"""Multi-task learning of networks as in the comparisons of LG-FedAvg; autograd has the trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.methods.references.training import State, batches, load, train, with_data


def relationship_matrix(mode: str, m: int) -> Tensor:
    """Omega ``(m, m)``; "asrun" literally: an all-ones "identity", and an element-wise square."""
    ones = torch.ones(m, m, dtype=torch.float64)
    if mode == "asrun":
        return (ones - ones / m) ** 2
    return torch.eye(m, dtype=torch.float64) - ones / m if mode == "spread" else 0 * ones


def penalty(client_state: Tensor, columns: Tensor, at: int, mode: str) -> Tensor:
    """||W||^2 + tr(W Omega W^T), where only the own column of ``(d, m)`` is live."""
    w = torch.stack(
        [client_state if j == at else columns[:, j] for j in range(columns.shape[1])], 1
    )
    return (w**2).sum() + torch.trace(w @ relationship_matrix(mode, w.shape[1]) @ w.T)


def flat(parameters: Any) -> Tensor:
    return torch.cat([p.flatten() for p in parameters])


def fedmtl(
    module: Any, data: Any, cohorts: list[Any], regularization: float, mode: str
) -> list[State]:
    """Every client's model after the cohorts' rounds."""
    client_state: list[State] = [module.state_dict() for _ in range(data.num_clients)]
    for t, cohort in enumerate(cohorts):
        members = [k for k in with_data(data) if k in cohort.tolist()]
        nets = {k: load(module, client_state[k]) for k in members}
        columns = torch.stack([flat(nets[k].parameters()).detach() for k in members], 1)
        for at, k in enumerate(members):

            def extra(net: Any, columns: Tensor = columns, at: int = at) -> Tensor:
                return regularization * penalty(flat(net.parameters()), columns, at, mode)

            client_state[k] = train(nets[k], batches(data, k, t, 1), extra).state_dict()
    return client_state
