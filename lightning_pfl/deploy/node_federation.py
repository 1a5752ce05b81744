"""A node's federation: the states of its own clients, and what the server has sent."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Model, Tree, repeat, rows, tmap
from lightning_pfl.deploy.states import StatesOnDisk
from lightning_pfl.federation.architectures import Architecture
from lightning_pfl.federation.federation import Federation
from lightning_pfl.methods.base import Method
from lightning_pfl.trainer.strategy import FederatedStrategy


class NodeFederation(Federation):
    """The federation as a node sees it: its own clients' states, and what the server has sent.

    Attributes:
        folder: Where the client states live.
        received: What the server has sent, ``(clients, ...)``.
        clients: The clients that it was sent to, int64 ``(clients,)``.
        everybodys: The global model that the server has sent; None if there is none.
        everybodys_samples: Training samples of all clients, int64 ``(num_clients,)``; None for a
            method that doesn't need to know them.
    """

    folder: Path
    received: Tree
    clients: Tensor
    everybodys: Model | None = None
    everybodys_samples: Tensor | None = None

    @property
    def states(self) -> StatesOnDisk:
        """The client states."""
        store = self.client_states
        assert isinstance(store, StatesOnDisk)
        return store

    def _begin_client_states(
        self,
        architecture: Architecture,
        method: Method,
        row: Tree,
        device: torch.device,
        everyone: ClientInfo,
    ) -> None:
        model = architecture.parameter_split.model()

        def initial(clients: Tensor) -> Tree:
            held = tmap(lambda leaf: leaf.to(device), model)
            states = repeat(tmap(lambda leaf: leaf.to(device), row), len(clients))
            return method.init_client_state_rows(states, held, everyone.rows(clients))

        architecture.method = method
        architecture.client_states = StatesOnDisk(
            self.folder / "states", self.client_names, row, initial, device
        )

    def _bind(self, num_samples: Tensor | None = None) -> list[Method]:
        return super()._bind(
            num_samples if self.everybodys_samples is None else self.everybodys_samples
        )

    def download(self, info: ClientInfo) -> Tree:
        """Return what the server has sent to some of the clients."""
        position = {client: at for at, client in enumerate(self.clients.tolist())}
        return rows(self.received, torch.tensor([position[k] for k in info.index.tolist()]))

    def global_model(self) -> Model | None:
        """Return the global model that the server has sent."""
        return self.everybodys


class NodeStrategy(FederatedStrategy):
    """The strategy of a node; it sets up a run whose rounds come from the server."""

    federation_class: ClassVar[type[Federation]] = NodeFederation

    def take_seed(self, seed: int) -> None:
        """Use the server's seed, which isn't known before the node joins."""
        self._stage.seed = seed
