"""HomologicalConstraints: models with equal projections, by saddle-point dynamics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.local import without_data
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.checks import check_budget, check_number
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, Tree, expand
from lightning_pfl.graphs import GraphLike
from lightning_pfl.graphs.messages import Exchange, ReceivedMessages
from lightning_pfl.methods.base import About, Known, Method, PerClient
from lightning_pfl.methods.support.sheaf import SheafClients, pulled, saddle_divergence
from lightning_pfl.solvers.sheaf import Maps, lift

COPIES = 2
"""Copies of the maps: the stored ones and the cohort's."""


class HomologicalConstraints(SheafClients, Method):
    r"""Clients minimise their losses subject to equal projections of neighbours' models.

    .. math::
        \min_x \sum_i f_i(x_i) \quad \text{s.t.} \quad P_{ij} x_i = P_{ji} x_j \quad
        \text{for all edges } \{i, j\}

    or :math:`L x = 0` with the sheaf Laplacian. A round is a step of the saddle-point dynamics of
    :math:`f(x) + y^\top L x + \frac\rho2 x^\top L x`, first in :math:`x`, then in
    :math:`y`:

    .. math::
        x \leftarrow x - \alpha\, (\nabla f(x) + L (\rho x + y)), \qquad y \leftarrow y + h\, L x

    A client sends each neighbour :math:`P_{ij} (\rho x_i + y_i)` before and :math:`P_{ij} x_i`
    after its step. The maps are fixed; models may have different numbers of parameters. Edges with
    an end outside the cohort are left out of the round. Without the losses, plain gradient steps
    are stable if :math:`\alpha \mu (2 \rho + h \mu) < 4` for the largest eigenvalue :math:`\mu` of
    :math:`L`; violations before or during the run are warned of.

    Args:
        graph: Who is whose neighbour; see ``lightning_pfl.graphs``.
        step: :math:`h > 0`; None is the optimizer's learning rate :math:`\alpha`.
        penalty: :math:`\rho \ge 0`, the weight of the augmented term.
        edge_dim_ratio: :math:`\gamma` in (0, 1], the edges' dimensions :math:`\lfloor \gamma
            \min(d_i, d_j) \rfloor`; unused where maps are given.
        maps: ``"identity"``: the first :math:`d_{ij}` parameters, without storage; ``"random"``:
            independent normal numbers; or a mapping from (i, j) to :math:`P_{ij}`, for both ends of
            every edge.
        map_std: Standard deviation of random maps, positive.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two. The pull is that of
            the round's beginning in all steps.

    State:
        client_state: ``model``, the complete model; ``dual``, :math:`y`, ``(clients, d_i)``;
        ``maps``, ``(clients, slots, width, d_i)``, unless they are the identity.

    Deviation from the paper: its continuous dynamics are discretised by alternating steps, with
    minibatch gradients and the user's optimizer for :math:`x`. A client without training samples or
    minibatches, whose :math:`f_i` is 0, takes one plain step of size :math:`\alpha`. :math:`\rho`
    and the weights of edges are 1 there.

    Example:
        >>> HomologicalConstraints("ring", step=0.05).penalty
        1.0

    References:
        Hansen, Ghrist. Distributed optimization with sheaf homological constraints. Allerton
        2019. arXiv:1907.02105, section V.
    """

    about = About(
        family="a graph",
        personal="everything, also the architecture; projections of neighbours are equal",
        assumes="projections of neighbours are equal, models may differ in shape",
        down=r"$8 \sum_j d_{ij}$",
        up=r"$8 \sum_j d_{ij}$",
        keeps=(
            "model with buffers, its multiplier; $d_{ij} d$ per edge, unless maps are the identity"
        ),
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="Hansen and Ghrist 2019",
    )
    personal: ParameterSpec = "all"
    fixed_clients: ClassVar[str] = "each client is a node of its graph"
    include_clients_without_data: ClassVar[bool] = True
    edge_state: ClassVar[tuple[str, ...]] = ("maps",)

    def __init__(
        self,
        graph: GraphLike,
        step: float | None = None,
        penalty: float = 1.0,
        edge_dim_ratio: float = 1.0,
        maps: Maps = "identity",
        map_std: float = 0.01,
        local_epochs: PerClient | None = None,
        local_steps: PerClient | None = 1,
    ) -> None:
        # As in L2GD, the default step gives way to epochs.
        local_steps = None if local_epochs is not None and local_steps == 1 else local_steps
        check_budget(local_epochs, local_steps)
        super().__init__(local_epochs, local_steps, weighting="uniform")
        if step is not None:
            check_number("step", step, "Use None for the learning rate.", positive=True)
        check_number("penalty", penalty, "Use 1, as the authors do.")
        self.set_maps(graph, edge_dim_ratio, maps, map_std)
        self.step, self.penalty = step, penalty

    def bind(self, known: Known) -> None:
        """Build the graph and the maps."""
        super().bind(known)
        self.resolve_sheaf(learned=False)

    # --- state ---

    def init_client_state(self, model: Model) -> Tree:
        """Return the complete model, multipliers of zero, and stored maps."""
        maps = self.empty_maps(model, COPIES)
        return {"model": model, "dual": torch.zeros_like(self.theta(expand(model, 1))[0]), **maps}

    # --- a client's round ---

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """Exchange projections for the step of the models, then for that of the multipliers."""
        return Exchange("models", "each", "before"), Exchange("multipliers", "each", "after")

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """Send projections to the space of each edge."""
        x = self.theta(client_state["model"])
        sent = self.penalty * x + client_state["dual"] if exchange == "models" else x
        return self.projection(sent, client_state, info)

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """Apply the Laplacian to the messages, for the pull or the step of the multipliers."""
        maps, scalars = client_state.get("maps"), client_state["dual"].shape[1]
        product = lift(self.residual(inbox), maps, scalars)
        if exchange == "models":
            return {**client_state, "pull": self.unflat(product, client_state["model"])}
        return {**client_state, "dual": client_state["dual"] + self.step_at(info) * product}

    def step_at(self, info: ClientInfo) -> float:
        """Return :math:`h`."""
        return info.lr if self.step is None else self.step

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Store the model and the multipliers."""
        idle = without_data(self.phases(info.round), info.steps)
        return {"model": {}}, {"model": pulled(state, idle, info), "dual": client_state["dual"]}

    # --- what is watched ---

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Warn of steps that diverge, before they are taken."""
        return saddle_divergence(federation, self, round)
