"""FedU: models of neighbours, coupled by the Laplacian of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.checks import check_number
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import (
    Model,
    Tree,
    per_client,
    put_rows,
    repeat,
    select,
    tmap,
    weighted_mean,
)
from lightning_pfl.graphs import GraphLike, resolve_graph
from lightning_pfl.graphs.messages import Exchange, PeerExchange, ReceivedMessages
from lightning_pfl.methods.base import PER_CLIENT, About, Known, Method, PerClient
from lightning_pfl.methods.support import memory

MIX = Exchange("models", "sum")


class FedU(Method):
    r"""Every client has a model, coupled to those of its neighbours on a graph.

    Minimises :math:`\sum_k F_k(w_k) + \frac{\eta}{2} \sum_k \sum_{l \in N_k} a_{kl} \lVert w_k -
    w_l \rVert^2`. In a round each client of the cohort :math:`S` trains for :math:`R` epochs (or
    steps) from its model, then

    .. math::
        w_k \leftarrow w_k - \tilde\mu\, \eta\, c \sum_{l \in N_k \cap S} a_{kl} (w_k - w_l), \qquad
        \tilde\mu = \mu R

    with the models after local training, and :math:`\mu` the learning rate. The sum is one sparse
    matrix product for all clients. Buffers never leave the client. A client without training
    samples or minibatches has :math:`F_k = 0`: it takes part, and only the penalty moves its model.

    Args:
        graph: Who is whose neighbour, with the weights :math:`a_{kl}`; see
            ``lightning_pfl.graphs``.
        regularization: :math:`\eta \ge 0`. 0 makes the clients independent.
        decentralized: False: the server holds all models and the graph, and does the combination;
            a client sends and receives one model. True (dFedU): neighbours send each other their
            models, without a server.
        lap_factor: :math:`c > 0`. 1 is the published step; 2 the gradient of the objective above.
        local_epochs: :math:`R`, passes over a client's data per round.
        local_steps: Optimizer steps instead. Exactly one of the two.

    State:
        server: ``models``, every client's last model, each leaf ``(num_clients, *shape)``; empty if
        decentralized. client_state: ``model``, the buffers, if decentralized the complete model;
        each leaf ``(clients, *shape)``.

    Deviation from the paper: :math:`R` counts epochs if local work is given in epochs, as in the
    authors' code.

    Example:
        >>> FedU("ring", regularization=0.1).decentralized
        False

    References:
        Dinh, Vu, Tran, Dao, Zhang. A new look and convergence rate of federated multitask learning
        with Laplacian regularization. 2021. arXiv:2102.07148, Algorithms 1 and 2.
    """

    about = About(
        family="a graph",
        personal=(
            "everything; neighbours on a graph are pulled together, by a server or by themselves"
        ),
        assumes="a graph says who is alike",
        down="$4d$; without a server per neighbour",
        up="$4d$; without a server per neighbour",
        keeps="buffers, and the server a model for each; without a server the model with buffers",
        gradients="1",
        personal_model="the client's own model",
        global_model=None,
        paper="Dinh et al. 2021",
    )
    include_clients_without_data: ClassVar[bool] = True
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({"models": 1})
    state_settings: ClassVar[tuple[str, ...]] = ("decentralized",)
    fixed_clients: ClassVar[str] = "each client is a node of its graph"
    model_scope: ClassVar[str] = PER_CLIENT

    def __init__(
        self,
        graph: GraphLike,
        regularization: float = 0.01,
        decentralized: bool = False,
        lap_factor: float = 1.0,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps, weighting="uniform")
        if isinstance(self.local_epochs, Mapping) or isinstance(self.local_steps, Mapping):
            raise ValueError(
                "Expected one number of all clients for FedU, as R is a factor of the step on the "
                f"graph, but got {local_epochs=}, {local_steps=}. Use a whole number."
            )
        check_number("regularization", regularization, "Use 0.01, for example.")
        advice = "Use 1 for the published step, 2 for the objective's gradient."
        check_number("lap_factor", lap_factor, advice, positive=True)
        if not isinstance(decentralized, bool):
            raise ValueError(
                f"Expected `decentralized` to be True or False, but got {decentralized=}. Use True "
                "for dFedU, without a server."
            )
        self.given_graph, self.regularization = graph, regularization
        self.decentralized, self.lap_factor = decentralized, lap_factor

    def resolve_personal(self, parameter_split: ParameterSplit) -> ParameterSpec:
        """Make the buffers personal, or without a server all entries."""
        return "all" if self.decentralized else sorted(parameter_split.buffers)

    def bind(self, known: Known) -> None:
        """Build the graph."""
        super().bind(known)
        self.graph = resolve_graph(self.given_graph, self.num_clients, self.seed)

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return a log line if the penalty is zero."""
        return [] if self.regularization else ["regularization=0 makes FedU LocalOnly."]

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Warn of a step that is too long for the graph, before it is taken."""
        bound = self.step(round.info) * self.graph.largest_eigenvalue
        if bound < 2:
            return {}
        return {
            "graph": "Expected lr * R * regularization * lap_factor * (largest eigenvalue of the "
            f"graph's Laplacian) to be below 2, but got {bound:.3g} with the eigenvalue "
            f"{self.graph.largest_eigenvalue:.3g}. The run will diverge: lower one of the first "
            "four."
        }

    def step(self, info: ClientInfo) -> float:
        r"""Compute :math:`\tilde\mu\, \eta\, c`."""
        budget = self.local_epochs if self.local_steps is None else self.local_steps
        assert not isinstance(budget, Mapping)
        return float(info.lr * (budget or 0) * self.regularization * self.lap_factor)

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Make every client's parameters, which start equal."""
        if self.decentralized:
            return {}
        row = select(model, self.parameter_split.shared)
        memory.require_rows(type(self).__name__, self.num_clients, row)
        return {"models": repeat(row, self.num_clients)}

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Send no common part: every client gets its own model."""
        return {}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Send each client its combined model, and new clients the mean."""
        if self.decentralized:
            return {}

        even = torch.full((self.num_clients,), 1 / self.num_clients, dtype=torch.float64)

        def take(leaf: Tensor) -> Tensor:
            index = send(info.index, leaf.device)
            known = leaf[index.clamp_max(self.num_clients - 1)]
            new = (index >= self.num_clients).view(-1, *[1] * (leaf.ndim - 1))
            return (
                known
                if not new.any()
                else torch.where(new, weighted_mean({"": leaf}, even)[""], known)
            )

        return {"model": tmap(take, server["models"])}

    # --- a client's round ---

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the client's model."""
        return {"model": {**client_state["model"], **received.get("model", {})}}

    # --- the combination ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Combine the cohort's models and store them."""
        if self.decentralized:
            return server
        models = uploads["model"]
        device = next(iter(models.values())).device
        inbox = PeerExchange(self.graph, info.index, device).deliver(MIX, models)
        mixed = self._mixed(models, inbox, info)
        return {"models": put_rows(server["models"], info.index, mixed)}

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """Exchange models between neighbours, without a server."""
        return (MIX,) if self.decentralized else ()

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """Send the model after local training."""
        return select(client_state["model"], self.parameter_split.trainable)

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """Combine the models on the client."""
        model = client_state["model"]
        mine = select(model, self.parameter_split.trainable)
        return {"model": {**model, **self._mixed(mine, inbox, info)}}

    def _mixed(self, models: Model, inbox: ReceivedMessages, info: ClientInfo) -> Model:
        step, degrees = self.step(info), inbox.weights.sum(1)

        def pull(own: Tensor, others: Tensor) -> Tensor:
            exact = own.double()
            return (exact - step * (per_client(degrees, exact) * exact - others)).to(own.dtype)

        mixed: Model = tmap(pull, models, inbox.messages)
        return mixed
