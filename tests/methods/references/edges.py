"""The pieces of the references of methods over a graph: loops over clients and edges, NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.methods.references.training import State, batches, load, train

Vector = NDArray[np.float64]


def theta(module: Any, state: State) -> Vector:
    """The trainable parameters of a state, one after another."""
    names = [name for name, _ in module.named_parameters()]
    flat: Vector = torch.cat([state[name].flatten() for name in names]).numpy().copy()
    return flat


def with_theta(module: Any, state: State, vector: Vector) -> State:
    """A state with other trainable parameters."""
    changed, begin = {name: leaf.clone() for name, leaf in state.items()}, 0
    for name, parameter in module.named_parameters():
        end = begin + parameter.numel()
        changed[name] = torch.from_numpy(vector[begin:end]).view(parameter.shape).clone()
        begin = end
    return changed


def local(
    module: Any, data: Any, client: int, round: int, state: State, extra: Callable[[Tensor], Tensor]
) -> State:
    """One epoch on the loss plus ``extra(theta)``."""

    def penalty(net: Any) -> Tensor:
        return extra(torch.cat([p.flatten() for p in net.parameters()]))

    net = train(load(module, state), batches(data, client, round, 1), penalty)
    found: State = net.state_dict()
    return found


def neighbours(adjacency: Vector, client: int, cohort: list[int]) -> list[int]:
    """The neighbours of a client that take part."""
    return [j for j in cohort if adjacency[client, j]]
