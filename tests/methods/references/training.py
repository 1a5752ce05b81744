"""Plain PyTorch: the pieces that the references share. Nothing of the engines is used, only the
documented order of data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pfl.data.datasets import FederatedTensorDataset
from tests.orders_by_hand import order_by_hand

State = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def with_data(data: FederatedTensorDataset) -> list[int]:
    """Clients that have samples: the others are never sampled."""
    return [k for k in range(data.num_clients) if data.num_samples[k] > 0]


def batches(
    data: FederatedTensorDataset,
    client: int,
    round: int,
    epochs: int,
    first_epoch: int = 0,
    seed: int = 0,
) -> Iterator[Batch]:
    """A client's minibatches; epochs are counted through the whole round."""
    x, y = data.fields
    mine = data.indices[client]
    for epoch in range(first_epoch, first_epoch + epochs):
        order = order_by_hand(len(mine), client, epoch, seed=seed, round=round)
        for some in order.split(data.batch_size):
            yield x[mine[some]], y[mine[some]]


def load(module: Any, state: State) -> Any:
    """A copy of the module in training mode with another state."""
    net = copy.deepcopy(module)
    net.load_state_dict(state)
    return net.train()


def train(
    net: Any, minibatches: Iterable[Batch], penalty: Callable[[Any], Tensor] | None = None
) -> Any:
    """The net's own optimizer, made anew, on the cross-entropy and a penalty."""
    optimizer = net.configure_optimizers()
    for x, y in minibatches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        (loss if penalty is None else loss + penalty(net)).backward()
        optimizer.step()
    return net


def average(states: list[State], weights: list[float]) -> State:
    """Weighted mean of floats, maximum of counters."""
    total = sum(weights)
    mean: State = {}
    for name, first in states[0].items():
        stacked = torch.stack([state[name] for state in states])
        if first.is_floating_point():
            shares = torch.tensor(weights, dtype=first.dtype).view(-1, *[1] * first.ndim) / total
            mean[name] = (shares * stacked).sum(0)
        else:
            mean[name] = stacked.amax(0)
    return mean


def part(state: State, names: Iterable[str]) -> State:
    """Some entries of a state."""
    return {name: state[name].clone() for name in names}
