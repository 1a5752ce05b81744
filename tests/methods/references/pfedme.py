"""pFedMe: Dinh et al. (2020), Algorithm 1; plain SGD, uniform weights."""

from __future__ import annotations

from typing import Any

from tests.methods.references.apfl import gradient
from tests.methods.references.training import State, average, batches, with_data


def pfedme(
    module: Any,
    data: Any,
    cohorts: list[Any],
    weight: float,
    inner_steps: int,
    inner_lr: float,
    lr: float,
    beta: float,
) -> tuple[State, list[State]]:
    """The global model and every client's last minimiser."""
    names = [n for n, _ in module.named_parameters()]
    x: State = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    client_state = [dict(x) for _ in range(data.num_clients)]
    for t, cohort in enumerate(cohorts):
        sent = []
        for k in (k for k in with_data(data) if k in cohort.tolist()):
            w, theta = dict(x), dict(x)
            for batch in batches(data, k, t, 1):
                for _ in range(inner_steps):
                    g = gradient(module, theta, batch, trace=theta)
                    theta |= {
                        n: theta[n] - inner_lr * (g[n] + weight * (theta[n] - w[n])) for n in names
                    }
                w |= {n: w[n] - lr * weight * (w[n] - theta[n]) for n in names}
            client_state[k] = theta
            sent.append({**theta, **{n: w[n] for n in names}})
        mean = average(sent, [1.0] * len(sent))
        x = {**mean, **{n: (1 - beta) * x[n] + beta * mean[n] for n in names}}
    return x, client_state
