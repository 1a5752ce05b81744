"""The method contract: a federated algorithm as a handful of pure functions.

The base class is federated averaging with a personal part: what a method does not override is
FedAvg. Override one level only; a method never subclasses another method. Shared mathematics lives
in ``tree.py`` and ``solvers/``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from lightning_pfl.contract.about import About
from lightning_pfl.contract.callback import FederatedCallback, FederationView
from lightning_pfl.contract.known import Known
from lightning_pfl.contract.local import LocalStep, Phase
from lightning_pfl.contract.records import ClientInfo, FitPlan, Round
from lightning_pfl.core.checks import check_budget, check_choice
from lightning_pfl.core.draws import noise, random_keys
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.tree import Model, Tree, expand, select, tmap, weighted_mean
from lightning_pfl.graphs import Graph
from lightning_pfl.graphs.messages import Exchange, ReceivedMessages

__all__ = [
    "About",
    "Known",
    "LocalStep",
    "Method",
    "Phase",
    "Weighting",
    "check_budget",
    "check_weighting",
    "say_split",
]
Weighting = Literal["samples", "uniform"]
SHARED, PER_CLIENT, PER_CLUSTER = "shared", "one per client", "one per cluster"
"""Who holds the part of the model that isn't personal; see :meth:`Method.ownership`."""


def check_weighting(weighting: str) -> None:
    """Require one of the aggregation weightings."""
    advice = "Use 'samples' to weight clients by their training samples."
    check_choice("weighting", weighting, get_args(Weighting), advice)


class Method(FederatedCallback):
    r"""A federated algorithm; the defaults are federated averaging with a personal part.

    Every function but ``init_server``, ``init_client_state``, ``server_update`` and
    ``global_model`` sees trees with a leading client axis and must not mix clients. They are pure:
    no branch on tensor values. A method never sees the Trainer: what it wants to check, measure or
    warn of is returned to the loop. It is a callback all the same, as ``Trainer(callbacks=[...])``
    is one way to pass it, and as a run that isn't federated is refused by ``setup``.

    Args:
        local_epochs: Passes over a client's data per round.
        local_steps: Optimizer steps per round instead. Exactly one of the two.
        weighting: ``"samples"``: a client's weight is its share of the cohort's training samples;
            ``"uniform"``.

    Attributes:
        about: What the tables of the documentation and of ``lightning-pfl methods`` print.
        personal: What never leaves the client; set by the method.
        held: Who has the rest of the model that clients are evaluated with: all the same one,
            each one of its own, or each cluster of clients.
        include_clients_without_data: Whether clients without a minibatch to train on take part all
            the same: they have the loss 0, and ``info.steps`` 0 (methods over a graph, in which
            they pass on what pulls at them). Otherwise they are never sampled.
        client_axes: Top-level entries of the server's tree with leading axes of all clients, in the
            order of their ids, and how many such axes: ``{"models": 1, "relationship": 2}``.
        state_settings: Settings on which the server's state depends: a checkpoint with another
            value is refused.
        measures_travel: Whether :meth:`client_final` needs ``info.travel``; the optimizer must be
            SGD. Updates of the slot ``"model"`` count.
        edge_state: Entries of a client's memory about its edges, leaves ``(clients, slots, ...)``.
            Only :meth:`send` and :meth:`receive` see them: local training and personal models do
            without, as these entries may be large.
        graph: Who is whose neighbour, for methods over a graph; set by them in :meth:`bind`.
        known: What there is to know of the federation; set by :meth:`bind` before the first round.
            ``parameter_split``, ``num_clients`` and so on are its fields.
    """

    about: ClassVar[About | None] = None
    personal: ParameterSpec = None
    model_scope: ClassVar[str] = SHARED
    include_clients_without_data: ClassVar[bool] = False
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({})
    state_settings: ClassVar[tuple[str, ...]] = ()
    measures_travel: ClassVar[bool] = False
    edge_state: ClassVar[tuple[str, ...]] = ()

    known: Known
    graph: Graph

    def __init__(
        self,
        local_epochs: int | None = 1,
        local_steps: int | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        check_budget(local_epochs, local_steps)
        check_weighting(weighting)
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.weighting = weighting

    def bind(self, known: Known) -> None:
        """Take what there is to know of the federation; called before the first round.

        Override to derive from it what stays the same in all rounds, such as a graph.
        """
        self.known = known

    @property
    def parameter_split(self) -> ParameterSplit:
        """Which parameters are shared, personal or static."""
        return self.known.parameter_split

    @property
    def num_clients(self) -> int:
        """Clients in the federation, sampled or not."""
        return self.known.num_clients

    @property
    def seed(self) -> int:
        """Seed of every random choice of the run."""
        return self.known.seed

    @property
    def num_samples(self) -> Tensor:
        """Training samples of each client, int64 ``(num_clients,)``."""
        return self.known.num_samples

    @property
    def has_training_data(self) -> Tensor:
        """Which clients have a minibatch to train on, bool ``(num_clients,)``."""
        return self.known.has_training_data

    @property
    def model_sizes(self) -> Tensor:
        """Trainable scalars of each client's model, int64 ``(num_clients,)``."""
        return self.known.model_sizes

    def resolve_personal(self, parameter_split: ParameterSplit) -> ParameterSpec:
        """What is personal, given the names of the model.

        Override where it is easier to say what is shared.
        """
        return self.personal

    def ownership(self, parameter_split: ParameterSplit) -> dict[str, frozenset[str]]:
        """Who has which entries of the model that clients are evaluated with.

        Told at the start of a fit. Under ``"shared"`` is what all clients have alike; under the
        other names, what differs between them.
        """
        adapted = self.model_scope == SHARED and self.evaluation_phases()
        model_scope = f"{PER_CLIENT}, adapted from a shared one" if adapted else self.model_scope
        return {model_scope: parameter_split.shared, "personal": parameter_split.personal}

    def personalized_entries(self, parameter_split: ParameterSplit) -> frozenset[str]:
        """The entries in which clients' models differ."""
        return frozenset(parameter_split.names) - self.ownership(parameter_split).get(
            SHARED, frozenset()
        )

    # --- the plan ---

    def phases(self, round: int) -> tuple[Phase, ...]:
        """The stretches of local training of a round; default: everything trains."""
        return (Phase("all", epochs=self.local_epochs, steps=self.local_steps),)

    def full_participation(self, round: int) -> bool:
        """Whether all clients take part in a round, whatever ``participation`` says."""
        return False

    def evaluation_phases(self) -> tuple[Phase, ...]:
        """Local training from the personal model that personalizes it before an evaluation."""
        return ()

    def evaluation_step(self, model: Model, minibatches: Any, client: LocalStep) -> Model:
        """One step of :meth:`evaluation_phases`, on training data.

        Default: the user's optimizer.
        """
        return client.update(model, client.grad(model, minibatches))

    def adaptation_step(
        self, server: Tree, model: Model, minibatches: Any, client: LocalStep, samples: Tensor
    ) -> Model:
        """One step of clients that never took part, from the model that they begin with.

        Default: the user's optimizer.

        Args:
            server: The server's tree, without client axis.
            model: The models that adapt, ``(clients, ...)``.
            minibatches: A minibatch, as in :meth:`client_step`.
            client: What a client can do with it.
            samples: Each client's training samples, float64 ``(clients,)``.
        """
        return client.update(model, client.grad(model, minibatches))

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """The server's tree before round 0; default: the shared part of the module's model."""
        return {"model": select(model, self.parameter_split.shared)}

    def init_client_state(self, model: Model) -> Tree:
        """One client's memory before round 0; default: the personal part of the module's model."""
        return {"model": select(model, self.parameter_split.personal)}

    def init_client_state_rows(self, client_state: Tree, model: Model, info: ClientInfo) -> Tree:
        """What differs between clients' memories before round 0; default: nothing.

        Args:
            client_state: :meth:`init_client_state` for some clients, ``(clients, ...)``.
            model: The module's model, without client axis.
            info: These clients.
        """
        return client_state

    # --- a client's round, in the order of time ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """What the server sends: a server tree (the same for all clients), without the client axis.

        A tree that differs between clients is returned by :meth:`download_rows` instead.
        """
        return {"model": server["model"]}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """What the server sends to each client alone, ``(clients, ...)``.

        Merged over :meth:`download`.
        """
        return {}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """The state in which local training begins.

        Default: the shared part as received, the personal part as kept. Training writes into the
        models of the state. Of what the state, ``received`` and ``client_state`` have in common
        each gets memory of its own before that, so an anchor ``received["model"]`` stays where it
        is, and :meth:`client_final` sees both arguments as they are here.
        """
        return {"model": {**received["model"], **client_state.get("model", {})}}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """One local step on one minibatch; default: the user's optimizer on the training loss."""
        return {
            **state,
            "model": client.update(state["model"], client.grad(state["model"], minibatches)),
        }

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """What leaves the client (the upload), and what it remembers.

        Default: the shared and the personal part.
        """
        upload = {"model": select(state["model"], self.parameter_split.shared)}
        return upload, {"model": select(state["model"], self.parameter_split.personal)}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """The server's step on the accepted uploads, ``(clients, ...)``.

        Default: their weighted mean.
        """
        return {**server, "model": weighted_mean(uploads["model"], info.weights)}

    # --- messages between neighbours, without a server ---

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """The exchanges of messages in a round, in the order of time, over :attr:`graph`."""
        return ()

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """What clients write to their neighbours.

        Returns:
            ``(clients, slots, ...)``, slot ``s`` of client ``i`` for ``graph.neighbours[i, s]``, or
            ``(clients, ...)`` where all neighbours get the same.
        """
        raise NotImplementedError

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """What clients make of what they receive: the new ``client_state``."""
        raise NotImplementedError

    def message_nbytes(self, exchange: str, sent: Tree, info: ClientInfo) -> Tensor | None:
        """Bytes of each message, int64 ``(clients, slots)``, where ``sent`` is filled up."""
        return None

    # --- random numbers outside of steps ---

    def client_noise(self, like: Tree, info: ClientInfo, key: str = "noise") -> Tree:
        """Draw standard normal numbers in :meth:`client_init` or :meth:`client_final`.

        Args:
            like: Leaves ``(clients, ...)`` whose shapes and types are taken.
            info: The clients; a row depends on its client and on ``info.round``.
            key: Two draws in a round need two keys.
        """
        clients = [int(client) for client in info.index]
        return noise(random_keys(self.seed, "client noise", info.round, clients), like, key)

    def server_noise(self, like: Tree, round: int, key: str = "noise") -> Tree:
        """Draw standard normal numbers on the server, for leaves without a client axis.

        Args:
            like: Leaves whose shapes and types are taken.
            round: The round.
            key: Two draws in a round need two keys.
        """
        drawn = noise(random_keys(self.seed, "server noise", round, [0]), expand(like, 1), key)
        return tmap(lambda leaf: leaf[0], drawn)

    # --- what travels, where it is less than the trees ---

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor | None:
        """Bytes that each client needs to be sent, int64 ``(clients,)``.

        None: those of what :meth:`download` and :meth:`download_rows` return. For methods whose
        trees also hold what a client knows already, or are filled up.
        """
        return None

    def upload_nbytes(self, uploads: Tree, info: ClientInfo) -> Tensor | None:
        """Bytes that each client sends, int64 ``(clients,)``; None: those of its upload."""
        return None

    # --- what is evaluated and handed out ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Each client's model under evaluation.

        Default: the shared part as received now, where there is one, and the personal part as
        stored.
        """
        model: Model = {**received.get("model", {}), **client_state.get("model", {})}
        return model

    def global_model(self, server: Tree) -> Model | None:
        """The one model for everybody, without client axis; None where there is none.

        Default: the entry ``model`` of the server, unless some of the model is personal.
        """
        return (
            dict(server["model"])
            if "model" in server and not self.parameter_split.personal
            else None
        )

    def clusters(self, server: Tree) -> Tensor | None:
        """Each client's cluster, int64 ``(num_clients,)``, -1 where it isn't known yet.

        None for a method that forms none.
        """
        return None

    # --- what is checked, measured and warned of ---

    def check_fit(self, plan: FitPlan) -> str:
        """Raise where the method can't work in such a fit; return a warning, or an empty text."""
        return ""

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Look for problems of a round that begins; nothing was sent yet.

        Returns:
            Texts by a key of your choice; each key is warned of once a Trainer.
        """
        return {}

    def warnings_after(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Look for problems once a round is over; otherwise like :meth:`warnings_before`."""
        return {}

    def measure(self, federation: FederationView, round: Round) -> Mapping[str, float]:
        """Measure values at the end of a round, to be logged by their names.

        The server has updated and the clients' states are stored; ``round.server`` is the server's
        tree as the round began. With several processes all of them call this together.
        """
        return {}

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """What the log says at the start of a fit: settings that make this another method."""
        return []

    def settings(self) -> dict[str, str]:
        """The plain arguments of the constructor as text; a checkpoint tells if they change."""
        names = inspect.signature(type(self).__init__).parameters
        return {
            name: repr(value)
            for name, value in vars(self).items()
            if name in names and _plain(value)
        }

    def structure(self) -> dict[str, Tensor]:
        """Relations between clients on which the state depends: a checkpoint of others is refused.

        Known after :meth:`bind`. Default: the edges of :attr:`graph`, if there is one, as rows of
        both ends and the weight.
        """
        graph = getattr(self, "graph", None)
        return {} if graph is None else {"graph": graph.rows}

    # --- bookkeeping ---

    def aggregation_weights(self, num_samples: Tensor) -> Tensor:
        """Normalised weights of a cohort by :attr:`weighting`, float64 ``(clients,)``."""
        raw = (
            num_samples.double()
            if self.weighting == "samples"
            else num_samples.double().new_ones(len(num_samples))
        )
        return raw / raw.sum().clamp_min(1e-300)

    @property
    def state_key(self) -> str:
        """Key of this callback in a Lightning checkpoint."""
        return f"lightning_pfl.{type(self).__name__}"


def _plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (str, int, float, type))


def say_split(
    method: str, parameter_split: ParameterSplit, nothing: str, everything: str
) -> list[str]:
    """What a method that splits the model becomes where nothing, or everything, is personal."""
    if not parameter_split.personal:
        return [f"Nothing is personal, which makes {method} {nothing}."]
    return (
        []
        if parameter_split.shared
        else [f"Everything is personal, which makes {method} {everything}."]
    )
