"""FedProx: Li et al. (2020), Algorithm 2, with a fixed number of local epochs and means weighted by
samples."""

from __future__ import annotations

from typing import Any

from tests.methods.references.training import State, average, batches, load, train, with_data


def fedprox(module: Any, data: Any, rounds: int, prox_weight: float, epochs: int = 1) -> State:
    """The server's state after some rounds of full participation."""
    server: State = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    for t in range(rounds):
        anchor = server

        def penalty(net: Any, anchor: State = anchor) -> Any:
            # Left to autograd, where the package adds its gradient by hand.
            squares = [(p - anchor[n]).square().sum() for n, p in net.named_parameters()]
            return prox_weight / 2 * sum(squares)

        nets = [
            train(load(module, server), batches(data, k, t, epochs), penalty)
            for k in with_data(data)
        ]
        samples = [float(data.num_samples[k]) for k in with_data(data)]
        server = average([net.state_dict() for net in nets], samples)
    return server
