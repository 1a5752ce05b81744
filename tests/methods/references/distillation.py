"""A server that fits a linear classifier to the mean logits of its clients' ones, in NumPy."""

from __future__ import annotations

import numpy as np

from tests.methods.public import SAMPLES, pictures
from tests.methods.references.softmax import Weights
from tests.orders_by_hand import order_by_hand

BATCH = 3


def distilled(
    w: Weights,
    teachers: list[Weights],
    round: int,
    rates: list[float],
    temperature: float = 1.0,
    weight_decay: float = 0.0,
    batch: int = BATCH,
) -> Weights:
    """Adam with torch's defaults and the rate of each step, on the divergence times T squared.

    Minibatches that aren't full are left out.
    """
    x = pictures().flatten(1).numpy()
    per_epoch = SAMPLES // batch
    epochs = -(-len(rates) // per_epoch)
    orders = [order_by_hand(SAMPLES, 0, e, stream="server", round=round) for e in range(epochs)]
    minibatches = [
        order[first : first + batch].numpy()
        for order in orders
        for first in range(0, per_epoch * batch, batch)
    ]
    m = {name: np.zeros_like(leaf) for name, leaf in w.items()}
    v = {name: np.zeros_like(leaf) for name, leaf in w.items()}
    for step, rate in enumerate(rates):
        some = x[minibatches[step]]
        outputs = [some @ each["head.weight"].T + each["head.bias"] for each in (*teachers, w)]
        target = np.mean(outputs[:-1], 0)
        p, q = (np.exp(each / temperature) for each in (target, outputs[-1]))
        p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
        slope = temperature * (q - p) / len(some)
        gradient = {"head.weight": slope.T @ some, "head.bias": slope.sum(0)}
        w = dict(w)
        for name, leaf in w.items():
            g = gradient[name] + weight_decay * leaf
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            mean, square = m[name] / (1 - 0.9 ** (step + 1)), v[name] / (1 - 0.999 ** (step + 1))
            w[name] = leaf - rate * mean / (np.sqrt(square) + 1e-8)
    return w
