"""FedRep: Collins et al. (2021), Algorithm 1, with epochs in the place of single updates."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.methods.references.training import State, average, batches, load, part, train, with_data


def only(net: Any, trains: str) -> Any:
    """Let one half train; the other half's parameters have no gradient and its BatchNorm is in eval
    mode."""
    for half in ("backbone", "head"):
        getattr(net, half).requires_grad_(half == trains)
        for layer in getattr(net, half).modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.train(half == trains)
    return net


def fedrep(module: Any, data: Any, rounds: int, head_epochs: int, body_epochs: int) -> list[State]:
    """Every client's model after some rounds of full participation, weighted by samples."""
    start = module.state_dict()
    body, head = (
        [name for name in start if name.startswith(half)] for half in ("backbone", "head")
    )
    server, client_state = part(start, body), [part(start, head) for _ in range(data.num_clients)]
    for t in range(rounds):
        uploads, samples = [], []
        for k in with_data(data):
            net = load(module, {**server, **client_state[k]})
            train(only(net, "head"), batches(data, k, t, head_epochs))
            train(only(net, "backbone"), batches(data, k, t, body_epochs, first_epoch=head_epochs))
            client_state[k] = part(net.state_dict(), head)
            uploads.append(part(net.state_dict(), body))
            samples.append(float(data.num_samples[k]))
        server = average(uploads, samples)
    return [{**server, **kept} for kept in client_state]
