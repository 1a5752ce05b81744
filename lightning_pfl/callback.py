"""The hooks of a federated round, beside Lightning's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pfl.tree import Tree, rows

if TYPE_CHECKING:
    from lightning_pfl.data.clients import FederatedDataset
    from lightning_pfl.engine.base import Evaluation


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
    """

    index: Tensor
    num_samples: Tensor
    steps: Tensor
    weights: Tensor
    round: int
    num_clients: int
    rates: tuple[float, ...] = ()

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
        metrics: Values logged by the clients' training steps, averaged over clients and steps.
        bytes_down: Bytes sent to one client. ``bytes_up``: bytes sent by one client. Where clients
            differ, their mean, rounded down.
        bytes_exchanged: Bytes of all messages between clients together.
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

    @property
    def accepted(self) -> Tensor:
        """Which clients of the cohort the gate accepted, bool ``(clients,)``, on the CPU."""
        return torch.tensor([k not in self.rejected for k in self.info.index.tolist()])


class FederatedCallback(Callback):
    """A Lightning callback that also hears the stages of a round.

    Every Lightning hook fires at its normal place.

    Raises:
        MisconfigurationException: At the start of a run whose strategy isn't a federated one.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require a federated run: in any other there are no rounds, and nothing would say so."""
        from lightning_pfl.federation import require_federation

        require_federation(trainer, self)

    def on_round_start(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """The cohort is drawn; nothing was sent yet."""

    def on_local_training_start(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """The clients received ``round.received`` and begin to train."""

    def on_local_training_end(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """The clients are done; ``round.uploads`` holds what they send, before the gate."""

    def on_aggregation_start(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """The gate has removed bad uploads; the server is about to update."""

    def on_aggregation_end(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """The server has updated."""

    def on_round_end(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """The clients' memories are stored; evaluation has not run yet."""

    def further_evaluations(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        data: FederatedDataset,
        rows: Tensor,
        clients: Tensor,
        step: str,
    ) -> Mapping[str, Evaluation]:
        """Models to evaluate beside the personal and the global ones.

        Logged and tabulated like them.

        Called in every evaluation but the sanity check, with the module in eval mode.

        Args:
            trainer: The running Trainer.
            module: The user's module.
            data: The split.
            rows: Rows of ``data`` with samples, int64 ``(clients,)``.
            clients: Ids of these clients, int64 ``(clients,)``.
            step: ``"validation_step"`` or ``"test_step"``.

        Returns:
            Results by the prefix of their keys, such as ``"ft/"``.
        """
        return {}


class RoundValues(FederatedCallback):
    """Logs at the end of a round what was measured inside it; resumes between the two.

    Attributes:
        _values: The round's values by name; set anew in every round.
    """

    _values: Mapping[str, float] = MappingProxyType({})

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round's values."""
        pl_module.log_dict(self._values, on_step=False, on_epoch=True, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The round's values, for a run that is resumed before they are logged."""
        return {"values": dict(self._values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._values = dict(state_dict["values"])
