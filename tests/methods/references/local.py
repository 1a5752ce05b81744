"""Local training: every client alone, a fresh optimizer in every round."""

from __future__ import annotations

from typing import Any

from tests.methods.references.training import State, batches, load, train, with_data


def local(module: Any, data: Any, rounds: int, epochs: int = 1) -> list[State]:
    """Every client's state; one without samples keeps the initial one."""
    states: list[State] = [module.state_dict() for _ in range(data.num_clients)]
    for k in with_data(data):
        net = load(module, states[k])
        for t in range(rounds):
            train(net, batches(data, k, t, epochs))
        states[k] = net.state_dict()
    return states
