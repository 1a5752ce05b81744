"""The interface of engines, which run the clients' side of a round for a cohort."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo, Evaluation, LocalResult, OnClients
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.methods.base import Method, Phase


@dataclass
class EngineSettings:
    """The settings of local training from the Trainer's flags and the strategy.

    Args:
        seed: The run's seed.
        device: Device of local training.
        clip_value: ``gradient_clip_val``, per client; None or 0 for no clipping.
        clip_algorithm: ``"norm"`` (the client's total norm) or ``"value"``.
        accumulate: ``accumulate_grad_batches``: minibatches per optimizer step.
        limit_train_batches: Per client and epoch: a count (int) or a fraction (float).
        limit_eval_batches: Per client: a count (int) or a fraction (float).
        overfit_batches: When not 0: this number (or fraction) of unshuffled batches.
        chunk_size: Clients per batched program; None fits the memory.
        autocast: dtype of mixed precision, None for full precision.
        feature_cache: Whether features of a frozen shared prefix are computed once per phase.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    accumulate: int = 1
    limit_train_batches: float | int = 1.0
    limit_eval_batches: float | int = 1.0
    overfit_batches: float | int = 0.0
    chunk_size: int | None = None
    autocast: torch.dtype | None = None
    feature_cache: bool = True


class Engine(Protocol):
    """Runs a method's client functions. Engines agree within float tolerance."""

    name: str

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Count the optimizer steps of each client, int64 ``(clients,)``."""

    def train(
        self,
        method: Method,
        received: Tree,
        client_state: Tree,
        info: ClientInfo,
        data: FederatedDataset,
        phases: tuple[Phase, ...],
        on_clients: OnClients | None = None,
        stream: str = "local",
    ) -> LocalResult:
        """Run ``client_init``, the phases' steps and ``client_final`` for every client.

        ``stream`` names the purpose: two purposes in one round draw other random numbers.
        """

    def evaluate(
        self,
        models: Model,
        clients: Tensor,
        data: FederatedDataset,
        step: str,
        on_clients: OnClients | None = None,
        round: int | None = None,
    ) -> Evaluation:
        """Run a validation, test or prediction step of the user's module for each client.

        Args:
            models: One model per client, ``(clients, ...)``; expanded leaves are run unbatched.
            clients: Client ids, int64 ``(clients,)``, naming rows of ``data``.
            data: The split.
            step: Name of the module's step function.
            on_clients: Progress.
            round: The last finished round, for errors; None if it isn't known.
        """
