"""Saving and restoring of a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_pfl.contract.records import BestModel, ClientResults
from lightning_pfl.core.tree import Tree, tmap
from lightning_pfl.federation.architectures import describe
from lightning_pfl.federation.checkpoint import (
    FORMAT,
    check_client_states,
    check_complete,
    check_finite_server,
    check_finite_states,
    check_structure,
    fit_server,
    require_open,
    warn_of_other_samples,
)
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.state import FederationState


class SavableState(FederationState):
    """The state of a federation, which checkpoints hold."""

    # --- save -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values only, loadable with ``weights_only=True``.

        A collective call; process 0 gets all client states.
        """
        return {
            **self.shared_state(),
            "client_states": self._client_states(lambda store: store.state_dict()),
            "kept_optimizers": self._joined(self.optimizer_states),
            "best_models": self._joined(self._own_best()),
        }

    def own_state(self) -> dict[str, Any]:
        """Return what this process has of its own clients, for its file of a sharded checkpoint.

        Its entries are those of :meth:`state_dict`, and ``ids``; None for all clients.
        """
        alone = self.ranks.size == 1
        states = self._client_states(lambda store: tmap(lambda leaf: leaf.cpu(), store.own()))
        return {
            "ids": None if alone else torch.tensor(self._own_ids(), dtype=torch.int64),
            "client_states": states,
            "kept_optimizers": self._by_name(self.optimizer_states),
            "best_models": self._by_name(self._own_best()),
        }

    def shared_state(self) -> dict[str, Any]:
        """Return what all processes have in common; the clients' part is empty."""
        return {
            "format": FORMAT,
            "method": type(self.method).__name__,
            "settings": self.method.settings(),
            "structure": self.method.structure(),
            "parameter_split": describe(
                {
                    architecture.name: architecture.parameter_split
                    for architecture in self.architectures
                }
            ),
            "clients": list(self.client_names),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "rounds": self.rounds,
            "server": self.server,
            "client_states": {},
            "history": self.history.state_dict(),
            "client_results": {
                split: found.state_dict() for split, found in self.client_results.items()
            },
            "probed_engines": {
                architecture.name: dict(architecture.engine.found)
                for architecture in self.architectures
            },
        }

    def _joined(self, own: Mapping[int, Any]) -> dict[str, Any]:
        """Gather what processes have of their own clients, by the clients' names."""
        parts = self.ranks.all_gather_objects(self._by_name(own))
        return {name: value for part in parts for name, value in part.items()}

    def _by_name(self, own: Mapping[int, Any]) -> dict[str, Any]:
        return {self.client_names[client]: value for client, value in own.items()}

    def _client_states(self, of: Callable[[ClientStateStore], Tree]) -> Tree:
        """Collect client states, by the architecture's name if there are several."""
        if len(self.architectures) == 1:
            return of(self.architectures[0].client_states)
        return {
            architecture.name: of(architecture.client_states) for architecture in self.architectures
        }

    # --- restore ----------------------------------------------------------------------------------

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a saved state.

        Raises:
            CheckpointMismatchError: If it belongs to other clients, to other relations between
                them, or to another kind of server.
        """
        parts, first = saved.get("shards") or [saved], len(saved["clients"])
        self._check(saved, parts)
        model = self.architectures[0].parameter_split.model()
        device = next((leaf.device for leaf in model.values()), torch.device("cpu"))
        joined = self.num_clients > first
        server = self._admit(saved["server"], first) if joined else saved["server"]
        self.server = fit_server(server, self.server, device)
        for architecture in self.architectures:
            for part in parts:
                tree = part["client_states"]
                tree = tree if len(self.architectures) == 1 else tree[architecture.name]
                architecture.client_states.load_state_dict(tree, part.get("ids"))
        self.rounds = saved["rounds"]
        counts = torch.cat([saved["num_samples"], self.num_samples[first:]])
        methods = self._bind(counts)
        for method, architecture in zip(methods, self.architectures, strict=True):
            architecture.method = method
        self.history.load_state_dict(saved["history"])
        self.client_results = {
            split: ClientResults.restored(split, found)
            for split, found in saved.get("client_results", {}).items()
        }
        self.best = {k: BestModel(**one) for k, one in self._by_id(parts, "best_models").items()}
        self.keep_own_best()
        if self.keeps_optimizers:
            kept, own = self._by_id(parts, "kept_optimizers"), {*self._own_ids()}
            # Copies: a checkpoint's tensors may be on the disk.
            self.optimizer_states = {
                client: apply_to_collection(state, Tensor, torch.clone)
                for client, state in kept.items()
                if client in own
            }
            self._move_optimizers(device)
        if not self.num_samples.any():
            self.num_samples = saved["num_samples"].clone()
        self._load_shared()
        self._keep_own()

    def _check(self, saved: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
        """Check a saved state, of which each process wrote a part, against this federation."""
        known = saved["clients"]
        first = len(known)
        if joined := self.num_clients - first:
            name = type(self.method).__name__
            require_open(name, self.method.fixed_clients, self.client_names[first:])
        warn_of_other_samples(saved, self.client_names, self.num_samples)
        check_structure(saved, self.method.structure(), joined)
        check_complete(parts, first)
        own = self._client_states(lambda store: store.tree)
        for part in parts:
            check_client_states(part["client_states"], own)
            ids = part.get("ids")
            names = known if ids is None else [known[client] for client in ids.tolist()]
            check_finite_states(part["client_states"], names)
        check_finite_server(saved["server"])

    def _by_id(self, parts: Sequence[Mapping[str, Any]], key: str) -> dict[int, Any]:
        """Collect what all processes wrote of their own clients, by the ids of now."""
        found = {name: one for part in parts for name, one in part.get(key, {}).items()}
        names = enumerate(self.client_names)
        return {client: found[name] for client, name in names if name in found}

    def _admit(self, saved: Tree, first: int) -> Tree:
        """Let the clients from id ``first`` on join, and return the server's tree with them."""
        saved, begun = (tmap(lambda leaf: leaf.cpu(), tree) for tree in (saved, self.server))
        server = saved
        for architecture in self.architectures:
            known = architecture.clients
            clients = torch.arange(self.num_clients) if known is None else known
            clients = clients[clients >= first]
            clients = clients[self.ranks.shard(self.owners[clients]).index]
            client_state = architecture.gather(clients, "cpu")
            server, client_state = architecture.method.admit(saved, begun, client_state)
            if len(clients):
                architecture.scatter(clients, client_state)
        return server
