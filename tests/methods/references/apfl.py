"""APFL: Deng et al. (2020), Algorithm 1, with mixed parameters and uniform weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.references.training import State, average, batches, load, with_data


def gradient(module: Any, state: State, batch: Any, trace: State | None = None) -> State:
    """Gradient at ``state``; the forward pass's statistics go to ``trace``."""
    net = load(module, state)
    x, y = batch
    F.cross_entropy(net(x), y).backward()
    if trace is not None:
        trace.update({n: b.clone() for n, b in net.named_buffers()})
    return {n: p.grad for n, p in net.named_parameters()}


def apfl(
    module: Any, data: Any, cohorts: list[Any], mixing: float, adaptive: bool, lr: float
) -> tuple[State, list[State], list[Tensor]]:
    """The global model, and every client's own model and mixing weight; plain SGD."""
    server: State = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    names = [n for n, _ in module.named_parameters()]
    client_state = [dict(server) for _ in range(data.num_clients)]
    alpha = [torch.tensor(mixing, dtype=torch.float64) for _ in client_state]
    for t, cohort in enumerate(cohorts):
        sent = []
        for k in (k for k in with_data(data) if k in cohort.tolist()):
            w, v = dict(server), dict(client_state[k])
            for number, batch in enumerate(batches(data, k, t, 1)):
                g = gradient(module, w, batch, trace=w)
                w |= {n: w[n] - lr * g[n] for n in names}
                bar = {**v, **{n: alpha[k] * v[n] + (1 - alpha[k]) * w[n] for n in names}}
                g = gradient(module, bar, batch, trace=v)
                slope = sum((g[n] * (v[n] - w[n])).sum() for n in names)
                v |= {n: v[n] - lr * alpha[k] * g[n] for n in names}
                if adaptive and number == 0:
                    alpha[k] = (alpha[k] - lr * slope).clamp(0, 1)
            client_state[k] = v
            sent.append(w)
        server = average(sent, [1.0] * len(sent))
    return server, client_state, alpha
