"""SheafFMTL: models whose learned projections agree between neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.local import without_data
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.checks import check_choice, check_number
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.graphs import GraphLike
from lightning_pfl.graphs.messages import Exchange, ReceivedMessages
from lightning_pfl.methods.base import About, Known, Method, PerClient
from lightning_pfl.methods.support.sheaf import SheafClients, divergence, measure, pulled
from lightning_pfl.solvers.sheaf import (
    Maps,
    lift,
    move_maps,
)

Laplacian = Literal["combined", "separate"]
COPIES = 3
"""Copies of the maps: the stored ones, the cohort's, and those after a step."""


class SheafFMTL(SheafClients, Method):
    r"""Clients couple learned projections of their models to those of their neighbours.

    The models may have different numbers of parameters. On the edge of clients :math:`i` and
    :math:`j`, of weight :math:`a_{ij}`, both project to a space of dimension :math:`d_{ij} =
    \lfloor \gamma \min(d_i, d_j) \rfloor` by restriction maps :math:`P_{ij}` and :math:`P_{ji}`.
    Models and maps minimise

    .. math::
        \sum_i F_i(\theta_i) + \frac\lambda2 \sum_{\{i, j\}} a_{ij}
        \lVert P_{ij} \theta_i - P_{ji} \theta_j \rVert^2

    In a round, with two messages to each neighbour, of :math:`d_{ij}` numbers each,

    .. math::
        \theta_i &\leftarrow \theta_i - \alpha \Bigl( \nabla F_i(\theta_i) + \lambda \sum_j a_{ij}
        P_{ij}^\top (P_{ij} \theta_i - P_{ji} \theta_j) \Bigr) \\
        P_{ij} &\leftarrow P_{ij} - \eta \lambda a_{ij} (P_{ij} \theta_i - P_{ji} \theta_j)
        \theta_i^\top \quad \text{at the new } \theta

    A client only sends projections, and never its maps. Edges with an end outside the cohort are
    left out of the round.

    The maps may vanish, which removes the penalty: ``sheaf/map_norm`` (mean over the edges' ends,
    Frobenius) and ``sheaf/map_norm/min`` are logged in every round. A step on the maps is stable if
    :math:`\eta \lambda a_{ij} (\lVert \theta_i \rVert^2 + \lVert \theta_j \rVert^2) < 2` on all
    edges; the largest of these is logged as ``sheaf/map_step``. A step on the models needs
    :math:`\alpha \lambda \lambda_{\max}(L) < 2` for the sheaf Laplacian :math:`L`. Violations
    before or during the run are warned of.

    Args:
        graph: Who is whose neighbour; see ``lightning_pfl.graphs``.
        regularization: :math:`\lambda \ge 0`. 0 makes the clients independent.
        map_lr: :math:`\eta \ge 0`. 0 fixes the maps, without the second message.
        edge_dim_ratio: :math:`\gamma` in (0, 1]. Messages and maps grow with it; unused for given
            maps.
        laplacian: ``"combined"``: the neighbours' pull is part of every local gradient, and passes
            through momentum and clipping; with one local step this is the update above, with more
            the pull stays that at the start of the round. ``"separate"``: local training first,
            then one step of size :math:`\alpha` along the pull at its result, as in the released
            code.
        maps: ``"random"``: independent normal numbers; ``"identity"``: the first :math:`d_{ij}`
            parameters; or a mapping from (i, j) to :math:`P_{ij}`, for both ends of every edge.
        map_std: Standard deviation of random maps, positive.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.

    State:
        client_state: ``model``, the complete model; ``maps``, ``(clients, slots, width, d_i)`` with
        the width of the largest edge space and zeros beyond :math:`d_{ij}`; none for fixed identity
        maps.

    Deviation from the paper: parameters are flattened, trainable ones only; buffers are personal.
    Local gradients are those of minibatches. A client without training samples or minibatches has
    :math:`F_i = 0`: with ``"combined"`` it takes one plain step of size :math:`\alpha` along the
    pull. Clients step simultaneously, as in the paper; in the released code they step in turn
    (Gauss-Seidel), with results that depend on their order. Both have the same fixed points with
    one full local step. Edges have weights, 1 in the paper.

    Example:
        >>> SheafFMTL("ring", regularization=0.01, map_lr=0.1, edge_dim_ratio=0.3).laplacian
        'combined'

    References:
        Ben Issaid, Vepakomma, Bennis. Tackling feature and sample heterogeneity in decentralized
        multi-task learning: a sheaf-theoretic approach. TMLR 2025. arXiv:2502.01145, Algorithm 1.
    """

    about = About(
        family="a graph",
        personal="everything, also the architecture; neighbours agree on learned projections",
        assumes="projections of neighbours agree, models may differ in shape",
        down=r"$8 \sum_j d_{ij}$, fixed maps $4 \sum_j d_{ij}$",
        up=r"$8 \sum_j d_{ij}$, fixed maps $4 \sum_j d_{ij}$",
        keeps="model with buffers; $d_{ij} d$ per edge, unless maps are the fixed identity",
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="Ben Issaid et al. 2025",
    )
    personal: ParameterSpec = "all"
    fixed_clients: ClassVar[str] = "each client is a node of its graph"
    include_clients_without_data: ClassVar[bool] = True
    edge_state: ClassVar[tuple[str, ...]] = ("maps",)

    def __init__(
        self,
        graph: GraphLike,
        regularization: float = 1e-3,
        map_lr: float = 1e-2,
        edge_dim_ratio: float = 0.1,
        laplacian: Laplacian = "combined",
        maps: Maps = "random",
        map_std: float = 0.01,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        for name, value in (("regularization", regularization), ("map_lr", map_lr)):
            check_number(name, value, "Use 0.01, for example.")
        check_choice("laplacian", laplacian, get_args(Laplacian), "Use 'combined'.")
        self.set_maps(graph, edge_dim_ratio, maps, map_std)
        self.regularization, self.map_lr = regularization, map_lr
        self.laplacian = laplacian

    def bind(self, known: Known) -> None:
        """Build the graph and the edges' dimensions."""
        super().bind(known)
        self.resolve_sheaf(learned=bool(self.map_lr))

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        return [] if self.regularization else ["regularization=0 makes SheafFMTL LocalOnly."]

    # --- state ---

    def init_client_state(self, model: Model) -> Tree:
        """Return the model, and empty maps that :meth:`init_client_state_rows` fills."""
        return {"model": model, **self.empty_maps(model, COPIES)}

    # --- a client's round ---

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """Exchange projections for the step of the models, then for that of the maps."""
        before = "before" if self.laplacian == "combined" else "after"
        models = Exchange("models", "each", before)  # type: ignore[arg-type]
        return (models, Exchange("maps", "each", "after")) if self.map_lr else (models,)

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """Send the model's projection to the space of each edge."""
        return self.projection(self.theta(client_state["model"]), client_state, info)

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """Compute the neighbours' pull, or step the maps."""
        theta, residual = self.theta(client_state["model"]), self.residual(inbox)
        if exchange == "maps":
            step = self.map_lr * self.regularization
            return {**client_state, "maps": move_maps(client_state["maps"], residual, theta, step)}
        pull = self.regularization * lift(residual, client_state.get("maps"), theta.shape[1])
        if self.laplacian == "combined":
            return {**client_state, "pull": self.unflat(pull, client_state["model"])}
        moved = self.unflat(theta - info.lr * pull, client_state["model"])
        return {**client_state, "model": {**client_state["model"], **moved}}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Store the model."""
        idle = without_data(self.phases(info.round), info.steps)
        return {"model": {}}, {"model": pulled(state, idle, info)}

    # --- what is watched ---

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Warn of steps that diverge, before they are taken."""
        return divergence(federation, self, round)

    def measure(self, federation: FederationView, round: Round) -> Mapping[str, float]:
        """Measure the maps."""
        return measure(federation, self)
