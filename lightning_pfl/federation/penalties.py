"""Fine-tuning that stays near the model it begins with."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_pfl.contract.local import LocalStep, Phase
from lightning_pfl.contract.view import StepView
from lightning_pfl.core.tree import Model, Tree, scale, select, tmap
from lightning_pfl.solvers.proximal import pull

Penalty = Literal["l2", "ewc", "distillation"]
FISHER = "Fisher information"
"""Name of the phase that measures it."""


def given(penalty: Penalty, start: Model, names: Collection[str]) -> Tree:
    """Make what :func:`step` needs of each client.

    Args:
        penalty: The penalty.
        start: The models to stay near, ``(clients, ...)``.
        names: The parameters that train.
    """
    if penalty != "ewc":
        return {"start": start}
    trained = select(start, names)
    first = next(iter(trained.values()))
    count = torch.zeros(len(first), dtype=first.dtype, device=first.device)
    return {"start": start, "fisher": tmap(torch.zeros_like, trained), "count": count}


def phases(penalty: Penalty, tuning: Phase) -> tuple[Phase, ...]:
    """Return the phases of the fine-tuning; before it, a pass that measures for ``"ewc"``."""
    measure = Phase(tuning.train, epochs=1, name=FISHER)
    return (measure, tuning) if penalty == "ewc" else (tuning,)


def step(penalty: Penalty, weight: float, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
    r"""Step on the loss and the penalty, or add to the Fisher information.

    Args:
        penalty: With the first model :math:`x`: ``"l2"``: :math:`\frac12 \lVert \theta - x
            \rVert^2`; ``"ewc"``: :math:`\frac12 \sum_i F_i (\theta_i - x_i)^2`, where :math:`F` is
            the mean over the client's samples of the squared gradient at :math:`x`;
            ``"distillation"``: the mean of :math:`\mathrm{KL}(\operatorname{softmax} f_x \Vert
            \operatorname{softmax} f_\theta)`.
        weight: Its factor.
        state: ``model``, and :func:`given`.
        minibatches: A minibatch.
        client: The step interface of the engine.
    """
    model, kept = state["model"], state["given"]
    if client.phase == FISHER:
        grads = client.sample_grads(model, minibatches)
        squares = tmap(lambda g: g.square().sum(1), grads)
        fisher = {n: f + squares[n] if n in squares else f for n, f in kept["fisher"].items()}
        count = kept["count"] + client.samples(minibatches)[1].sum(1).to(kept["count"])
        return {**state, "given": {**kept, "fisher": fisher, "count": count}}
    start = kept["start"]
    if penalty == "distillation":
        teacher = {"outputs": client.outputs(start, minibatches)}
        objective = partial(_distilled, weight)
        grads = client.grad(model, minibatches, objective=objective, sample_data=teacher)
    else:
        grads = client.grad(model, minibatches)
        if penalty == "l2":
            grads = pull(grads, model, start, weight)
        else:
            fisher = scale(kept["fisher"], weight / kept["count"].clamp_min(1))
            grads = tmap(lambda g, f, y, x: g + f * (y - x), grads, fisher, model, start)
    return {**state, "model": client.update(model, grads)}


def _distilled(weight: float, view: StepView, _: Tree) -> Tensor:
    """Add the divergence from the first model's predictions to the loss."""
    ours = view.outputs.log_softmax(1)
    theirs = view.sample_data["outputs"].log_softmax(1)
    divergence = (theirs.exp() * (theirs - ours)).sum(1)
    if divergence.ndim > 1:  # an output for each pixel or token
        divergence = divergence.flatten(1).mean(1)
    return view.loss + weight * view.mean(divergence)
