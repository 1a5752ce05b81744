"""The hooks of a federated round, beside Lightning's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, Round
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree
from lightning_pfl.data.datasets import FederatedDataset


class FederationView(Protocol):
    """What callbacks and methods may ask of the running federation."""

    method: Any
    server: Tree
    client_names: tuple[str, ...]
    architectures: Sequence[Any]
    rounds: int

    @property
    def parameter_split(self) -> ParameterSplit:
        """Which parameters are shared, personal or static."""

    @property
    def client_states(self) -> Any:
        """What the clients remember between rounds."""

    @property
    def num_clients(self) -> int:
        """Number of clients in the federation, sampled or not."""

    def shard(self, clients: Tensor) -> Any:
        """This process's share of some clients."""

    def by_architecture(self, clients: Tensor) -> Iterator[tuple[Any, slice | Tensor]]:
        """Split a list of clients by their architectures."""


def require_federation(trainer: L.Trainer, callback: object) -> Any:
    """Return the federation of a Trainer, a :class:`FederationView`.

    Raises:
        MisconfigurationException: If the Trainer has another strategy.
    """
    strategy: Any = trainer.strategy
    if getattr(strategy, "strategy_name", None) == "federated":
        return strategy.federation
    raise MisconfigurationException(
        f"Expected a federated run, but {type(callback).__name__} is used with "
        f"{type(trainer.strategy).__name__}. Pass Trainer(strategy=FederatedStrategy(...))."
    )


class FederatedCallback(Callback):
    """A Lightning callback that also hears the stages of a round.

    Every Lightning hook fires at its normal place.

    Raises:
        MisconfigurationException: At the start of a run whose strategy isn't a federated one.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require a federated run: in any other there are no rounds, and nothing would say so."""
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
