"""Ditto: Li et al. (2021), Algorithm 1 with FedAvg as the global solver, uniform weights."""

from __future__ import annotations

from typing import Any

from tests.methods.references.training import State, average, batches, load, train, with_data


def ditto(
    module: Any, data: Any, rounds: int, prox_weight: float, personal_epochs: int | None = None
) -> tuple[State, list[State]]:
    """The global model, and every client's own."""
    server: State = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    client_state = [server for _ in range(data.num_clients)]
    for t in range(rounds):
        anchor, sent = server, []
        for k in with_data(data):

            def penalty(net: Any, anchor: State = anchor) -> Any:
                squares = [(p - anchor[n]).square().sum() for n, p in net.named_parameters()]
                return prox_weight / 2 * sum(squares)

            sent.append(train(load(module, server), batches(data, k, t, 1)).state_dict())
            # Interleaved: the same minibatches as the global model; else the epochs that follow.
            first = 0 if personal_epochs is None else 1
            mine = batches(data, k, t, personal_epochs or 1, first_epoch=first)
            client_state[k] = train(load(module, client_state[k]), mine, penalty).state_dict()
        server = average(sent, [1.0] * len(sent))
    return server, client_state
