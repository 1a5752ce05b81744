"""FedMAP: Zhang et al. (2024), algorithms 1 to 3 on networks, and section A.4 in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.references.training import State, batches, load, train, with_data

Array = npt.NDArray[np.float64]


def fedmap(
    module: Any,
    data: Any,
    cohorts: list[Any],
    variance: float = 1.0,
    weighting: str = "posterior",
    epochs: int = 1,
    summed: bool = False,
    head_only: bool = False,
) -> tuple[State, list[State], list[list[float]]]:
    """Prior mean (with the shared part), all clients' models, and each round's weights."""
    names = [n for n, _ in module.named_parameters()]
    under = [n for n in names if n.startswith("head") or not head_only]
    start: State = {n: leaf.detach().clone() for n, leaf in module.state_dict().items()}
    gamma, client_state, history = dict(start), [dict(start) for _ in range(data.num_clients)], []
    begun = [False] * data.num_clients
    for t, cohort in enumerate(cohorts):
        trained, logs = [], []
        for k in (k for k in with_data(data) if k in cohort.tolist()):
            size = int(data.num_samples[k])
            center = {n: gamma[n] for n in under}
            begin = {
                **client_state[k],
                **{n: gamma[n] for n in names if n not in under or not begun[k]},
            }

            def quadratic(net: Any, center: State = center) -> Tensor:
                params = dict(net.named_parameters())
                return sum_of_squares(params, center) / (2 * variance)

            share = 1 / size if summed else 1.0
            net = train(
                load(module, begin),
                batches(data, k, t, epochs),
                lambda net, share=share: share * quadratic(net),  # type: ignore[misc]
            )
            client_state[k] = {n: leaf.detach().clone() for n, leaf in net.state_dict().items()}
            begun[k] = True
            x, y = (field[data.indices[k]] for field in data.fields)
            with torch.no_grad():
                loss = float(F.cross_entropy(net.eval()(x), y))
                q = float(quadratic(net))
            logs.append(
                {
                    "posterior": -loss - q,
                    "exact": -size * loss - q,
                    "per_sample": -loss - q / size,
                    "samples": math.log(size),
                    "uniform": 0.0,
                }[weighting]
            )
            trained.append(client_state[k])
        raw = np.exp(np.array(logs) - max(logs))
        weights = (raw / raw.sum()).tolist()
        gamma |= {
            n: sum(w * one[n] for w, one in zip(weights, trained, strict=True)) for n in names
        }
        history.append(weights)
    return gamma, client_state, history


def sum_of_squares(params: dict[str, Tensor], center: State) -> Tensor:
    """The squared distance of some parameters to a centre."""
    return torch.stack([(params[n] - m).square().sum() for n, m in center.items()]).sum()


# --- section A.4: lines, mean squared error, a prior with learned variances ---


def shifted_lines(seed: int, samples: tuple[int, ...] = (60, 1, 2, 3, 50)) -> list[Array]:
    """Each client's samples, ``(N_k, 2)``."""
    rng = np.random.default_rng(seed)
    lines = []
    for k, size in enumerate(samples):
        x = rng.normal(k, 1, size)
        lines.append(np.stack([x, -x + 4 * k + rng.normal(0, math.sqrt(0.8), size)], 1))
    return lines


def pooled_fit(lines: list[Array]) -> Array:
    """Slope and intercept of all samples together."""
    x, y = np.concatenate(lines).T
    fit: Array = np.linalg.lstsq(np.stack([x, np.ones_like(x)], 1), y, rcond=None)[0]
    return fit


def local_line(line: Array, mean: Array, precision: Array) -> tuple[Array, float]:
    """The minimiser of mean squared error plus prior, and the minimum."""
    x, y = line.T
    design = np.stack([x, np.ones_like(x)], 1)
    hessian = 2 * design.T @ design / len(x) + np.diag(precision)
    theta: Array = np.linalg.solve(hessian, 2 * design.T @ y / len(x) + precision * mean)
    value = np.mean((design @ theta - y) ** 2) + 0.5 * precision @ (theta - mean) ** 2
    return theta, float(value)


def learn_prior(
    lines: list[Array], rounds: int, mean: Array, c: float = 1.0, epsilon: float = 1e-4
) -> tuple[Array, Array, float]:
    """Means, spreads and the envelope after rounds of exact local and exact server steps."""
    weights = np.array([len(line) for line in lines], dtype=float)
    weights /= weights.sum()
    spread = np.zeros(2)
    for _ in range(rounds):
        solved = [local_line(line, mean, 1 / (spread + c)) for line in lines]
        theta = np.stack([one for one, _ in solved])
        for _ in range(100):
            alpha = 1 / (spread + c)
            mean = alpha * (weights @ theta) / (alpha + 2 * epsilon)
            deviation = weights @ (theta - mean) ** 2
            # 4 eps s (s + c)^2 = v, by the roots of the cubic.
            roots = [np.roots([1, 2 * c, c * c, -v / (4 * epsilon)]) for v in deviation]
            spread = np.array([max(r.real for r in rs if abs(r.imag) < 1e-9) for rs in roots])
    values = np.array([local_line(line, mean, 1 / (spread + c))[1] for line in lines])
    more = epsilon * (mean @ mean + spread @ spread)
    return mean, spread, float(weights @ values + more)
