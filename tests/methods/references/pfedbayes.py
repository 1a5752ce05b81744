"""pFedBayes: Zhang et al. (2022), in NumPy, on a linear classifier whose noise is 1 or -1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.methods.references.softmax import Weights

Pair = tuple[Weights, Weights]


def sigma(rho: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.log1p(np.exp(rho))
    return found


def slope(rho: np.ndarray) -> np.ndarray:
    """The derivative of the standard deviation."""
    found: np.ndarray = 1 / (1 + np.exp(-rho))
    return found


def pfedbayes_client(
    q: Pair,
    w: Pair,
    minibatches: Iterable[Any],
    gradient: Callable[[Weights, Any], Weights],
    zeta: float,
    samples: int,
    signs: list[list[float]],
    lr: float,
    copy_steps: int,
) -> tuple[Pair, Pair]:
    """A client's distribution and its copy of the common one, means and rho.

    Args:
        q: The client's distribution.
        w: The common one.
        minibatches: Of its training.
        gradient: Of the mean loss.
        zeta: The divergence's weight.
        samples: The client's samples.
        signs: For each inner step the noise of each draw.
        lr: Step size of all.
        copy_steps: Steps of the copy per minibatch.
    """
    (m, r), (mw, rw) = q, w
    c = zeta / samples
    for batch in minibatches:
        for of_step in signs:
            drawn = [gradient({n: m[n] + sigma(r[n]) * e for n in m}, batch) for e in of_step]
            gm = {n: np.mean([g[n] for g in drawn], 0) for n in m}
            gr = {
                n: np.mean([g[n] * e for g, e in zip(drawn, of_step, strict=True)], 0) * slope(r[n])
                for n in m
            }
            gm = {n: gm[n] + c * (m[n] - mw[n]) / sigma(rw[n]) ** 2 for n in m}
            gr = {
                n: gr[n] + c * slope(r[n]) * (sigma(r[n]) / sigma(rw[n]) ** 2 - 1 / sigma(r[n]))
                for n in m
            }
            m, r = {n: m[n] - lr * gm[n] for n in m}, {n: r[n] - lr * gr[n] for n in m}
        for _ in range(copy_steps):
            by_m = {n: (mw[n] - m[n]) / sigma(rw[n]) ** 2 for n in m}
            by_r = {
                n: slope(rw[n])
                * (1 / sigma(rw[n]) - (sigma(r[n]) ** 2 + (m[n] - mw[n]) ** 2) / sigma(rw[n]) ** 3)
                for n in m
            }
            mw = {n: mw[n] - lr * c * by_m[n] for n in m}
            rw = {n: rw[n] - lr * c * by_r[n] for n in m}
    return (m, r), (mw, rw)
