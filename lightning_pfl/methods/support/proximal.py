r"""Local solvers of :math:`F_i(x) + \frac{c}{2}\lVert x - b\rVert^2`, exactly or by SGD steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.local import LocalStep, PerClient, Phase
from lightning_pfl.core.checks import check_choice, check_used
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, flat, per_client, select, tmap, unflat, where
from lightning_pfl.solvers.lbfgs import minimise

LocalSolver = Literal["optimizer", "exact"]


def check_local_solver(
    init: Callable[..., None],
    local_solver: str,
    local_epochs: PerClient | None,
    local_steps: PerClient | None,
) -> None:
    """Raise ValueError for an unknown local solver, or a budget of the exact one.

    Args:
        init: The method's constructor.
        local_solver: Which.
        local_epochs: The budget of the user's optimizer.
        local_steps: The same.
    """
    advice = "Use 'optimizer' for networks, 'exact' for small convex models."
    check_choice("local_solver", local_solver, get_args(LocalSolver), advice)
    budget = {"local_epochs": local_epochs, "local_steps": local_steps}
    check_used(init, budget, local_solver == "optimizer", "local_solver='optimizer'")


def proximal_state(model: Model, anchor: Model, strength: Tensor) -> Tree:
    """Make the state for :func:`proximal_step`.

    Args:
        model: The model to begin with, ``(clients, ...)``; it is copied, as training overwrites it.
        anchor: :math:`b`, the entries with the term, ``(clients, ...)``.
        strength: :math:`c`, ``(clients,)``.
    """

    def copied(leaf: Tensor) -> Tensor:
        # One that all share would stay so with a single client, and be copied again by a gradient.
        return leaf.clone(memory_format=torch.contiguous_format)

    return {"model": tmap(copied, model), "anchor": anchor, "strength": strength}


def proximal_step(
    state: Tree, minibatches: Any, client: LocalStep, local_solver: LocalSolver
) -> Tree:
    """Step the user's optimizer on the gradients of both terms, or solve for the minimiser.

    Args:
        state: Of :func:`proximal_state`.
        minibatches: A minibatch; for ``"exact"`` all samples.
        client: What the engine supplies.
        local_solver: Which.
    """
    model, anchor, strength = state["model"], state["anchor"], state["strength"]
    if local_solver == "exact":
        return {**state, "model": _exact(model, anchor, strength, minibatches, client)}

    def pull(g: Tensor, x: Tensor, b: Tensor) -> Tensor:
        return g + per_client(strength, x) * (x - b)

    grads = client.grad(model, minibatches)
    pulled = tmap(pull, select(grads, anchor), model, anchor)
    return {**state, "model": client.update(model, {**grads, **pulled})}


def proximal_result(state: Tree, idle: Tensor) -> Model:
    """Return the model after local work, or :math:`b` for a client without data (:math:`F_i = 0`).

    Args:
        state: Of :func:`proximal_state`, after all steps.
        idle: Which clients have no data, bool ``(clients,)``.
    """
    strength = state["strength"]
    free = send(idle, strength.device) & (strength > 0)
    return {**state["model"], **where(free, state["anchor"], state["model"])}


def _exact(
    model: Model, anchor: Model, strength: Tensor, minibatches: Any, client: LocalStep
) -> Model:
    names = tuple(anchor)
    center = flat(anchor, names)

    def gradient(x: Tensor) -> Tensor:
        at = {**model, **unflat(x, model, names)}
        grads = client.grad(at, minibatches)
        zeros = {name: torch.zeros_like(model[name]) for name in names if name not in grads}
        return flat({**zeros, **grads}, names) + strength.to(x).unsqueeze(1) * (x - center)

    found = minimise(gradient, flat(model, names), strength.to(center))
    return {**model, **unflat(found, model, names)}


def proximal_phases(local_solver: LocalSolver, optimizer: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Return the local training: one step on all samples for ``"exact"``, else the given phases.

    Args:
        local_solver: Which.
        optimizer: The phases of the user's optimizer.
    """
    return optimizer if local_solver != "exact" else (Phase("all", steps=1, full_batch=True),)
