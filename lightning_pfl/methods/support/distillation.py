"""A server that fits its model to the mean outputs of its clients' models, for FedDF and PerAda."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.local import LocalStep
from lightning_pfl.contract.view import StepView
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.solvers.distances import distance_to


def begin(model: Model, uploads: Model) -> Tree:
    """Make the state: the model, and the clients' models as teachers.

    Args:
        model: The server's model, ``(1, ...)``.
        uploads: The clients' models, ``(1, clients, ...)``.
    """
    return {"model": dict(model), "teachers": dict(uploads)}


def step(state: Tree, minibatches: Any, server: LocalStep, temperature: float) -> Tree:
    r"""Step on :math:`T^2 \operatorname{KL}(\operatorname{softmax}(\bar f / T) \,\|\, p_T(x))`.

    :math:`\bar f` is the plain mean of the teachers' outputs, in eval mode.

    Args:
        state: As of :func:`begin`.
        minibatches: A minibatch.
        server: The step interface of the engine.
        temperature: :math:`T`.
    """
    teachers, model = state["teachers"], state["model"]
    outputs: list[Tensor] = []
    for teacher in range(next(iter(teachers.values())).shape[1]):
        # Frozen entries, which no client sends, are the server's.
        one = {
            name: teachers[name][:, teacher] if name in teachers else model[name] for name in model
        }
        outputs.append(server.outputs(one, minibatches))

    def objective(view: StepView, given: Tree) -> Tensor:
        return view.mean(distance_to(view.outputs, view.sample_data["target"], "kl", temperature))

    data = {"target": torch.stack(outputs).mean(0)}
    grads = server.grad(model, minibatches, objective=objective, sample_data=data)
    return {**state, "model": server.update(model, grads)}


def cosine(steps: int) -> list[float]:
    """Return factors that fall from 1 towards 0 on a half cosine."""
    return [(1 + math.cos(math.pi * number / steps)) / 2 for number in range(steps)]
