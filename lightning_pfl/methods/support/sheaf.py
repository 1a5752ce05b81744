"""What methods over a sheaf share: maps, messages, local steps, and whether steps are stable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.callback import FederationView
from lightning_pfl.contract.known import Known
from lightning_pfl.contract.local import LocalStep
from lightning_pfl.contract.records import ClientInfo, Round
from lightning_pfl.core.randomness import derive, generator
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
    """The model after local training; of a client without data, after one along the pull.

    Args:
        state: ``model``, and ``pull`` if there is one, ``(clients, ...)``.
        idle: Which clients have no data, bool ``(clients,)``.
        info: These clients.
    """
    model: Model = state["model"]
    if "pull" not in state or not idle.any():
        return model
    moved = tmap(lambda x, g: x - info.lr * g, select(model, state["pull"]), state["pull"])
    return {**model, **where(idle, moved, model)}


class SheafClients:
    """Part of a method whose clients project their models to the edges of a graph.

    It holds what these methods share: the maps, the messages' bytes and local training along a pull
    of the neighbours, ``client_state["pull"]``, that stays the same in all steps of a round.

    Attributes:
        sheaf: The maps, set by :meth:`resolve_sheaf`.
    """

    known: Known
    graph: Graph
    sheaf: Restrictions

    def set_maps(self, graph: GraphLike, edge_dim_ratio: float, maps: Maps, map_std: float) -> None:
        """Check and keep the arguments that make the maps."""
        check_maps(edge_dim_ratio, maps, map_std)
        self.given_graph, self.given_maps = graph, maps
        self.edge_dim_ratio, self.map_std = edge_dim_ratio, map_std

    def resolve_sheaf(self, learned: bool) -> None:
        """Find the neighbours and the dimensions of the edges' spaces.

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
        """The trainable parameters as one vector of each client, ``(clients, scalars)``."""
        return flat(model, self.known.parameter_split.trainable)

    def unflat(self, theta: Tensor, model: Model) -> Model:
        """Vectors as trees with the trainable entries of ``model``."""
        return unflat(theta, model, self.known.parameter_split.trainable)

    def empty_maps(self, model: Model, copies: int) -> Tree:
        """Maps of one client that :meth:`init_client_state_rows` fills; empty if none are kept.

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
                "Use a smaller `edge_dim_ratio`, a sparser `graph`, a smaller model, or "
                "maps='identity' that stay.",
            )
        return maps

    def init_client_state_rows(self, client_state: Tree, model: Model, info: ClientInfo) -> Tree:
        """The first maps, which differ from edge to edge."""
        return self.sheaf.filled(client_state, info.index)

    def projection(self, theta: Tensor, client_state: Tree, info: ClientInfo) -> Tree:
        """A message: vectors in the space of each edge."""
        return {"projection": self.sheaf.project(theta, client_state, info.index)}

    def residual(self, inbox: ReceivedMessages) -> Tensor:
        """How far both ends of each edge are from agreeing, ``(clients, slots, width)``."""
        ours, theirs = inbox.sent["projection"], inbox.messages["projection"]
        return disagreement(ours, theirs, inbox.weights)

    def message_nbytes(self, exchange: str, sent: Tree, info: ClientInfo) -> Tensor:
        """An edge's message has as many numbers as its space has dimensions."""
        return self.sheaf.nbytes(sent["projection"], info.index)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Go on with the own model, and the pull of the neighbours if there is one."""
        return {name: client_state[name] for name in ("model", "pull") if name in client_state}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """A step on the gradient of the loss and the pull."""
        grads = client.grad(state["model"], minibatches)
        if "pull" in state:
            grads = {name: grad + state["pull"][name] for name, grad in grads.items()}
        return {**state, "model": client.update(state["model"], grads)}


CHECK_EVERY = 25
"""Rounds between two estimates of the Laplacian's largest eigenvalue."""
ITERATIONS = 12
"""Of Lanczos' method."""


class SheafOfFederation:
    """All clients' maps and models, wherever they are.

    With several processes each works on the clients that it holds, and all call the same functions.

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
        """What ``of`` gives for each client of a group, for all clients, in their order."""
        parts = [
            (at, {"": of(architecture, self.mine[at])})
            for architecture, at in self.federation.by_architecture(self.mine)
        ]
        found: Tensor = self.shard.all_gather(merge(parts, len(self.mine)))[""]
        return found

    def map_norms(self) -> Tensor:
        """Frobenius norms of the restriction maps, float64 ``(clients, slots)``, on the CPU."""

        def norms(architecture: Any, clients: Tensor) -> Tensor:
            norm: Tensor = torch.linalg.vector_norm(
                architecture.client_states.tree["maps"], dim=(2, 3)
            )
            return norm.double()

        return self._gather(norms).cpu()

    def squared_norms(self) -> Tensor:
        """Squared norms of the clients' trainable parameters, float64 ``(clients,)``."""

        def squares(architecture: Any, clients: Tensor) -> Tensor:
            theta = flat(
                architecture.client_states.tree["model"], architecture.parameter_split.trainable
            )
            return theta.double().square().sum(1)

        return self._gather(squares).cpu()

    def largest_eigenvalue(self, iterations: int = ITERATIONS) -> float:
        """The sheaf Laplacian's largest eigenvalue by Lanczos' method: never above the true one.

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
            if length <= 1e-6 * max(slopes):  # the vectors so far span an invariant space
                break
        off = torch.tensor(lengths[:-1], dtype=torch.float64)
        matrix = torch.diag(torch.tensor(slopes, dtype=torch.float64))
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
        return float(torch.linalg.eigvalsh(matrix)[-1])

    def _start(self) -> dict[str, Tensor]:
        """A random vector for each client that is the same whoever holds the client."""
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
        """The Laplacian times a vector."""

        def sent(architecture: Any, clients: Tensor) -> Tensor:
            projected: Tensor = self.method.sheaf.project(
                vectors[architecture.name], architecture.client_states.tree, clients
            )
            return projected

        messages = self._gather(sent)
        peers = PeerExchange(self.method.graph, self.clients, messages.device)
        index = self.shard.index
        here = index if isinstance(index, slice) else index.to(messages.device)
        inbox = peers.deliver(Exchange("", "each"), {"": messages}).rows(here)
        residual = disagreement(inbox.sent[""], inbox.messages[""], inbox.weights)
        found = {}
        for architecture, at in self.federation.by_architecture(self.mine):
            of_group = at if isinstance(at, slice) else at.to(residual.device)
            mine = rows({"": residual}, of_group)[""]
            maps, scalars = (
                architecture.client_states.tree.get("maps"),
                vectors[architecture.name].shape[1],
            )
            found[architecture.name] = lift(mine, maps, scalars)
        return found

    def _dot(self, some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
        """The inner product, over all processes."""
        total = sum(float((leaf.double() * others[name]).sum()) for name, leaf in some.items())
        return float(sum(self.shard.ranks.all_gather_objects(total)))

    def _scaled(self, vectors: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """Vectors by their common norm, and the norm."""
        norm = self._dot(vectors, vectors) ** 0.5
        return {name: leaf / max(norm, 1e-300) for name, leaf in vectors.items()}, norm


def measure(federation: FederationView, method: Any) -> dict[str, float]:
    """What SheafFMTL logs in a round; nothing where maps stay."""
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
    """Find steps on maps or models that are too long to be stable; a text for each.

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
        f"{names[int(method.graph.neighbours[client, slot])]!r}: the maps grow without bound. Use "
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
        f"make {rate:.3g}): the models grow without bound. Use regularization < "
        f"{2 * method.regularization / step:.2g}, or fewer or smaller steps."
    )


def saddle_divergence(federation: FederationView, method: Any, round: Round) -> dict[str, str]:
    """Find steps of the saddle-point dynamics that are too long to be stable.

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
        "saddle": "Expected a * m * (2 * penalty + step * m) to be below 4, with the way a of a "
        "round along a constant pull and the largest eigenvalue m of the sheaf's Laplacian, but "
        f"got {total:.3g} before round {round.number} (a = {rate:.3g}, m = {largest:.3g}): models "
        "and multipliers grow without bound. Use a smaller learning rate, `penalty` or `step`, or "
        "fewer local steps."
    }
