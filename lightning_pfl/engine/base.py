"""What an engine is: the clients' side of a round, run for a whole cohort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pfl.callback import ClientInfo
from lightning_pfl.data.clients import FederatedDataset
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.tree import Model, Tree


@dataclass
class EngineSettings:
    """What the Trainer's flags and the strategy say about local training.

    Args:
        seed: The run's seed.
        device: Where training runs.
        clip_value: ``gradient_clip_val``, per client; None or 0 for no clipping.
        clip_algorithm: ``"norm"`` (the client's total norm) or ``"value"``.
        accumulate: ``accumulate_grad_batches``: minibatches per optimizer step.
        limit_train_batches: Per client and epoch: a count (int) or a fraction (float).
        limit_eval_batches: Per client: a count (int) or a fraction (float).
        overfit_batches: When not 0: that many (or that fraction of) unshuffled batches.
        chunk_size: Clients per batched program; None fits the memory.
        autocast: dtype of mixed precision, None for full precision.
        prefix_cache: Whether features of a frozen shared prefix are computed once per phase.
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
    prefix_cache: bool = True


@dataclass
class LogOptions:
    """How the user logged a value.

    The arguments of ``self.log`` that matter after averaging over clients.

    Attributes:
        prog_bar, logger: Where it is shown.
        higher_is_better: What a torchmetrics object says of itself; None where nothing is known.
    """

    prog_bar: bool = False
    logger: bool = True
    higher_is_better: bool | None = None


@dataclass
class LocalResult:
    """What a cohort's local training gave.

    Every tensor has a leading client axis in the order of ``info.index``.

    Attributes:
        uploads: What leaves the clients.
        own: What they remember.
        logs: Values logged in ``training_step``: mean over each client's minibatches, weighted by
            batch size, ``(clients,)``; NaN where a client logged nothing.
        options: How each value was logged.
        loss: Mean training loss over each client's minibatches, ``(clients,)``; Inf where it
            wasn't finite, NaN where none was computed.
    """

    uploads: Tree
    own: Tree
    logs: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, LogOptions] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Evaluation:
    """Per-client results of an evaluation.

    Attributes:
        values: What ``validation_step`` or ``test_step`` logged, by the user's key: mean over each
            client's batches, weighted by batch size, ``(clients,)``; NaN for a client without
            samples. A torchmetrics object that was logged is computed per client.
        counts: Samples evaluated, int64 ``(clients,)``.
        options: How each value was logged.
        predictions: For ``predict_step``: per client, the list of what it returned for each batch.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    options: dict[str, LogOptions] = field(default_factory=dict)
    predictions: list[list[Any]] = field(default_factory=list)


OnClients = Callable[[list[int]], None]
"""Called with the positions in the cohort of the clients that have just finished."""


def told(on_clients: OnClients | None, at: slice | Tensor) -> OnClients | None:
    """Report positions of a whole list, where an engine works on a part of it.

    Args:
        on_clients: Told positions of the whole list; None where nobody listens.
        at: The part's positions there.
    """
    if on_clients is None or isinstance(at, slice):
        return on_clients
    return lambda done: on_clients(at[torch.tensor(done, dtype=torch.int64)].tolist())


class Engine(Protocol):
    """Runs the clients' functions of a method. Engines agree within float tolerance."""

    name: str

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Optimizer steps that each client will take, int64 ``(clients,)``."""

    def train(
        self,
        method: Method,
        received: Tree,
        own: Tree,
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
