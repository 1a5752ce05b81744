"""The method contract: a federated algorithm as pure functions.

The base class is federated averaging with a personal part: what a method does not override is
FedAvg. Override one level only; a method never subclasses another method. Shared mathematics lives
in ``core/tree.py``, ``solvers/`` and ``methods/support/``.

**Trees.** A *tree* is a (nested) dict of tensors. In every function that runs on clients each leaf
has a leading client axis, ``(clients, *shape)``, and no row is mixed with another. The arithmetic
is elementwise, so a line reads like the equation for one client and runs for a chunk of clients
(vectorized engine) or for one (sequential engine). A scalar per client has shape ``(clients,)``;
``core.tree.scale`` multiplies it onto a tree. What is equal for all clients is an *expanded view*,
whose client axis has stride 0: it costs no memory, and the engine doesn't batch it.

A *model* is a flat dict from name to tensor, with the parameters and buffers of the LightningModule
as in its ``state_dict()``. The server's tree has no client axis. A buffer with ``persistent=False``
is in no tree: what a step writes to it is discarded after the step.

**A round, function by function.** ``phases(round)`` lists the phases of local training. The server
sends exactly ``download(server, info)``, and ``download_rows`` where clients get different trees.
``client_init(received, client_state, info)`` makes the state in which local training begins, any
tree; ``client_step(state, minibatches, client)`` is one minibatch; ``client_final(received,
client_state, state, info)`` returns the upload, which is exactly what leaves the client, and the
new client state. ``server_update(server, uploads, info)`` returns the new server tree. Bytes are
counted on what is sent; an empty tree costs nothing. Once, before round 0, ``init_server(model)``
and ``init_client_state(model)`` make the trees. ``personal_model(received, client_state, info)``
and ``global_model(server)`` are evaluated and handed to the user.

A function that runs on clients keeps at most clones of what it is given: the memory of one client's
state is the next one's. What callbacks and users get of a round stays as it is.

**What some methods need beyond a gradient on a minibatch.**

- Several independent minibatches in a step: ``Phase(batches_per_step=3)``.
- All samples at once, in a fixed order (dual coordinate ascent): ``Phase(full_batch=True)``.
- The loss of a model (FedMAP's weights): ``Phase(evaluate_only=True)`` and ``client.loss``.
- A measurement on the clients' validation samples in a round (FedFomo): ``Phase(evaluate_only=True,
  data="validation")``; its steps don't count.
- Public samples, the same for all clients (FedMD): ``Phase(data="public")`` and
  ``public_samples``.
- A server that trains (FedDF): ``server_phases``, ``server_init``, ``server_step`` and
  ``server_final``.
- Another term of the loss (FedProto, MOON, distillation): ``client.grad(objective=f, given=x)``,
  with ``f(view, x)`` of one client's minibatch; see ``contract/view.py``.
- How many samples of each class a client has: ``known.label_counts``, and
  ``needs_label_counts``; sending them is an upload.
- Another model's outputs, features or losses as constants: ``client.outputs``, ``features`` and
  ``losses``; a forward pass each.
- Weights of samples (FedEM): ``client.grad(weights=w)``; each sample's gradient (private training):
  ``client.sample_grads``.
- The samples themselves: ``client.samples``, and ``client.report`` to log what is computed.
- Steps that engines record and replay, which is faster: ``recordable`` on ``client_step``; see
  ``contract/local.py``.
- How far the optimizer went, whatever its momentum (FedNova): ``measures_travel``, then
  ``info.travel`` in ``client_final``; SGD only.
- Random numbers: ``client.noise(like)`` in a step, ``self.client_noise`` around the steps,
  ``self.server_noise`` on the server. They are keyed: engines and resumed runs draw the same.
- Two models whose outputs are mixed (APFL): ``core.mixture.mixture`` and ``client.grad(also=...)``.
- A prediction by several models (FedEM, averages over draws): ``personal_model`` returns
  ``core.mixture.ensemble(models, weights, space)``.
- A prediction that is a function of a model's outputs and features (nearest prototypes):
  ``personal_model`` returns ``core.mixture.with_own(model, tensors)``, and :meth:`predict` is that
  function.
- A step of its own at evaluation (Per-FedAvg): ``evaluation_phases`` and ``evaluation_step``.
- A step of its own for clients that never took part (FedMAP's prior): ``adaptation_step``.
- A server that knows its clients one by one: entries of its tree that ``client_axes`` names.
- Clients that join a run that goes on from a checkpoint: ``admit``, or ``fixed_clients``.
- Relations between clients that a resumed run must have too: ``structure``.
- Rounds in which all clients take part, whatever the participation: ``full_participation``.
- Clients without data that take part with the loss 0: ``include_clients_without_data``; their
  ``info.steps`` is 0.
- Clients that can train, for a method that waits for all of them: ``has_training_data``. A budget
  of 0 steps is no lack of data.
- Fewer bytes than those of the trees: ``upload_nbytes`` and ``download_nbytes``.
- Values to log and warnings: ``measure``, ``check_fit``, ``warnings_before``, ``warnings_after``.
- Messages between neighbours: ``exchanges``, ``send`` and ``receive``; see ``graphs/messages.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.about import About
from lightning_pfl.contract.callback import FederatedCallback, FederationView
from lightning_pfl.contract.known import Known
from lightning_pfl.contract.local import LocalStep, PerClient, Phase, recordable
from lightning_pfl.contract.records import ClientInfo, FitPlan, Round
from lightning_pfl.core.checks import check_budget, check_choice
from lightning_pfl.core.draws import noise, random_keys
from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit
from lightning_pfl.core.tree import (
    Model,
    Tree,
    expand,
    put_corner,
    select,
    tmap,
    weighted_mean,
)
from lightning_pfl.graphs import Graph
from lightning_pfl.graphs.messages import Exchange, ReceivedMessages

__all__ = [
    "About",
    "ClientInfo",
    "Known",
    "LocalStep",
    "Method",
    "Model",
    "PerClient",
    "Phase",
    "Tree",
    "Weighting",
    "check_budget",
    "check_weighting",
    "recordable",
    "say_split",
]
Weighting = Literal["samples", "uniform"]
SHARED, PER_CLIENT, PER_CLUSTER = "shared", "one per client", "one per cluster"
BESIDE_SHARED = f"{PER_CLIENT}, beside a shared one"
"""Ownership of the part of the model that isn't personal; see :meth:`Method.ownership`."""


def check_weighting(weighting: str) -> None:
    """Raise ValueError for an unknown aggregation weighting."""
    advice = "Use 'samples' to weight clients by their training samples."
    check_choice("weighting", weighting, get_args(Weighting), advice)


class Method(FederatedCallback):
    r"""A federated algorithm; the defaults are federated averaging with a personal part.

    Every function but ``init_server``, ``init_client_state``, ``server_update`` and
    ``global_model`` gets trees with a leading client axis and must not mix clients. They are pure:
    no branch on tensor values. A method never uses the Trainer: checks, measurements and warnings
    are returned to the loop. It is a callback so that ``Trainer(callbacks=[...])`` can pass it and
    ``setup`` can refuse runs that aren't federated.

    Args:
        local_epochs: Passes over a client's data per round, perhaps by client name.
        local_steps: Optimizer steps per round instead; they replace the default epoch.
        weighting: ``"samples"``: a client's weight is its share of the cohort's training samples;
            ``"uniform"``.

    Attributes:
        about: The method's cells in the tables of the documentation and ``lightning-pfl methods``.
        personal: Parameters that never leave the client; set by the method.
        model_scope: Ownership of the other entries of the evaluated models: shared by all clients,
            one per client, or one per cluster.
        include_clients_without_data: Whether clients without a minibatch to train on participate,
            with loss 0 and ``info.steps`` 0 (methods over a graph, where they pass messages on).
            Otherwise they are never sampled.
        needs_sample_counts: Whether the clients' own functions read each other's numbers of
            samples: in a deployment the nodes are then sent them.
        needs_label_counts: Whether ``known.label_counts`` is read: in a deployment the nodes are
            then asked for them, and sent those of all.
        averages_models: Whether an upload is ``{"model": ...}`` and nothing else, of which the
            server uses the weighted mean alone: in a deployment noise can then be added to it, and
            several processes send each other sums.
        measures_client_states: Whether :meth:`measure` reads client states: in a deployment, in
            which they stay on the nodes, the method is refused.
        needs_public_data: Whether phases of the clients or the server have public samples. A
            deployment refuses the method.
        client_axes: Top-level entries of the server's tree with leading axes of all clients, in the
            order of their ids, and how many such axes: ``{"models": 1, "relationship": 2}``.
        state_settings: Settings on which the server's state depends: a checkpoint with another
            value is refused.
        measures_travel: Whether :meth:`client_final` needs ``info.travel``; the optimizer must be
            SGD. Updates of the slot ``"model"`` count.
        fresh_optimizer: Why the state of a client's optimizer means nothing in its next round;
            empty where it may be kept.
        fixed_clients: Why no client can join a run that goes on; empty where one can.
        public_samples: Number of public samples that a round draws for phases on them; None for
            all.
        edge_state: Entries of a client's memory about its edges, leaves ``(clients, slots, ...)``.
            Only :meth:`send` and :meth:`receive` see them: local training and personal models do
            without, as these entries may be large.
        training_state: Entries of a client's memory that :meth:`personal_model` doesn't read, so
            that evaluations of many clients don't copy them.
        begun_state: The entry of a client's memory, bool, of clients whose personal model is a part
            of it whatever they receive, where others have a model that they receive: those aren't
            evaluated again before their memory changes. Empty where it is so for all, or for none.
        graph: Who is whose neighbour, for methods over a graph; set by them in :meth:`bind`.
        known: What there is to know of the federation; set by :meth:`bind` before the first round.
            ``parameter_split``, ``num_clients`` and so on are its fields.
    """

    about: ClassVar[About | None] = None
    personal: ParameterSpec = None
    model_scope: ClassVar[str] = SHARED
    include_clients_without_data: ClassVar[bool] = False
    needs_sample_counts: ClassVar[bool] = False
    needs_label_counts: ClassVar[bool] = False
    averages_models: ClassVar[bool] = False
    measures_client_states: ClassVar[bool] = False
    needs_public_data: ClassVar[bool] = False
    client_axes: ClassVar[Mapping[str, int]] = MappingProxyType({})
    state_settings: ClassVar[tuple[str, ...]] = ()
    measures_travel: ClassVar[bool] = False
    fresh_optimizer: ClassVar[str] = ""
    fixed_clients: ClassVar[str] = ""
    edge_state: ClassVar[tuple[str, ...]] = ()
    training_state: ClassVar[tuple[str, ...]] = ()
    begun_state: ClassVar[str] = ""
    public_samples: int | None = None

    known: Known
    graph: Graph

    def __init__(
        self,
        local_epochs: PerClient | None = 1,
        local_steps: PerClient | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        # `local_steps=5` alone means steps instead of the default epoch, not both.
        local_epochs = None if local_steps is not None and local_epochs == 1 else local_epochs
        check_budget(local_epochs, local_steps)
        check_weighting(weighting)
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.weighting = weighting

    def bind(self, known: Known) -> None:
        """Set the facts about the federation; called before the first round.

        Override it to derive constants of all rounds from them, such as a graph.
        """
        self.known = known

    @property
    def parameter_split(self) -> ParameterSplit:
        """The split of the model's names: shared, personal, trainable, buffers, static.

        :class:`~lightning_pfl.core.parameters.ParameterSplit` says what each holds.
        """
        return self.known.parameter_split

    @property
    def needs_each_upload(self) -> bool:
        """Whether :meth:`server_update` must have the uploads themselves.

        False: their mean, rounded, in the place of each of them makes no difference to it. Default:
        unless :attr:`averages_models`.
        """
        return not self.averages_models

    @property
    def num_clients(self) -> int:
        """Number of clients in the federation, sampled or not."""
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
        """Clients with a minibatch to train on, bool ``(num_clients,)``."""
        return self.known.has_training_data

    @property
    def model_sizes(self) -> Tensor:
        """Trainable scalars of each client's model, int64 ``(num_clients,)``."""
        return self.known.model_sizes

    def resolve_personal(self, parameter_split: ParameterSplit) -> ParameterSpec:
        """Return the personal parameters, given the names of the model.

        Override it if the shared ones are easier to name.
        """
        return self.personal

    def ownership(self, parameter_split: ParameterSplit) -> dict[str, frozenset[str]]:
        """Return the entries of the evaluated models by ownership, for the log of a fit.

        Entries under ``"shared"`` are equal for all clients; others differ between clients.
        """
        adapted = self.model_scope == SHARED and self.evaluation_phases()
        model_scope = f"{PER_CLIENT}, adapted from a shared one" if adapted else self.model_scope
        return {model_scope: parameter_split.shared, "personal": parameter_split.personal}

    def personalized_entries(self, parameter_split: ParameterSplit) -> frozenset[str]:
        """Return the entries in which clients' models differ."""
        return frozenset(parameter_split.names) - self.ownership(parameter_split).get(
            SHARED, frozenset()
        )

    # --- the plan ---

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Return the phases of local training in a round; default: everything trains."""
        return (Phase("all", epochs=self.local_epochs, steps=self.local_steps),)

    def full_participation(self, round: int) -> bool:
        """Whether all clients take part in a round, whatever ``participation`` is."""
        return False

    def evaluation_phases(self) -> tuple[Phase, ...]:
        """Return the phases that personalize the personal model before an evaluation."""
        return ()

    def evaluation_step(
        self, received: Tree, model: Model, minibatches: Any, client: LocalStep
    ) -> Model:
        """Take one step of :meth:`evaluation_phases`; default: the user's optimizer.

        Args:
            received: What the server sends now, ``(clients, ...)``.
            model: The models that adapt, ``(clients, ...)``.
            minibatches: A minibatch, as in :meth:`client_step`.
            client: The step interface of the engine.
        """
        return client.train(model, minibatches)

    def adaptation_step(
        self, server: Tree, model: Model, minibatches: Any, client: LocalStep, samples: Tensor
    ) -> Model:
        """Take one step of new clients from their starting models; default: the user's optimizer.

        Args:
            server: The server's tree, without client axis.
            model: The models that adapt, ``(clients, ...)``.
            minibatches: A minibatch, as in :meth:`client_step`.
            client: The step interface of the engine.
            samples: Each client's training samples, float64 ``(clients,)``.
        """
        return client.train(model, minibatches)

    # --- state ---

    def init_server(self, model: Model) -> Tree:
        """Make the server's tree before round 0; default: the shared part of the module's model."""
        return {"model": select(model, self.parameter_split.shared)}

    def init_client_state(self, model: Model) -> Tree:
        """Make one client's state before round 0; default: the personal part of the model."""
        return {"model": select(model, self.parameter_split.personal)}

    def init_client_state_rows(self, client_state: Tree, model: Model, info: ClientInfo) -> Tree:
        """Make initial client states differ between clients; default: unchanged.

        Args:
            client_state: :meth:`init_client_state` for some clients, ``(clients, ...)``.
            model: The module's model, without client axis.
            info: These clients.
        """
        return client_state

    def admit(self, server: Tree, begun: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        """Let clients join a run that goes on from a checkpoint; their ids are the last ones.

        Default: they begin as clients did before round 0, with the current shared part.

        Args:
            server: The checkpoint's tree, of the clients so far.
            begun: :meth:`init_server` of all clients.
            client_state: Initial states of those that join, ``(clients, ...)``.

        Returns:
            The server's tree of all clients, and the states of those that join.
        """
        grown = dict(server)
        for name, axes in self.client_axes.items():
            if name in server:
                grown |= put_corner({name: begun[name]}, axes, server)
        return grown, client_state

    # --- a client's round, in temporal order ---

    def download(self, server: Tree, info: ClientInfo) -> Tree:
        """Return the tree that the server sends to all clients, without client axis.

        Trees that differ between clients are returned by :meth:`download_rows`.
        """
        return {"model": server["model"]}

    def download_rows(self, server: Tree, info: ClientInfo) -> Tree:
        """Return trees per client, ``(clients, ...)``, merged over :meth:`download`."""
        return {}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Make the initial state of local training.

        Default: the received shared part and the client's personal part. Training changes the
        state's models in place, on copies of tensors that ``received`` and ``client_state`` have
        too, so an anchor ``received["model"]`` stays the same, also in :meth:`client_final`.
        """
        return {"model": {**received["model"], **client_state.get("model", {})}}

    @recordable()
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Take one local step on a minibatch; default: the user's optimizer on the loss.

        It returns the entries of ``state``, no more and no fewer: a client may take no step, so
        what :meth:`client_final` reads has to be there from :meth:`client_init` on. It draws by
        ``client.noise`` alone; torch's global generators are refused.
        """
        return {**state, "model": client.train(state["model"], minibatches)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Return the upload and the new client state; default: shared and personal part.

        An entry of the upload with the path of a received one counts as its new value: the gate
        measures the difference of the two. Something else, such as a gradient, needs another name.
        The new client state has the entries of :meth:`init_client_state`, no more and no fewer; a
        method without client states returns ``client_state``.
        """
        upload = {"model": select(state["model"], self.parameter_split.shared)}
        return upload, {"model": select(state["model"], self.parameter_split.personal)}

    # --- the server's round ---

    def server_update(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Update the server with accepted uploads ``(clients, ...)``; default: weighted mean.

        What it draws from global generators, of torch, Python and NumPy, follows from the run's
        seed and the round alone.
        """
        return {**server, "model": weighted_mean(uploads["model"], info.weights)}

    # --- a server that trains, after its update ---

    def server_phases(self, round: int) -> tuple[Phase, ...]:
        """Return the phases of the server's training, with ``data="public"``; default: none.

        Minibatches are of all public samples, shuffled anew in each epoch. Optimizers are those of
        :meth:`server_optimizers`.
        """
        return ()

    def server_optimizers(self, parameters: Iterable[Tensor]) -> Optimizer | None:
        """Make the optimizer of the server's training; None: that of ``configure_optimizers``.

        The options that a scheduler is to follow are those of :meth:`server_schedule`.
        """
        return None

    def server_schedule(self, steps: int) -> list[float] | None:
        """Return factors of the learning rate for each step of a phase; None: it stays."""
        return None

    def server_init(self, server: Tree, uploads: Tree, info: ClientInfo) -> Tree:
        """Make the initial state of the server's training.

        Args:
            server: The server's tree after :meth:`server_update`, leaves ``(1, ...)``: the server
                is the only client of this training.
            uploads: Accepted uploads, ``(1, clients, ...)``.
            info: The clients that sent them.
        """
        raise NotImplementedError

    def server_step(self, state: Tree, minibatches: Any, server: LocalStep) -> Tree:
        """Take one step of the server's training; like :meth:`client_step`."""
        raise NotImplementedError

    def server_final(self, server: Tree, state: Tree) -> Tree:
        """Return the new server tree, leaves ``(1, ...)``."""
        raise NotImplementedError

    # --- messages between neighbours, without a server ---

    def exchanges(self, round: int) -> tuple[Exchange, ...]:
        """Return a round's exchanges of messages over :attr:`graph`, in temporal order."""
        return ()

    def send(self, exchange: str, client_state: Tree, info: ClientInfo) -> Tree:
        """Make the messages to neighbours.

        Returns:
            ``(clients, slots, ...)``, slot ``s`` of client ``i`` for ``graph.neighbours[i, s]``, or
            ``(clients, ...)`` if all neighbours get the same message.
        """
        raise NotImplementedError

    def receive(
        self, exchange: str, client_state: Tree, inbox: ReceivedMessages, info: ClientInfo
    ) -> Tree:
        """Process received messages, and return the new ``client_state``."""
        raise NotImplementedError

    def message_nbytes(self, exchange: str, sent: Tree, info: ClientInfo) -> Tensor | None:
        """Count each message's bytes, int64 ``(clients, slots)``, if ``sent`` is padded."""
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

    # --- bytes, where they are fewer than those of the trees ---

    def download_nbytes(self, server: Tree, info: ClientInfo) -> Tensor | None:
        """Count the bytes to each client, int64 ``(clients,)``, if trees exceed what clients need.

        None: all bytes of :meth:`download` and :meth:`download_rows`.
        """
        return None

    def upload_nbytes(self, uploads: Tree, info: ClientInfo) -> Tensor | None:
        """Count the bytes from each client, int64 ``(clients,)``; None: those of its upload."""
        return None

    # --- models for evaluation and users ---

    def personal_model(self, received: Tree, client_state: Tree, info: ClientInfo) -> Model:
        """Return each client's model for evaluation.

        Default: the shared part as received now, if any, and the stored personal part.
        """
        model: Model = {**received.get("model", {}), **client_state.get("model", {})}
        return model

    def predict(self, outputs: Any, features: Any, own: Model) -> Any:
        """Return the outputs of a client whose personal model has tensors of its own.

        The evaluation, ``trainer.predict`` and ``client_module`` take these outputs for those of
        the module; ``client_state_dict`` refuses, as there is no one model.

        Args:
            outputs: The module's outputs, without client axis, ``(samples, ...)``.
            features: The inputs of its submodule ``head``, ``(samples, ...)``; None without one.
            own: The client's tensors.
        """
        raise NotImplementedError

    def global_model(self, server: Tree) -> Model | None:
        """Return the global model, without client axis, or None without one.

        Default: the entry ``model`` of the server, unless some of the model is personal.
        """
        return (
            dict(server["model"])
            if "model" in server and not self.parameter_split.personal
            else None
        )

    def clusters(self, server: Tree) -> Tensor | None:
        """Return each client's cluster, int64 ``(num_clients,)``, -1 if unknown.

        None for a method without clusters.
        """
        return None

    # --- checks, measurements and warnings ---

    def check_fit(self, plan: FitPlan) -> str:
        """Raise an error if the method can't work in such a fit; return a warning, or ""."""
        return ""

    def warnings_before(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Return warnings about a round, before anything is sent.

        Returns:
            Texts by any key; each key is warned of once per Trainer.
        """
        return {}

    def warnings_after(self, federation: FederationView, round: Round) -> Mapping[str, str]:
        """Return warnings about a round after it; otherwise like :meth:`warnings_before`."""
        return {}

    def measure(self, federation: FederationView, round: Round) -> Mapping[str, float]:
        """Return values to log at the end of a round, by name.

        Server and client states are updated; ``round.server`` is the server's tree before the
        round. A collective call of all processes.
        """
        return {}

    def notes(self, parameter_split: ParameterSplit) -> list[str]:
        """Return log lines for settings that make this another method."""
        return []

    def settings(self) -> dict[str, str]:
        """Return the constructor's plain arguments as text, which checkpoints compare."""
        names = inspect.signature(type(self).__init__).parameters
        return {
            name: repr(value)
            for name, value in vars(self).items()
            if name in names and _plain(value)
        }

    def structure(self) -> dict[str, Tensor]:
        """Return relations between clients that the state depends on, which checkpoints compare.

        Available after :meth:`bind`. Default: the edges of :attr:`graph`, if there is one, as rows
        of both ends and the weight.
        """
        graph = getattr(self, "graph", None)
        return {} if graph is None else {"graph": graph.rows}

    # --- bookkeeping ---

    def aggregation_weights(self, num_samples: Tensor) -> Tensor:
        """Compute normalised weights of a cohort by :attr:`weighting`, float64 ``(clients,)``."""
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
    if isinstance(value, Mapping):
        return all(map(_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (str, int, float, type))


def say_split(
    method: str, parameter_split: ParameterSplit, nothing: str, everything: str
) -> list[str]:
    """Return log lines if nothing or everything is personal, with the equivalent method."""
    if not parameter_split.personal:
        return [f"Nothing is personal, which makes {method} {nothing}."]
    return (
        []
        if parameter_split.shared
        else [f"Everything is personal, which makes {method} {everything}."]
    )
