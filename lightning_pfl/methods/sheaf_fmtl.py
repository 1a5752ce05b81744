"""SheafFMTL: neighbours agree on learned projections of their models."""

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
from lightning_pfl.methods.base import About, Known, Method
from lightning_pfl.methods.support.sheaf import SheafClients, divergence, measure, pulled
from lightning_pfl.solvers.sheaf import (
    Maps,
    lift,
    move_maps,
)

Laplacian = Literal["combined", "separate"]
COPIES = 3
"""Of the maps: in the bank, of the cohort, and after a step."""


class SheafFMTL(SheafClients, Method):
    r"""Neighbours pull together projections of their models, and learn what to project to.

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

    A client sends nothing but projections: its maps never leave it, and it doesn't know those of
    its neighbours. Edges with an end that is not in the cohort are left out of the round.

    Nothing keeps the maps from vanishing, which removes the penalty: ``sheaf/map_norm`` (mean over
    the edges' ends, Frobenius) and ``sheaf/map_norm/min`` are logged in every round. A step on the
    maps is stable where :math:`\eta \lambda a_{ij} (\lVert \theta_i \rVert^2 + \lVert \theta_j
    \rVert^2) < 2` on all edges; the largest of these is logged as ``sheaf/map_step``. A step on the
    models needs :math:`\alpha \lambda \lambda_{\max}(L) < 2` for the sheaf's Laplacian :math:`L`.
    Both are checked before round 0 and during the run, and a violation is a warning.

    Args:
        graph: Who is whose neighbour; see ``lightning_pfl.graphs``.
        regularization: :math:`\lambda \ge 0`. 0 trains every client alone.
        map_lr: :math:`\eta \ge 0`. 0 keeps the maps, and saves the second message.
        edge_dim_ratio: :math:`\gamma` in (0, 1]. Messages and maps grow with it; unused where maps
            are given.
        laplacian: ``"combined"``: the pull of the neighbours is part of every local gradient, and
            passes through momentum and clipping; with one local step this is the update above,
            with more the pull stays that of the round's beginning. ``"separate"``: local training
            first, then one step of size :math:`\alpha` along the pull at its result, as in the
            released code.
        maps: ``"random"``: independent normal numbers; ``"identity"``: the first :math:`d_{ij}`
            parameters; or a mapping from (i, j) to :math:`P_{ij}`, for both ends of every edge.
        map_std: Standard deviation of random maps, positive.
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.

    State:
        client_state: ``model``, the whole model; ``maps``, ``(clients, slots, width, d_i)`` with
        the width of the largest edge space and zeros beyond :math:`d_{ij}`. Identity maps that stay
        need no memory.

    Deviation from the paper: parameters are flattened, trainable ones only; buffers stay. Local
    gradients are those of minibatches. A client without training samples, or without a minibatch,
    has :math:`F_i = 0`: with ``"combined"`` it takes one plain step of size :math:`\alpha` a round
    along the pull. In the released code clients step one after another, and each sees what
    the ones before it have become (Gauss-Seidel). That is not offered: a client would train between
    messages of its own, so that a round became one of a single client, or of one colour of the
    graph, after another, with results that depend on how clients are numbered and on who takes
    part. With one full local step its fixed points are those of all clients stepping at once, the
    paper's order. Edges have weights, 1 in the paper.

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
        local_epochs: int | None = 1,
        local_steps: int | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        for name, value in (("regularization", regularization), ("map_lr", map_lr)):
            check_number(name, value, "Use 0.01, for example.")
        check_choice("laplacian", laplacian, get_args(Laplacian), "Use 'combined'.")
        self.set_maps(graph, edge_dim_ratio, maps, map_std)
        self.regularization, self.map_lr = regularization, map_lr
        self.laplacian = laplacian

    def bind(self, known: Known) -> None:
        """Find the neighbours and the dimensions of the edges' spaces."""
        super().bind(known)
        self.resolve_sheaf(learned=bool(self.map_lr))

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Say that at 0 this is another method."""
        return [] if self.regularization else ["regularization=0 makes SheafFMTL LocalOnly."]

    # --- state ---

    def init_client_state(self, model: Model) -> Tree:
        """Return the model, and empty maps that :meth:`init_client_state_rows` fills."""
        return {"model": model, **self.empty_maps(model, COPIES)}

    # --- a client's round ---

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """Projections of the models for their step, and again for that of the maps."""
        before = "before" if self.laplacian == "combined" else "after"
        models = Exchange("models", "each", before)  # type: ignore[arg-type]
        return (models, Exchange("maps", "each", "after")) if self.map_lr else (models,)

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """The projection of the model to the space of each edge."""
        return self.projection(self.theta(client_state["model"]), client_state, info)

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """The pull of the neighbours, or the step on the maps."""
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
        """Keep the model."""
        idle = without_data(self.phases(info.round), info.steps)
        return {"model": {}}, {"model": pulled(state, idle, info)}

    # --- what is watched ---

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Find steps that diverge, before they are taken."""
        return divergence(federation, self, round)

    def measure(self, federation: FederationView, round: Round) -> Mapping[str, float]:
        """Measure the maps."""
        return measure(federation, self)
