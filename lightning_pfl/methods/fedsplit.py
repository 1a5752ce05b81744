"""FedSplit: operator splitting, whose fixed point is the minimiser of the mean loss."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_number
from lightning_pfl.core.tree import (
    Model,
    Tree,
    add,
    scale,
    select,
    sub,
    weighted_mean,
    weighted_sum,
)
from lightning_pfl.methods.base import About, LocalStep, Method, PerClient, Phase, recordable
from lightning_pfl.methods.support.proximal import (
    LocalSolver,
    check_local_solver,
    proximal_phases,
    proximal_state,
    proximal_step,
)


class FedSplit(Method):
    r"""Clients solve proximal problems around reflected points, so that none drifts.

    Every client keeps a point :math:`z_k`; the global model is :math:`x`, their mean.

    .. math::
        u &= \operatorname{argmin}_y F_k(y) + \frac{1}{2 s} \lVert y - (2 x - z_k) \rVert^2 \\
        z_k &\leftarrow z_k + 2\, (u - x), \qquad
        x \leftarrow x + \frac1n \sum_{k \in S_t} 2\, (u_k - x)

    At a fixed point :math:`u_k = x`, so :math:`\nabla F_k(x) = (x - z_k) / s`, whose mean is 0:
    :math:`x` minimises the mean loss, however different the clients are. Where clients leave a run
    that goes on from a checkpoint, :math:`n` counts those that stay, and :math:`x` keeps the
    difference that it then has from the mean of their points, so that it isn't their minimiser.

    Args:
        prox_step: :math:`s > 0`. Plain SGD needs ``lr * (L + 1 / prox_step) < 2``.
        local_solver: ``"optimizer"``: the user's optimizer from :math:`x` on; ``"exact"``: the
            minimiser, for small convex models.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two; neither counts for
            ``"exact"``.

    State:
        server: ``model``, :math:`x`. client_state: ``point``, the :math:`z_k` of all trainable
        parameters, each leaf ``(clients, *shape)``.

    Deviation from the paper: :math:`n` counts clients with training data, and those that aren't in
    the cohort keep their points (in the paper all take part). Float buffers are averaged.

    Example:
        >>> FedSplit(prox_step=1.0, local_steps=5).local_steps
        5

    References:
        Pathak, Wainwright. FedSplit: an algorithmic framework for fast federated optimization.
        NeurIPS 2020. arXiv:2005.05238, Algorithm 1.
    """

    about = About(
        family="one model for all",
        personal="nothing; reflected points against client drift",
        assumes="one model suits all; clients drift, and come back often",
        down="$4d$",
        up="$4d$",
        keeps="$d$ numbers",
        gradients="1",
        personal_model="the global model",
        global_model="the server's",
        paper="Pathak and Wainwright 2020",
    )

    def __init__(
        self,
        prox_step: float = 1.0,
        local_solver: LocalSolver = "optimizer",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_number("prox_step", prox_step, "Use 1, for example.", positive=True)
        check_local_solver(FedSplit.__init__, local_solver, local_epochs, local_steps)
        self.prox_step, self.local_solver = prox_step, local_solver

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Train locally, or solve with all samples at once."""
        return proximal_phases(self.local_solver, super().phases(round))

    def init_client_state(self, model: Model) -> Tree:
        """Begin at the initial model, which is the mean of all points."""
        return {"point": select(model, self.parameter_split.trainable)}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Start at the received model, with the point's reflection as anchor."""
        x, point = received["model"], client_state["point"]
        reflected = sub(scale(select(x, point), 2), point)
        device = next(iter(point.values())).device
        strength = torch.full_like(info.weights, 1 / self.prox_step, device=device)
        return proximal_state(x, reflected, strength)

    @recordable("local_solver")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step on the proximal problem, or solve it."""
        return proximal_step(state, minibatches, client, self.local_solver)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Move the point, and send by how much."""
        point, model = client_state["point"], state["model"]
        change = scale(sub(select(model, point), received["model"]), 2)
        buffers = {name: leaf for name, leaf in model.items() if name not in point}
        return {"model": buffers, "change": change}, {"point": add(point, change)}

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Keep the model the mean of all points."""
        count = int(self.has_training_data.sum())
        each = torch.full((len(info),), 1 / count, dtype=torch.float64)
        change = weighted_sum(uploads["change"], each)
        moved = add(select(server["model"], change), change)
        return {"model": {**moved, **weighted_mean(uploads["model"], info.weights)}}
