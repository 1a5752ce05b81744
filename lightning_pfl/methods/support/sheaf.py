"""The common part of methods over a sheaf: maps, messages, local steps and stability checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.known import Known
from lightning_pfl.contract.local import LocalStep, recordable
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.checks import check_used
from lightning_pfl.core.randomness import derive, generator
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import (
    Model,
    Tree,
    expand,
    flat,
    merge,
    rows,
    select,
    tmap,
    unflat,
    where,
)
from lightning_pfl.graphs import Graph, GraphLike, resolve_graph
from lightning_pfl.graphs.messages import Exchange, PeerExchange, ReceivedMessages
from lightning_pfl.methods.support import memory
from lightning_pfl.methods.support.stability import rate_along_pull
from lightning_pfl.solvers.sheaf import (
    Maps,
    Restrictions,
    check_maps,
    disagreement,
    lift,
    map_steps,
)


def pulled(state: Tree, idle: Tensor, info: ClientInfo) -> Model:
    """Return the model after local training, or for a client without data one step along the pull.

    Args:
        state: ``model``, and optionally ``pull``, ``(clients, ...)``.
        idle: Which clients have no data, bool ``(clients,)``.
        info: These clients.
    """
    model: Model = state["model"]
    if "pull" not in state or not idle.any():
        return model
    moved = tmap(lambda x, g: x - info.lr * g, select(model, state["pull"]), state["pull"])
    return {**model, **where(idle, moved, model)}


class SheafClients:
    """The common part of methods whose clients project their models to the edges of a graph.

    It has the maps, the messages' bytes and local training along the neighbours' pull,
    ``client_state["pull"]``, which is constant in a round.

    Attributes:
        sheaf: The maps, set by :meth:`resolve_sheaf`.
    """

    known: Known
    graph: Graph
    sheaf: Restrictions

    def set_maps(self, graph: GraphLike, edge_dim_ratio: float, maps: Maps, map_std: float) -> None:
        """Check and store the arguments of the maps."""
        check_maps(edge_dim_ratio, maps, map_std)
        init, drawn = type(self).__init__, isinstance(maps, str)
        check_used(init, {"map_std": map_std}, maps == "random", "maps='random'")
        check_used(init, {"edge_dim_ratio": edge_dim_ratio}, drawn, "maps that aren't given")
        self.given_graph, self.given_maps = graph, maps
        self.edge_dim_ratio, self.map_std = edge_dim_ratio, map_std

    def resolve_sheaf(self, learned: bool) -> None:
        """Build the graph and the edges' dimensions.

        Args:
            learned: Whether the maps change.
        """
        known = self.known
        self.graph = resolve_graph(self.given_graph, known.num_clients, known.seed)
        ratio, std = self.edge_dim_ratio, self.map_std
        found = Restrictions.plan(
            self.graph, known.model_sizes, self.given_maps, ratio, std, known.seed
        )
        self.sheaf = found.learned() if learned else found

    def theta(self, model: Model) -> Tensor:
        """Flatten each client's trainable parameters, ``(clients, scalars)``."""
        return flat(model, self.known.parameter_split.trainable)

    def unflat(self, theta: Tensor, model: Model) -> Model:
        """Convert vectors to trees with the trainable entries of ``model``."""
        return unflat(theta, model, self.known.parameter_split.trainable)

    def empty_maps(self, model: Model, copies: int) -> Tree:
        """Make one client's maps for :meth:`init_client_state_rows`; empty if none are stored.

        Args:
            model: The module's model, without client axis.
            copies: Maps of all clients that there must be room for.
        """
        theta = self.theta(expand(model, 1))[0]
        maps = self.sheaf.empty(theta)
        if maps:
            memory.require(
                copies * self.sheaf.scalars * theta.element_size(),
                theta.device,
                f"the restriction maps of {type(self).__name__} for {self.known.num_clients} "
                f"clients with up to {self.sheaf.dims.shape[1]} neighbours and {self.sheaf.width} "
                "dimensions an edge",
                "Use a smaller `edge_dim_ratio`, a sparser `graph`, a smaller model, or fixed "
                "maps='identity'.",
            )
        return maps

    def init_client_state_rows(self, client_state: Tree, model: Model, info: ClientInfo) -> Tree:
        """Fill in the initial maps, which differ between edges."""
        return self.sheaf.filled(client_state, info.index)

    def projection(self, theta: Tensor, client_state: Tree, info: ClientInfo) -> Tree:
        """Make a message of vectors in the space of each edge."""
        return {"projection": self.sheaf.project(theta, client_state, info.index)}

    def residual(self, inbox: ReceivedMessages) -> Tensor:
        """Compute the residual of each edge, ``(clients, slots, width)``."""
        ours, theirs = inbox.sent["projection"], inbox.messages["projection"]
        return disagreement(ours, theirs, inbox.weights)

    def message_nbytes(self, exchange: str, sent: Tree, info: ClientInfo) -> Tensor:
        """Count the bytes of each edge's message, by the dimension of its space."""
        return self.sheaf.nbytes(sent["projection"], info.index)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Continue with the client's model, and the neighbours' pull if there is one."""
        return {name: client_state[name] for name in ("model", "pull") if name in client_state}

    @recordable()
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Step on the gradient of the loss plus the pull."""
        grads = client.grad(state["model"], minibatches)
        if "pull" in state:
            grads = {name: grad + state["pull"][name] for name, grad in grads.items()}
        return {**state, "model": client.update(state["model"], grads)}


CHECK_EVERY = 25
"""Rounds between two estimates of the Laplacian's largest eigenvalue."""
ITERATIONS = 12
"""Iterations of Lanczos' method."""


class SheafOfFederation:
    """All clients' maps and models, in all processes.

    With several processes each works on its shard, and all make the same collective calls.

    Args:
        federation: A running federation whose method has a sheaf.
    """

    def __init__(self, federation: FederationView) -> None:
        self.federation = federation
        self.method: Any = federation.method
        self.clients = torch.arange(federation.num_clients)
        self.shard = federation.shard(self.clients)
        self.mine = self.clients[self.shard.index]

    def _gather(self, of: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Collect a value of each client by architecture, for all clients, in their order."""
        parts = [
            (at, {"": of(architecture, self.mine[at])})
            for architecture, at in self.federation.by_architecture(self.mine)
        ]
        found: Tensor = self.shard.all_gather(merge(parts, len(self.mine)))[""]
        return found

    def map_norms(self) -> Tensor:
        """Compute Frobenius norms of the maps, float64 ``(clients, slots)``, on the CPU."""

        def norms(architecture: Any, clients: Tensor) -> Tensor:
            norm: Tensor = torch.linalg.vector_norm(
                architecture.client_states.tree["maps"], dim=(2, 3)
            )
            return norm.double()

        return self._gather(norms).cpu()

    def squared_norms(self) -> Tensor:
        """Compute squared norms of the clients' trainable parameters, float64 ``(clients,)``."""

        def squares(architecture: Any, clients: Tensor) -> Tensor:
            theta = flat(
                architecture.client_states.tree["model"], architecture.parameter_split.trainable
            )
            return theta.double().square().sum(1)

        return self._gather(squares).cpu()

    def largest_eigenvalue(self, iterations: int = ITERATIONS) -> float:
        """Bound the sheaf Laplacian's largest eigenvalue from below by Lanczos' method.

        Args:
            iterations: Products with the Laplacian.
        """
        last: dict[str, Tensor] = {}
        vectors = self._scaled(self._start())[0]
        slopes: list[float] = []
        lengths: list[float] = []
        for _ in range(iterations):
            product = self._apply(vectors)
            slopes.append(self._dot(vectors, product))
            rest = {name: leaf - slopes[-1] * vectors[name] for name, leaf in product.items()}
            if lengths:
                rest = {name: leaf - lengths[-1] * last[name] for name, leaf in rest.items()}
            last, (vectors, length) = vectors, self._scaled(rest)
            lengths.append(length)
            if length <= 1e-6 * max(slopes):  # the vectors span an invariant space
                break
        off = torch.tensor(lengths[:-1], dtype=torch.float64)
        matrix = torch.diag(torch.tensor(slopes, dtype=torch.float64))
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
        return float(torch.linalg.eigvalsh(matrix)[-1])

    def _start(self) -> dict[str, Tensor]:
        """Make a random vector for each client, independent of the process."""
        found = {}
        for architecture, at in self.federation.by_architecture(self.mine):
            like = flat(
                architecture.client_states.tree["model"], architecture.parameter_split.trainable
            )
            drawn = [
                torch.randn(
                    like.shape[1], generator=generator(derive(self.method.seed, "power", client))
                )
                for client in self.mine[at].tolist()
            ]
            found[architecture.name] = torch.stack(drawn).to(like)
        return found

    def _apply(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply the Laplacian by a vector."""

        def sent(architecture: Any, clients: Tensor) -> Tensor:
            projected: Tensor = self.method.sheaf.project(
                vectors[architecture.name], architecture.client_states.tree, clients
            )
            return projected

        messages = self._gather(sent)
        peers = PeerExchange(self.method.graph, self.clients, messages.device)
        index = self.shard.index
        here = index if isinstance(index, slice) else send(index, messages.device)
        inbox = peers.deliver(Exchange("", "each"), {"": messages}).rows(here)
        residual = disagreement(inbox.sent[""], inbox.messages[""], inbox.weights)
        found = {}
        for architecture, at in self.federation.by_architecture(self.mine):
            of_group = at if isinstance(at, slice) else send(at, residual.device)
            mine = rows({"": residual}, of_group)[""]
            maps, scalars = (
                architecture.client_states.tree.get("maps"),
                vectors[architecture.name].shape[1],
            )
            found[architecture.name] = lift(mine, maps, scalars)
        return found

    def _dot(self, some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
        """Compute the inner product over all processes."""
        total = sum(float((leaf.double() * others[name]).sum()) for name, leaf in some.items())
        return float(sum(self.shard.ranks.all_gather_objects(total)))

    def _scaled(self, vectors: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """Normalise vectors jointly, and return them with the norm."""
        norm = self._dot(vectors, vectors) ** 0.5
        return {name: leaf / max(norm, 1e-300) for name, leaf in vectors.items()}, norm


def measure(federation: FederationView, method: Any) -> dict[str, float]:
    """Compute SheafFMTL's logged values of a round; none for fixed maps."""
    if not method.map_lr or not method.graph.mask.any():
        return {}
    sheaf = SheafOfFederation(federation)
    norms = sheaf.map_norms()[method.graph.mask]
    steps = map_steps(method.graph, sheaf.squared_norms(), method.map_lr * method.regularization)
    return {
        "sheaf/map_norm": float(norms.mean()),
        "sheaf/map_norm/min": float(norms.min()),
        "sheaf/map_step": float(steps.max()),
    }


def divergence(federation: FederationView, method: Any, round: Round) -> dict[str, str]:
    """Warn of steps on maps or models that are too long to be stable.

    Args:
        federation: The running federation.
        method: Its method.
        round: The round that begins.
    """
    if not method.regularization or not method.graph.mask.any():
        return {}
    sheaf = SheafOfFederation(federation)
    found = {"maps": _of_maps(sheaf, method, round.number) if method.map_lr else ""}
    if round.number % CHECK_EVERY == 0:
        found["models"] = _of_models(sheaf, method, round)
    return {key: text for key, text in found.items() if text}


def _of_maps(sheaf: SheafOfFederation, method: Any, number: int) -> str:
    steps = map_steps(method.graph, sheaf.squared_norms(), method.map_lr * method.regularization)
    largest = float(steps.max())
    if largest < 2:
        return ""
    client, slot = divmod(int(steps.argmax()), steps.shape[1])
    names = sheaf.federation.client_names
    return (
        "Expected map_lr * regularization * (|theta_i|^2 + |theta_j|^2) < 2 on every edge, but got "
        f"{largest:.3g} before round {number} between clients {names[client]!r} and "
        f"{names[int(method.graph.neighbours[client, slot])]!r}. The maps grow without bound: use "
        f"map_lr < {2 * method.map_lr / largest:.2g}, or a smaller `regularization`."
    )


def _of_models(sheaf: SheafOfFederation, method: Any, round: Round) -> str:
    rate: float | None = max(round.info.rates)
    if method.laplacian == "combined":
        rate = rate_along_pull(sheaf.federation, round)
    if rate is None:
        return ""
    step = rate * method.regularization * sheaf.largest_eigenvalue()
    if step < 2:
        return ""
    return (
        "Expected a step along the neighbours' pull, times regularization * lambda_max, to be "
        f"below 2, but got {step:.3g} before round {round.number} (learning rate and local steps "
        f"make {rate:.3g}). The models grow without bound: use regularization < "
        f"{2 * method.regularization / step:.2g}, or fewer or smaller steps."
    )


def saddle_divergence(federation: FederationView, method: Any, round: Round) -> dict[str, str]:
    """Warn of steps of the saddle-point dynamics that are too long to be stable.

    Args:
        federation: The running federation.
        method: Its method.
        round: The round that begins.
    """
    if round.number % CHECK_EVERY or not method.graph.mask.any():
        return {}
    rate = rate_along_pull(federation, round)
    if rate is None:
        return {}
    largest = SheafOfFederation(federation).largest_eigenvalue()
    step = method.step_at(round.info)
    total = rate * largest * (2 * method.penalty + step * largest)
    if total < 4:
        return {}
    return {
        "saddle": "Expected a * m * (2 * penalty + step * m) to be below 4, with the length a of a "
        "round's steps and the largest eigenvalue m of the sheaf's Laplacian, but got "
        f"{total:.3g} before round {round.number} (a = {rate:.3g}, m = {largest:.3g}). Models and "
        "multipliers grow without bound: lower the learning rate, `penalty`, `step` or the number "
        "of local steps."
    }
