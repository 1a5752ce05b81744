"""Fine-tuning with a penalty, against NumPy: what holds each client near the first model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import QuadraticModule, assert_trees_close, descend, fit
from lightning_pfl.testing.conformance import SIZES, small_clients, small_module
from tests.methods.quadratics import LR, STEPS, A, C, close, ragged
from tests.methods.references import softmax
from tests.methods.references.softmax import softmax_module

ENGINES = ["vectorized", "sequential"]
WEIGHT, RATE = 0.8, 0.3


def fisher(w: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """The mean over the samples of the squared gradient."""
    each = [softmax.gradient(w, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    return {n: np.mean([g[n] ** 2 for g in each], 0) for n in w}


def penalty_gradient(kind: str, w: Any, start: Any, x: np.ndarray, importance: Any) -> Any:
    if kind == "l2":
        return {n: w[n] - start[n] for n in w}
    if kind == "ewc":
        return {n: importance[n] * (w[n] - start[n]) for n in w}
    # The divergence's gradient by the logits is the difference of the probabilities.
    change = np.exp(softmax.log_probabilities(w, x)) - np.exp(softmax.log_probabilities(start, x))
    return {"head.weight": change.T @ x / len(x), "head.bias": change.mean(0)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["l2", "ewc", "distillation"])
def test_a_classifier_is_tuned_as_the_reference(kind: Any, engine: str) -> None:
    data = small_clients(shuffle=False)
    tuning = HeadFineTuning(epochs=3, lr=RATE, penalty=kind, penalty_weight=WEIGHT)
    run = fit(FedAvg(), data, softmax_module(), 1, engine, callbacks=[tuning])
    start = softmax.as_numpy(run.strategy.global_state_dict())
    for k, size in enumerate(SIZES):
        x = data.fields[0][data.indices[k]].flatten(1).numpy()
        y = data.fields[1][data.indices[k]].numpy()
        w, importance = start, fisher(start, x, y) if size else None
        for _ in range(3):
            for first in range(0, size, 3):
                at = slice(first, first + 3)
                g = softmax.gradient(w, x[at], y[at])
                held = penalty_gradient(kind, w, start, x[at], importance)
                w = softmax.moved(w, softmax.moved(g, held, WEIGHT), -RATE)
        for name, leaf in w.items():
            found = tuning.client_state_dict(k)[name].numpy()
            np.testing.assert_allclose(found, leaf, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_squares_add_curvature(engine: str) -> None:
    tuning = HeadFineTuning("full", epochs=2, penalty="l2", penalty_weight=1.5)
    module = QuadraticModule(2, LR, 0.5)
    run = fit(FedAvg(), ragged(), module, 1, engine, callbacks=[tuning])
    x = run.server["model"]["w"]
    a = A + 1.5
    want = descend(x, a, (A[:, None] * C + 1.5 * x) / a[:, None], LR, 2 * STEPS)
    close(torch.stack([tuning.client_state_dict(k)["w"] for k in range(4)]), want)


@pytest.mark.parametrize("kind", ["l2", "distillation"])
def test_a_vanishing_weight_is_fine_tuning(kind: Any) -> None:
    found = []
    for settings in ({}, {"penalty": kind, "penalty_weight": 1e-300}):
        given: Any = settings
        tuning = HeadFineTuning(epochs=2, **given)
        fit(FedAvg(), small_clients(), small_module(), 1, callbacks=[tuning])
        found.append(tuning.client_state_dict(3))
    assert_trees_close(found[0], found[1])


def test_a_large_importance_keeps_the_first_model() -> None:
    """The more, the nearer: with SGD's bound on the step kept."""
    far = []
    for weight in (1e-6, 20.0):
        tuning = HeadFineTuning(epochs=20, lr=0.1, penalty="ewc", penalty_weight=weight)
        run = fit(FedAvg(), small_clients(), softmax_module(), 1, callbacks=[tuning])
        start = run.strategy.global_state_dict()["head.weight"]
        far.append(float((tuning.client_state_dict(3)["head.weight"] - start).norm()))
    assert far[1] < 0.5 * far[0]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"penalty": "l1"}, "`penalty` to be 'l2', 'ewc' or 'distillation', but got penalty='l1'"),
        ({"penalty_weight": 0.0}, "`penalty_weight` to be a finite number > 0, but got"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        HeadFineTuning(**settings)
