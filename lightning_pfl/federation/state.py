"""The federation's state: the server's tree and the clients' memories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.parameters import Layout
from lightning_pfl.core.tree import Model, Tree, expand, select, tmap, whole_nbytes
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.optimizer import learning_rates
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.federation.architectures import (
    Group,
    bound,
    by_group,
    check_messages,
    check_server_trees,
    describe,
    model_sizes,
    one_group,
)
from lightning_pfl.federation.bank import Bank
from lightning_pfl.federation.checkpoint import (
    check_clients,
    check_memories,
    check_structure,
    fit_server,
)
from lightning_pfl.federation.ranks import Part, Ranks
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.metrics.history import History


class FederationState:
    """What :class:`~lightning_pfl.FederatedStrategy` holds between rounds and between runs.

    Attributes:
        method: The method in use.
        groups: The clients by architecture: layout, memories and engine of each. Most federations
            have one group; ``layout``, ``bank`` and ``engine`` are then its own.
        server: The server's tree.
        client_names: Names, in the order of the client ids.
        num_samples: Training samples of each client, int64 ``(clients,)``; 0 where unknown.
        rounds: Finished communication rounds.
        history: Evaluations so far, for the summary at the end.
        settings: What the engines were told.
        ranks: The processes that share the clients.
        seed: Seed of every random choice of the run.
    """

    method: Method
    groups: Sequence[Group]
    server: Tree
    settings: EngineSettings
    seed: int
    ranks: Ranks

    def __init__(self) -> None:
        self.rounds = 0
        self.history = History()
        self.client_names: tuple[str, ...] = ()
        self.num_samples = torch.zeros(0, dtype=torch.int64)
        self.module: L.LightningModule | None = None

    # --- one architecture, or several -------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Who holds which parameter; an error if clients have different architectures."""
        return one_group(self.groups).layout

    @property
    def bank(self) -> Bank:
        """The clients' memories; an error if clients have different architectures."""
        return one_group(self.groups).bank

    @property
    def engine(self) -> SelectedEngine:
        """What runs the clients; an error if clients have different architectures."""
        return one_group(self.groups).engine

    def by_group(self, clients: Tensor) -> Iterator[tuple[Group, slice | Tensor]]:
        """Split a list of clients: each group with the positions of its clients in the list."""
        return by_group(self.groups, clients)

    def group_of(self, clients: Tensor) -> Group:
        """The group of some clients; an error if they have different architectures."""
        return one_group(self.groups, clients)

    # --- what users ask for -----------------------------------------------------------------------

    @property
    def num_clients(self) -> int:
        """Number of clients in the federation, sampled or not."""
        return len(self.client_names)

    def bind_method(self) -> None:
        """Tell the method of this federation, in case its object has served another one since."""
        if self.method.layout is not self.groups[0].layout:
            self._bind()

    def require_module(self) -> L.LightningModule:
        """The user's module; an error before the first run."""
        if self.module is None:
            raise RuntimeError(
                "Expected a federation to ask about, but nothing was trained or loaded yet. Call "
                "`trainer.fit`, or "
                "`trainer.validate(ckpt_path=...)`, first."
            )
        self.bind_method()
        return self.module

    def client_optimizer(self, group: Group) -> Optimizer:
        """The template of the clients' optimizers, where no fit has made one."""
        raise NotImplementedError

    # --- a round ----------------------------------------------------------------------------------

    def part(self, clients: Tensor) -> Part:
        """This process's share of some clients: those whose memories it holds.

        An equal share, where clients remember nothing.
        """
        bank = self.groups[0].bank  # several groups run in one process
        keys = clients if bank.remembers() else torch.arange(len(clients))
        return (Ranks() if bank.whole else self.ranks).part(keys)

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Optimizer steps that each client will take, int64 ``(clients,)``."""
        return self.groups[0].engine.count_steps(data, clients, phases)

    def info(self, clients: Tensor, round: int, steps: Tensor | None = None) -> ClientInfo:
        """What is known of some clients; the weights sum to 1 over them."""
        samples = self.num_samples[clients]
        steps = torch.zeros_like(samples) if steps is None else steps
        weights = self.method.aggregation_weights(samples)
        found = (learning_rates(group.engine.template) for group in self.groups)
        rates = tuple(dict.fromkeys(rate for rates in found for rate in rates))
        return ClientInfo(clients, samples, steps, weights, round, self.num_clients, rates)

    def download(self, info: ClientInfo) -> Tree:
        """What the server sends to clients, ``(clients, ...)``; views where all get the same."""
        received = expand(self.method.download(self.server, info), len(info))
        return _merge(received, self.method.download_rows(self.server, info))

    def shared_model(self) -> Model:
        """What the server knows of the module: the global model, or its shared part."""
        model = self.method.global_model(self.server)
        known = self.server.get("model", {}) if model is None else model
        return select(known, self.groups[0].layout.names)

    def changed_outside(self) -> list[str]:
        """Shared entries of the module that somebody else has written since the last round."""
        now = self.groups[0].layout.model()
        return [
            name
            for name, leaf in self.shared_model().items()
            if not torch.allclose(now[name], leaf.to(now[name]), rtol=0, atol=0, equal_nan=True)
        ]

    def commit(self, server: Tree) -> None:
        """End a round: the new server."""
        self.server = server
        self._load_shared()
        self.rounds += 1

    def _load_shared(self) -> None:
        shared = self.shared_model()
        for group in self.groups:
            group.layout.load(shared)

    # --- begin, move, save, restore ---------------------------------------------------------------

    def begin(
        self,
        module: L.LightningModule,
        groups: Sequence[Group],
        names: Sequence[str],
        num_samples: Tensor,
        bank: Callable[[int], torch.device],
    ) -> None:
        """Start from the module's current parameters: round 0.

        ``bank`` says where so many bytes of memories live.
        """
        self.module, self.groups = module, groups
        self.client_names, self.num_samples = tuple(names), num_samples
        self.rounds, self.history = 0, History()
        methods = self._bind()
        trees = [
            method.init_server(group.layout.model())
            for method, group in zip(methods, groups, strict=True)
        ]
        check_server_trees(self.method, groups, trees)
        self.server = trees[0]
        if len(groups) > 1:  # what is shared begins alike
            self._load_shared()
        count = len(names)
        nothing = torch.zeros(count, dtype=torch.int64)
        everyone = ClientInfo(torch.arange(count), num_samples, nothing, nothing.double(), 0, count)
        begun = [m.init_own(group.layout.model()) for m, group in zip(methods, groups, strict=True)]
        held = [-(-group.count(count) // self.ranks.size) for group in groups]
        device = bank(sum(whole_nbytes(row) * n for row, n in zip(begun, held, strict=True)))
        for method, group, row in zip(methods, groups, begun, strict=True):
            group.begin(method, row, count, device, self.ranks, everyone)
        check_messages(groups, everyone)

    def _bind(self, num_samples: Tensor | None = None) -> list[Method]:
        samples = self.num_samples if num_samples is None else num_samples
        known = (self.num_clients, self.seed, samples)
        self.method.model_sizes = model_sizes(self.groups, self.num_clients)
        methods = [bound(self.method, group, self.groups, *known) for group in self.groups]
        if len(self.groups) > 1:
            self.method.bind(self.groups[0].layout, *known)
        return methods

    def move(self, server: torch.device | str, bank: torch.device | str) -> None:
        """Move the server's tree and the clients' memories."""
        self.server = tmap(lambda leaf: leaf.to(server), self.server)
        for group in self.groups:
            group.bank.tree = tmap(lambda leaf: leaf.to(bank), group.bank.tree)
            group.bank.device = torch.device(bank)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that it loads with ``weights_only=True``.

        Several processes call it together; process 0 has all clients' memories.
        """
        return {
            "method": type(self.method).__name__,
            "settings": self.method.settings(),
            "structure": self.method.structure(),
            "layout": describe({group.name: group.layout for group in self.groups}),
            "clients": list(self.client_names),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "rounds": self.rounds,
            "server": self.server,
            "bank": self._memories(lambda bank: bank.state_dict()),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            CheckpointMismatchError: If it belongs to other clients, to other relations between
                them, or to another kind of server.
        """
        check_clients(saved, self.client_names, self.num_samples)
        check_structure(saved, self.method.structure())
        check_memories(saved["bank"], self._memories(lambda bank: bank.tree))
        model = self.groups[0].layout.model()
        device = next((leaf.device for leaf in model.values()), torch.device("cpu"))
        self.server = fit_server(saved["server"], self.server, device)
        for group in self.groups:
            alone = len(self.groups) == 1
            group.bank.load_state_dict(saved["bank"] if alone else saved["bank"][group.name])
        self.rounds = saved["rounds"]
        methods = self._bind(saved["num_samples"])
        for method, group in zip(methods, self.groups, strict=True):
            group.method = method
        self.history.load_state_dict(saved["history"])
        if not self.num_samples.any():
            self.num_samples = saved["num_samples"].clone()
        self._load_shared()

    def _memories(self, of: Callable[[Bank], Tree]) -> Tree:
        """All memories: of the one group, or by the group's name."""
        if len(self.groups) == 1:
            return of(self.groups[0].bank)
        return {group.name: of(group.bank) for group in self.groups}


def _merge(tree: Tree, over: Tree) -> Tree:
    """Both trees; where both have a leaf, that of ``over``."""
    merged = dict(tree)
    for name, leaf in over.items():
        merged[name] = _merge(tree[name], leaf) if isinstance(leaf, dict) and name in tree else leaf
    return merged
