"""FedPer, LG-FedAvg and FedBN: joint training, of which one part of the state is averaged and the
other stays.

Arivazhagan et al. (2019), Algorithms 1 and 2; Liang et al. (2020), Algorithm 1; Li et al. (2021),
Algorithm 1. They differ in what is shared and in the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.methods.references.training import State, average, batches, load, part, train, with_data


def split(
    module: Any, data: Any, rounds: int, personal: Iterable[str], by_samples: bool, epochs: int = 1
) -> list[State]:
    """Every client's model after some rounds: the shared part now, its own part stored."""
    start, personal = module.state_dict(), set(personal)
    shared = [name for name in start if name not in personal]
    server = part(start, shared)
    client_state = [part(start, personal) for _ in range(data.num_clients)]
    for t in range(rounds):
        uploads, weights = [], []
        for k in with_data(data):
            net = train(load(module, {**server, **client_state[k]}), batches(data, k, t, epochs))
            client_state[k] = part(net.state_dict(), personal)
            uploads.append(part(net.state_dict(), shared))
            weights.append(float(data.num_samples[k]) if by_samples else 1.0)
        server = average(uploads, weights)
    return [{**server, **kept} for kept in client_state]
