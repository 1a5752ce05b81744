"""GTVMin: generalized total variation minimisation by a primal-dual method on a graph."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_pfl.contract.local import without_data
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.checks import check_choice, check_number
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, expand, flat, select, sub, unflat
from lightning_pfl.graphs import GraphLike, resolve_graph
from lightning_pfl.graphs.messages import Exchange, ReceivedMessages
from lightning_pfl.methods.base import About, Known, LocalStep, Method, PerClient, Phase
from lightning_pfl.methods.support import memory
from lightning_pfl.methods.support.proximal import (
    LocalSolver,
    check_local_solver,
    proximal_phases,
    proximal_result,
    proximal_state,
    proximal_step,
)
from lightning_pfl.methods.support.stability import Pull, WatchedPull

Norm = Literal["l2", "l1", "squared"]
COPIES = 7
"""Copies of the duals during their update: the stored ones, the cohort's, messages, four temporary.
"""


def dual_update(dual: Tensor, weights: Tensor, norm: Norm, step: float = 0.5) -> Tensor:
    r"""Update dual variables: the resolvent of the penalty's conjugate.

    A projection to the ball of radius :math:`c` (``"l2"``), to :math:`[-c, c]` in each coordinate
    (``"l1"``), or :math:`u / (1 + \sigma / c)` (``"squared"``).

    Args:
        dual: :math:`u`, ``(..., dim)``.
        weights: :math:`c = \lambda A_e \ge 0`, ``(...)``.
        norm: The penalty.
        step: :math:`\sigma`, for ``"squared"``.

    Example:
        >>> u = torch.tensor([[3.0, 4.0]])
        >>> [dual_update(u, torch.tensor([2.5]), norm).tolist() for norm in ("l2", "l1")]
        [[[1.5, 2.0]], [[2.5, 2.5]]]
    """
    weights = weights.to(dual).unsqueeze(-1)
    if norm == "l1":
        return torch.minimum(torch.maximum(dual, -weights), weights)
    if norm == "squared":
        return dual * weights / (weights + step)
    length: Tensor = torch.linalg.vector_norm(dual, dim=-1, keepdim=True)
    return dual * (weights / length.clamp_min(torch.finfo(dual.dtype).tiny)).clamp_max(1)


class GTVMin(WatchedPull, Method):
    r"""Every client has a model, coupled to neighbours by the total variation over a graph.

    .. math::
        \min_w \sum_i L_i(w_i) + \lambda \sum_{e = \{i, j\}} A_e\, \phi(w_i - w_j)

    with :math:`\phi = \lVert \cdot \rVert_2`, whose solutions are equal within clusters of
    clients, :math:`\lVert \cdot \rVert_1` or :math:`\frac12 \lVert \cdot \rVert^2`. Every edge has
    a dual variable :math:`u_e`. In a round

    .. math::
        w_i^+ &= \arg\min_z L_i(z) + \frac1{2 \tau_i} \Bigl\lVert z - \bigl(w_i - \tau_i \sum_e
        D_{e, i} u_e\bigr) \Bigr\rVert^2, \qquad \tau_i = \frac s{\deg(i)} \\
        u_e^+ &= \operatorname{DU}_e\bigl(u_e + \sigma_e [2 (w_i^+ - w_j^+) - (w_i - w_j)]\bigr),
        \qquad \sigma_e = \tfrac1{2 s}

    with :math:`D_{e, i} = 1`, :math:`D_{e, j} = -1` for :math:`e = (i, j)`, and
    :func:`dual_update` for DU. Each client sends :math:`2 w_i^+ - w_i` to its neighbours, one
    vector per edge and direction, and both ends store :math:`u_e`, with opposite signs.

    Args:
        graph: Who is whose neighbour, with the weights :math:`A_e`; see ``lightning_pfl.graphs``.
        regularization: :math:`\lambda \ge 0`. 0 makes the clients independent, with a proximal term
            towards their last models.
        norm: :math:`\phi`: ``"l2"``, ``"l1"`` or ``"squared"``.
        step_ratio: :math:`s > 0`, 1 in the paper. The solution doesn't depend on it. The proximal
            term has the weight :math:`\deg(i) / s`, so networks, which need many gradient steps,
            converge faster with 10 or more.
        local_solver: The primal update: ``"optimizer"`` takes some steps of the user's optimizer
            on the gradients of both terms, ``"exact"`` minimises over all samples of a client, for
            convex losses of few parameters.
        local_epochs: Passes over a client's data per round, for ``"optimizer"``.
        local_steps: Optimizer steps instead. Exactly one of the two. Plain SGD needs ``lr * (L +
            degree / step_ratio) < 2``.

    State:
        client_state: ``model``, the complete model; ``duals``, :math:`u_e` with the client's sign,
        ``(clients, slots, d)``; ``pull``, their sum, ``(clients, d)``; both over the trainable
        parameters.

    Deviation from the paper: with ``"optimizer"``, its inexact update, the number of gradient steps
    is fixed. Edges with an end outside the cohort keep their dual; the paper is synchronous.
    Clients without neighbours have :math:`\tau = s`. Buffers never leave the client.

    A client without training samples or minibatches has :math:`L_i = 0`: it takes part with the
    primal update :math:`w_i^+ = w_i - \tau_i \sum_e D_{e, i} u_e`.

    Example:
        >>> GTVMin("ring", regularization=0.1).norm
        'l2'

    References:
        SarcheshmehPour, Tian, Zhang, Jung. Clustered federated learning via generalized total
        variation minimization. IEEE Transactions on Signal Processing, 2023. arXiv:2105.12769,
        Algorithm 1.
    """

    about = About(
        family="a graph",
        personal="everything; neighbours are held together by total variation",
        assumes="a graph whose clusters share a model",
        down="$4d$ per neighbour",
        up="$4d$ per neighbour",
        keeps="model with buffers, $d$ per edge",
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="SarcheshmehPour et al. 2023",
    )
    personal: ParameterSpec = "all"
    fixed_clients: ClassVar[str] = "each client is a node of its graph"
    include_clients_without_data: ClassVar[bool] = True
    edge_state: ClassVar[tuple[str, ...]] = ("duals",)

    def __init__(
        self,
        graph: GraphLike,
        regularization: float = 0.01,
        norm: Norm = "l2",
        step_ratio: float = 1.0,
        local_solver: LocalSolver = "optimizer",
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        check_number("regularization", regularization, "Use 0.01, for example.")
        check_choice("norm", norm, get_args(Norm), "Use 'l2'.")
        advice = "Use 1 as in the paper, or 10 for networks."
        check_number("step_ratio", step_ratio, advice, positive=True)
        check_local_solver(GTVMin.__init__, local_solver, local_epochs, local_steps)
        self.given_graph, self.regularization = graph, regularization
        self.norm: Norm = norm
        self.step_ratio = step_ratio
        self.local_solver: LocalSolver = local_solver

    def bind(self, known: Known) -> None:
        """Build the graph."""
        super().bind(known)
        self.graph = resolve_graph(self.given_graph, self.num_clients, self.seed)
        # These are one over tau.
        self.pulls = self.graph.mask.sum(1).clamp_min(1).double() / self.step_ratio

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Take steps of the optimizer, or one step on all samples."""
        return proximal_phases(self.local_solver, super().phases(round))

    def pull(self, server: Tree, info: ClientInfo) -> Pull:
        """Return the proximal term."""
        return Pull(float(self.pulls.max()), "degree / step_ratio", "a larger `step_ratio`")

    # --- a client's round ---

    def init_client_state(self, model: Model) -> Tree:
        """Return the complete model, with duals of zero."""
        theta = flat(expand(model, 1), self.parameter_split.trainable)[0]
        slots = self.graph.mask.shape[1]
        memory.require(
            COPIES * self.num_clients * slots * theta.numel() * theta.element_size(),
            theta.device,
            f"GTVMin with {self.num_clients} clients, up to {slots} neighbours each and "
            f"{theta.numel()} parameters",
            "Use a sparser `graph`, such as the nearest neighbours, or a smaller model.",
        )
        # An expanded view, which the client state store copies for each client.
        duals = theta.new_zeros(()).expand(slots, len(theta))
        return {"model": model, "pull": torch.zeros_like(theta), "duals": duals}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Set up the primal update's problem."""
        model = client_state["model"]
        last = select(model, self.parameter_split.trainable)
        pull = client_state["pull"]
        strength = self.pulls[info.index.clamp_max(self.num_clients - 1)]
        strength = send(strength, pull.device, pull.dtype)
        shift = pull / strength.unsqueeze(1)
        center = sub(last, unflat(shift, last, self.parameter_split.trainable))
        return proximal_state(model, center, strength)

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Take a step of the primal update, or solve it."""
        return proximal_step(state, minibatches, client, self.local_solver)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Store the model, and the last one for the message."""
        last = flat(client_state["model"], self.parameter_split.trainable)
        idle = without_data(self.phases(info.round), info.steps)
        model = proximal_result(state, idle)
        return {"model": {}}, {"model": model, "pull": client_state["pull"], "last": last}

    # --- messages ---

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """Exchange one message for all neighbours, after local training."""
        return (Exchange("models", "all"),)

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """Send the extrapolated model."""
        now = flat(client_state["model"], self.parameter_split.trainable)
        return {"ahead": 2 * now - client_state.get("last", now)}

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """Update the duals of edges whose other end takes part."""
        duals, weights = client_state["duals"], inbox.weights
        ahead = inbox.sent["ahead"].unsqueeze(1) - inbox.messages["ahead"]
        step = 0.5 / self.step_ratio
        bound = self.regularization * weights
        moved = dual_update(duals + step * ahead, bound, self.norm, step)
        duals = torch.where((weights > 0).unsqueeze(2), moved, duals)
        return {"model": client_state["model"], "duals": duals, "pull": duals.sum(1)}
