"""The server's training on public samples, after its update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Tree, expand, repeat, tmap
from lightning_pfl.data.public import PublicData
from lightning_pfl.engine.base import SERVER, LocalWork, require_public
from lightning_pfl.engine.watching import in_mode
from lightning_pfl.federation.architectures import one_architecture
from lightning_pfl.federation.state import FederationState
from lightning_pfl.methods.base import LocalStep, Method


class ServerTraining(Method):
    """A method whose only client is another method's server.

    Args:
        method: The other method.
        info: The clients whose uploads the server has.
    """

    def __init__(self, method: Method, info: ClientInfo) -> None:
        super().__init__(weighting="uniform")
        self.method, self.senders = method, info

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        """Begin with the server's tree and the uploads."""
        return self.method.server_init(received["server"], received["uploads"], self.senders)

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        """Take the server's step."""
        return self.method.server_step(state, minibatches, client)

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        """Return the server's tree."""
        return self.method.server_final(received["server"], state), client_state


def train_server(
    federation: FederationState,
    server: Tree,
    uploads: Tree,
    info: ClientInfo,
    public: PublicData | None,
) -> Tree:
    """Train the server's tree; every process does the same.

    Args:
        federation: The federation.
        server: The server's tree after its update.
        uploads: Accepted uploads, ``(clients, ...)``.
        info: The clients that sent them.
        public: Public samples.

    Raises:
        MisconfigurationException: If there are none, or clients have several architectures.
    """
    architecture = one_architecture(federation.architectures)
    method, module, settings = federation.method, architecture.module, federation.settings
    data = require_public(public, method).for_server()
    phases = tuple(replace(p, data="training") for p in method.server_phases(info.round))
    own = method.server_optimizers(p for p in module.parameters() if p.requires_grad)
    optimizer = architecture.optimizer if own is None else own
    assert optimizer is not None  # the fit has made it

    def schedule(steps: int) -> list[list[Mapping[str, Any]]]:
        factors = method.server_schedule(steps) or [1.0] * steps
        groups = optimizer.param_groups
        return [[{"lr": group["lr"] * factor} for group in groups] for factor in factors]

    home = next(module.parameters()).device
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        in_mode(module, training=True),
        federation.ranks.without_communication(),
    ):
        one = torch.zeros(1, dtype=torch.int64)
        received = {"server": repeat(server, 1), "uploads": expand(uploads, 1)}
        received = tmap(lambda leaf: leaf.to(settings.device), received)
        steps = architecture.engine.count_steps(data, one, phases)
        alone = ClientInfo(one, data.num_samples, steps, torch.ones(1).double(), info.round, 1)
        work = LocalWork(
            ServerTraining(method, info),
            received,
            {},
            alone,
            data,
            phases,
            optimizer,
            SERVER,
            schedule=None if own is None else schedule,
        )
        trained = architecture.engine.train(work).uploads
    return tmap(lambda leaf: leaf[0].detach().to(home), trained)
