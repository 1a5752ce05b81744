"""Per-FedAvg: Fallah et al. (2020), Algorithm 1; plain SGD, uniform weights."""

from __future__ import annotations

from itertools import islice
from typing import Any

from tests.methods.references.apfl import gradient
from tests.methods.references.training import State, average, batches, with_data


def per_fedavg(
    module: Any, data: Any, cohorts: list[Any], steps: int, alpha: float, lr: float, delta: float
) -> State:
    """The global model after the cohorts' rounds; ``delta`` 0 is the first-order variant."""
    names = [n for n, _ in module.named_parameters()]
    x: State = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    for t, cohort in enumerate(cohorts):
        sent = []
        for k in (k for k in with_data(data) if k in cohort.tolist()):
            w, stream = dict(x), batches(data, k, t, 99)
            for _ in range(steps):
                support, query, *third = islice(stream, 3 if delta else 2)

                def at(direction: State, length: float, w: State = w) -> State:
                    return {**w, **{n: w[n] + length * direction[n] for n in names}}

                g = gradient(module, w, support, trace=w)
                u = gradient(module, at(g, -alpha), query, trace=w)
                if delta:
                    plus = gradient(module, at(u, delta), third[0], trace=w)
                    minus = gradient(module, at(u, -delta), third[0], trace=w)
                    u = {n: u[n] - alpha * (plus[n] - minus[n]) / (2 * delta) for n in names}
                w |= {n: w[n] - lr * u[n] for n in names}
            sent.append(w)
        x = average(sent, [1.0] * len(sent))
    return x
