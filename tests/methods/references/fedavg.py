"""FedAvg: McMahan et al. (2017), Algorithm 1, with full participation."""

from __future__ import annotations

from typing import Any

from tests.methods.references.training import State, average, batches, load, train, with_data


def fedavg(module: Any, data: Any, rounds: int, epochs: int = 1, seed: int = 0) -> State:
    """The server's state after some rounds, averaged with weights proportional to samples."""
    server: State = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    for t in range(rounds):
        uploads, samples = [], []
        for k in with_data(data):
            net = train(load(module, server), batches(data, k, t, epochs, seed=seed))
            uploads.append(net.state_dict())
            samples.append(float(data.num_samples[k]))
        server = average(uploads, samples)
    return server
