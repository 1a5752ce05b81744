"""What travels in a round: who takes part, what they gave, and how they were evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.tree import Tree, rows


def one_rate(rates: Collection[float]) -> float:
    """The one learning rate of an optimizer's parameter groups.

    Raises:
        ValueError: If there are several.
    """
    if len(rates) != 1:
        raise ValueError(
            f"Expected one learning rate for all parameter groups, but got {sorted(rates)}. "
            "This method uses the learning rate in its update; give all groups of "
            "`configure_optimizers` the same `lr`."
        )
    return next(iter(rates))


@dataclass
class ClientInfo:
    """What is known of the clients that a function works on; every tensor has shape ``(clients,)``.

    Attributes:
        index: Client ids, int64.
        num_samples: Training samples that the loop counted itself, int64.
        steps: Local optimizer steps of this round, all phases together, int64.
        weights: Aggregation weights of the method's ``weighting``, float64, summing to 1 over the
            whole cohort.
        round: The communication round, from 0.
        num_clients: Number of clients in the federation, sampled or not.
        rates: The different learning rates of the clients' optimizer now; empty where nobody
            trains.
        travel: How far a constant gradient of 1 would have moved the clients in this round, in
            units of the learning rate, float64; for plain SGD the number of steps. Known in
            ``client_final`` of a method with ``measures_travel``, else None.
    """

    index: Tensor
    num_samples: Tensor
    steps: Tensor
    weights: Tensor
    round: int
    num_clients: int
    rates: tuple[float, ...] = ()
    travel: Tensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lr(self) -> float:
        """The learning rate, for updates outside of ``client_step``.

        An error if the parameter groups have different ones.
        """
        return one_rate(self.rates)

    def rows(self, index: slice | Tensor) -> ClientInfo:
        """The same for some of the clients; the weights are not renormalised."""
        tensors = {k: getattr(self, k) for k in ("index", "num_samples", "steps", "weights")}
        same = {k: getattr(self, k) for k in ("round", "num_clients", "rates")}
        return ClientInfo(**rows(tensors, index), **same)

    def keep(self, accepted: Tensor) -> ClientInfo:
        """The accepted clients (bool ``(clients,)``), their weights renormalised to sum to 1."""
        kept = self.rows(accepted.nonzero().flatten())
        total = kept.weights.sum()
        kept.weights = (
            kept.weights / total
            if total > 0
            else torch.full_like(kept.weights, 1 / max(len(kept), 1))
        )
        return kept


@dataclass(frozen=True)
class FitPlan:
    """What is known of a fit before its first round.

    Attributes:
        max_rounds: The round in which the fit ends at the latest; None without such a limit.
        reload_every: After how many rounds the training data are loaded anew; 0 for never.
    """

    max_rounds: int | None
    reload_every: int


@dataclass
class Round:
    """One communication round, as the hooks see it. Filled as the round goes on.

    `None` means not yet.

    Attributes:
        number: The round, from 0; equal to ``trainer.current_epoch``.
        info: The cohort.
        received: What the server sent, ``(clients, ...)``.
        uploads: What the clients sent, ``(clients, ...)``; after the gate only the accepted ones.
        rejected: Ids of the clients whose upload the gate refused, with the reason.
        metrics: Values logged by the clients' training steps, averaged over clients and steps; at
            the end also what the method measured.
        bytes_down: Bytes sent to one client. ``bytes_up``: bytes sent by one client. Where clients
            differ, their mean, rounded down.
        bytes_exchanged: Bytes of all messages between clients together.
        server: The server's tree as the round began.
    """

    number: int
    info: ClientInfo
    received: Tree | None = None
    uploads: Tree | None = None
    rejected: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_exchanged: int = 0
    server: Tree | None = None

    @property
    def accepted(self) -> Tensor:
        """Which clients of the cohort the gate accepted, bool ``(clients,)``, on the CPU."""
        return torch.tensor([k not in self.rejected for k in self.info.index.tolist()])


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
    client_state: Tree
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


def as_positions_of(on_clients: OnClients | None, at: slice | Tensor) -> OnClients | None:
    """Report positions of a whole list, where an engine works on a part of it.

    Args:
        on_clients: Told positions of the whole list; None where nobody listens.
        at: The part's positions there.
    """
    if on_clients is None or isinstance(at, slice):
        return on_clients
    return lambda done: on_clients(at[torch.tensor(done, dtype=torch.int64)].tolist())
