"""The state of a federation: the server's tree and the client states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import BestModel, ClientInfo, ClientResults, OptimizerState
from lightning_pfl.contract.returned import require_tree
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import (
    Model,
    Tree,
    expand,
    named_leaves,
    select,
    tmap,
    total_nbytes,
)
from lightning_pfl.data.datasets import FederatedDataset, FederatedLoaders
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.optimizer_options import learning_rates
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.federation.architectures import (
    Architecture,
    bound,
    by_architecture,
    check_messages,
    check_server_trees,
    model_sizes,
    one_architecture,
)
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.dealing import deal, deal_evenly
from lightning_pfl.federation.gate import MaxNorm, Verdict, refuse_step
from lightning_pfl.federation.ranks import Ranks, RankShard
from lightning_pfl.federation.sampling import check_participation
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.metrics.history import History


class FederationState:
    """The state of a federation between rounds and between runs.

    Attributes:
        method: The method in use.
        architectures: The clients by architecture: parameter split, client states and engine of
            each. With only one, ``parameter_split``, ``client_states`` and ``engine`` are its.
        server: The server's tree.
        max_update_norm: Uploads whose update has a larger Euclidean norm are left out; ``"auto"``:
            those that are far larger than usual in their round; None for no bound.
        client_names: Names, in the order of the client ids.
        num_samples: Training samples of each client, int64 ``(clients,)``; 0 if unknown.
        rounds: Finished communication rounds.
        history: Evaluations so far, for the summary at the end.
        client_results: The last evaluation of each split, client by client, also of a checkpoint.
        settings: The engines' settings.
        ranks: The processes that share the clients.
        owners: The rank of each client's process, int64 ``(clients,)``.
        seed: Seed of every random choice of the run.
        client_optimizer: Makes the template of an architecture's optimizers outside of a fit.
        training_data: Loads the training data.
        fitting: Whether a fit runs, in which personal models are those of now, not the best ones.
        keeps_best: Whether the fit keeps the best personal models.
        best: The best personal models so far, by client id.
        splits_data: Whether each process keeps the samples of its own clients alone.
        knows_owners: Whether ``owners`` are those of the running stage.
        overlaps_evaluation: Whether the values of a validation are read after the next training.
        keeps_optimizers: Whether clients keep the states of their optimizers between rounds.
        optimizer_states: Those of this process's clients that have some, by id.
    """

    method: Method
    architectures: Sequence[Architecture]
    server: Tree
    settings: EngineSettings
    seed: int = 0
    max_update_norm: MaxNorm = None
    client_optimizer: Callable[[Architecture], Optimizer]
    training_data: Callable[[], FederatedDataset]

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.participation = self.evaluated_clients = 1.0
        self.rounds = 0
        self.history = History()
        self.client_results: dict[str, ClientResults] = {}
        self.client_names: tuple[str, ...] = ()
        self.num_samples = self.owners = torch.zeros(0, dtype=torch.int64)
        self.module: L.LightningModule | None = None
        self.fitting = self.keeps_best = self.overlaps_evaluation = False
        self.best: dict[int, BestModel] = {}
        self.keeps_optimizers = self.splits_data = self.knows_owners = False
        self.optimizer_states: dict[int, OptimizerState] = {}
        self._own: list[Model] = []

    # --- one architecture, or several -------------------------------------------------------------

    @property
    def parameter_split(self) -> ParameterSplit:
        """The parameter split; an error if clients have different architectures."""
        return one_architecture(self.architectures).parameter_split

    @property
    def client_states(self) -> ClientStateStore:
        """The client states; an error if clients have different architectures."""
        return one_architecture(self.architectures).client_states

    @property
    def engine(self) -> SelectedEngine:
        """The engine; an error if clients have different architectures."""
        return one_architecture(self.architectures).engine

    def by_architecture(self, clients: Tensor) -> Iterator[tuple[Architecture, slice | Tensor]]:
        """Split a list of clients: each architecture with the positions of its clients."""
        return by_architecture(self.architectures, clients)

    def architecture_of(self, clients: Tensor) -> Architecture:
        """Return the architecture of some clients; an error if they have several."""
        return one_architecture(self.architectures, clients)

    # --- what users ask for -----------------------------------------------------------------------

    @property
    def num_clients(self) -> int:
        """Number of clients in the federation, sampled or not."""
        return len(self.client_names)

    def bind_method(self) -> None:
        """Bind the method to this federation again, if it was bound to another one since."""
        if self.method.parameter_split is not self.architectures[0].parameter_split:
            self._bind()

    def require_module(self) -> L.LightningModule:
        """Return the user's module, or raise RuntimeError before the first run."""
        if self.module is None:
            raise RuntimeError(
                "Expected a trained or loaded federation, but got none. Call `trainer.fit` or "
                "`trainer.validate(ckpt_path=...)` first."
            )
        self.bind_method()
        return self.module

    # --- a round ----------------------------------------------------------------------------------

    @property
    def participation(self) -> int | float:
        """Clients per round: a fraction in (0, 1], or a count."""
        return self._participation

    @participation.setter
    def participation(self, participation: int | float) -> None:
        self._participation = check_participation(participation)

    @property
    def evaluated_clients(self) -> int | float:
        """Clients that a validation of a fit evaluates: a fraction or a count."""
        return self._evaluated_clients

    @evaluated_clients.setter
    def evaluated_clients(self, share: int | float) -> None:
        self._evaluated_clients = check_participation(share, "evaluated_clients")

    def shard(self, clients: Tensor, costs: Tensor | None = None) -> RankShard:
        """Return this process's shard of some clients: those whose states it has.

        Without client states and with all samples in every process, shards cost the same, about.

        Args:
            clients: Ids, int64 ``(clients,)``.
            costs: What each costs, such as its samples; None: the same.
        """
        if self.ranks.size == 1:
            return self.ranks.shard(torch.zeros_like(clients))
        client_states = self.architectures[0].client_states  # several ones run in one process
        keys = deal_evenly(torch.zeros_like(clients) if costs is None else costs, self.ranks.size)
        if client_states.has_entries() or self.keeps_optimizers or self.splits_data or self.best:
            # New clients, who never take part, are anyone's.
            last = len(self.owners) - 1
            keys = self.owners[clients.clamp_max(last)].where(clients <= last, clients)
        # Where all states are here, samples that personalization trains on may be elsewhere.
        away = self.splits_data and bool(self.method.evaluation_phases())
        return (Ranks() if client_states.complete and not away else self.ranks).shard(keys)

    def own_part(self, data: FederatedDataset) -> FederatedDataset:
        """Keep the samples of this process's clients alone, if processes split the data.

        Args:
            data: A split of the clients. DataLoaders stay: those of others are never read.
        """
        if not self.splits_data or self.ranks.size == 1 or isinstance(data, FederatedLoaders):
            return data
        own = {*(self.own_names() if data.named else self._own_ids())}
        rows = [row for row, name in enumerate(data.names) if (name if data.named else row) in own]
        return data.keep(torch.tensor(rows, dtype=torch.int64))

    def own_names(self) -> list[str]:
        """Return the names of this process's clients."""
        return [self.client_names[client] for client in self._own_ids()]

    def _own_ids(self) -> list[int]:
        own: list[int] = (self.owners == self.ranks.rank).nonzero().flatten().tolist()
        return own

    def deal(self, info: ClientInfo, home: RankShard) -> RankShard:
        """Return this process's shard of a cohort: those that it trains.

        Args:
            info: The cohort.
            home: The shard of those whose states it has.
        """
        client_states = self.architectures[0].client_states
        if home.alone or self.keeps_optimizers or self.splits_data:  # which don't visit
            return home
        epoch = (Phase("all", epochs=1),)
        per_epoch = self.count_steps(self.training_data(), info.index, epoch).clamp_min(1)
        costs = (info.steps * info.num_samples / per_epoch).tolist()
        homes = home.owners.tolist() if client_states.has_entries() else None
        owners = deal(costs, self.ranks.size, homes)
        return self.ranks.shard(torch.tensor(owners, dtype=torch.int64))

    def kept_optimizers(self, clients: Tensor) -> list[OptimizerState] | None:
        """Return the optimizer states of some clients; None if they begin with fresh ones."""
        if not self.keeps_optimizers:
            return None
        return [self.optimizer_states.get(client, {}) for client in clients.tolist()]

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Count the optimizer steps of each client, int64 ``(clients,)``."""
        return self.architectures[0].engine.count_steps(data, clients, phases)

    def info(self, clients: Tensor, round: int, steps: Tensor | None = None) -> ClientInfo:
        """Collect the facts about some clients, with weights that sum to 1."""
        samples = self.num_samples[clients]
        steps = torch.zeros_like(samples) if steps is None else steps
        weights = self.method.aggregation_weights(samples)
        found = (learning_rates(architecture.optimizer) for architecture in self.architectures)
        rates = tuple(dict.fromkeys(rate for rates in found for rate in rates))
        return ClientInfo(clients, samples, steps, weights, round, self.num_clients, rates)

    def download(self, info: ClientInfo) -> Tree:
        """Make the trees that clients receive, ``(clients, ...)``; views if all get the same."""
        sent = require_tree(self.method.download(self.server, info), "download", self.method)
        received = expand(sent, len(info))
        return _merge(received, self.method.download_rows(self.server, info))

    def shared_model(self, server: Tree | None = None) -> Model:
        """Return the global model, or the shared part of the model."""
        server = self.server if server is None else server
        model = self.method.global_model(server)
        known = server.get("model", {}) if model is None else model
        return select(known, self.architectures[0].parameter_split.names)

    def refuse_step(self, server: Tree, verdict: Verdict) -> str:
        """Return why the server must not become ``server``; empty if it may."""
        models = self._moved_models(self.server), self._moved_models(server)
        return refuse_step(self.server, server, models, verdict.median)

    def _moved_models(self, server: Tree) -> Model:
        """Return the entries of the server's model, or of its models where it has several."""
        several = {"models": server["models"]} if "models" in server else {}
        # A model of infinities, which no client chooses, says nothing about the others.
        return self.shared_model(server) or {
            name: leaf.nan_to_num(0.0, 0.0, 0.0) for name, leaf in named_leaves(several).items()
        }

    def changed_outside(self) -> list[str]:
        """Find parameters of the modules that other code has changed since the last round."""
        shared, found = self.shared_model(), []
        for architecture, own in zip(self.architectures, self._own, strict=True):
            split = architecture.parameter_split
            parameters, now = dict(split.module.named_parameters()), split.model()
            found += [
                name
                for name, leaf in {**own, **shared}.items()
                if name in parameters and not _equal(now[name], leaf.to(now[name]))
            ]
        return found

    def commit(self, server: Tree) -> None:
        """End a round with the new server tree."""
        self.server = server
        self._load_shared()
        self.rounds += 1

    def _load_shared(self) -> None:
        shared = self.shared_model()
        for architecture in self.architectures:
            architecture.parameter_split.load(shared)

    def _keep_own(self) -> None:
        """Keep a copy of the modules' other entries, which no round writes."""
        shared = self.shared_model()
        models = [architecture.parameter_split.model() for architecture in self.architectures]
        self._own = [select(model, model.keys() - shared.keys()) for model in models]

    # --- begin, and move --------------------------------------------------------------------------

    def begin(
        self,
        module: L.LightningModule,
        architectures: Sequence[Architecture],
        names: Sequence[str],
        num_samples: Tensor,
        place: Callable[[int], torch.device],
    ) -> None:
        """Start from the module's current parameters, at round 0.

        ``place(nbytes)`` returns the device for client states of that size.
        """
        self.module, self.architectures = module, architectures
        self.client_names, self.num_samples = tuple(names), num_samples
        self.rounds, self.history, self.client_results = 0, History(), {}
        self.optimizer_states, self.best = {}, {}
        methods = self._bind()
        trees = [
            require_tree(
                method.init_server(architecture.parameter_split.model()), "init_server", method
            )
            for method, architecture in zip(methods, architectures, strict=True)
        ]
        check_server_trees(self.method, architectures, trees)
        self.server = trees[0]
        if len(architectures) > 1:  # shared entries start with equal values
            self._load_shared()
        self._keep_own()
        count = len(names)
        self.owners = deal_evenly(num_samples, self.ranks.size)
        nothing = torch.zeros(count, dtype=torch.int64)
        everyone = ClientInfo(torch.arange(count), num_samples, nothing, nothing.double(), 0, count)
        begun = [
            require_tree(
                m.init_client_state(architecture.parameter_split.model()), "init_client_state", m
            )
            for m, architecture in zip(methods, architectures, strict=True)
        ]
        held = [-(-architecture.count(count) // self.ranks.size) for architecture in architectures]
        device = place(sum(total_nbytes(row) * n for row, n in zip(begun, held, strict=True)))
        for method, architecture, row in zip(methods, architectures, begun, strict=True):
            self._begin_client_states(architecture, method, row, device, everyone)
        check_messages(architectures, everyone)

    def _begin_client_states(
        self,
        architecture: Architecture,
        method: Method,
        row: Tree,
        device: torch.device,
        everyone: ClientInfo,
    ) -> None:
        """Make the client states of an architecture before round 0."""
        ranks, owners = self.ranks, self.owners
        architecture.begin(method, row, self.num_clients, device, ranks, everyone, owners)

    def _bind(self, num_samples: Tensor | None = None) -> list[Method]:
        samples = self.num_samples if num_samples is None else num_samples
        known = Known.of(
            self.architectures[0].parameter_split,
            self.num_clients,
            self.seed,
            samples,
            model_sizes(self.architectures, self.num_clients),
        )
        methods = [
            bound(self.method, architecture, self.architectures, known)
            for architecture in self.architectures
        ]
        if len(self.architectures) > 1:
            self.method.bind(known)
        return methods

    def know_data(self, has_training_data: Tensor, label_counts: Tensor | None) -> None:
        """Let the method know the training data: fields of :class:`Known` that only a fit has."""
        for method in (self.method, *(each.method for each in self.architectures)):
            method.known = replace(
                method.known, has_training_data=has_training_data, label_counts=label_counts
            )

    def move(self, server: torch.device | str, clients: torch.device | str) -> None:
        """Move the server's tree and the client states."""
        self.server = tmap(lambda leaf: leaf.to(server), self.server)
        for architecture in self.architectures:
            architecture.client_states.tree = tmap(
                lambda leaf: leaf.to(clients), architecture.client_states.tree
            )
            architecture.client_states.device = torch.device(clients)
        self._move_optimizers(server)

    def _move_optimizers(self, device: torch.device | str) -> None:
        self.optimizer_states = apply_to_collection(
            self.optimizer_states, Tensor, lambda leaf: leaf.to(device)
        )

    # --- the best models --------------------------------------------------------------------------

    def best_model(self, client: int) -> Model:
        """Return a client's best model.

        Raises:
            RuntimeError: If another process has it.
        """
        if not (model := self.best[client].model):
            raise RuntimeError(
                f"Expected a client whose best model is in process {self.ranks.rank}, but that of "
                f"client {client} is in process {int(self.owners[client])} of {self.ranks.size}. "
                "Call `personal_models(federation, clients)` in all processes."
            )
        return model

    def keep_own_best(self) -> None:
        """Forget the best models of other processes' clients, but not their rounds."""
        own = {*self._own_ids()}
        for client, best in self.best.items():
            # Copies: a checkpoint's tensors may be on the disk.
            model = {name: leaf.clone() for name, leaf in best.model.items() if client in own}
            self.best[client] = replace(best, model=model)

    def gather_to_all_ranks(self, limit: int) -> None:
        """Gather client states and best models on all processes, up to ``limit`` bytes.

        A collective call of all processes.
        """
        own = self._own_best()
        mine = sum(total_nbytes(best["model"]) for best in own.values())
        left = limit - sum(self.ranks.all_gather_objects(mine))
        for architecture in self.architectures:
            architecture.client_states.gather_to_all_ranks(left)
        for part in self.ranks.all_gather_objects(own) if self.best and left >= 0 else ():
            self.best |= {client: BestModel(**best) for client, best in part.items()}

    def _own_best(self) -> dict[int, dict[str, Any]]:
        own = {*self._own_ids()}
        return {client: vars(best) for client, best in self.best.items() if client in own}


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _merge(tree: Tree, over: Tree) -> Tree:
    """Merge two trees; common leaves are those of ``over``."""
    merged = dict(tree)
    for name, leaf in over.items():
        merged[name] = _merge(tree[name], leaf) if isinstance(leaf, dict) and name in tree else leaf
    return merged
