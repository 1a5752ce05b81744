"""The hooks of a communication round, in addition to Lightning's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pfl.contract.records import ClientResults, Evaluation, Round
from lightning_pfl.core.errors import require_federated
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Tree
from lightning_pfl.data.datasets import FederatedDataset


class FederationView(Protocol):
    """The part of a running federation that callbacks and methods may use."""

    method: Any
    server: Tree
    client_names: tuple[str, ...]
    architectures: Sequence[Any]
    rounds: int

    @property
    def parameter_split(self) -> ParameterSplit:
        """The split of parameters into shared, personal and static ones."""

    @property
    def client_states(self) -> Any:
        """The clients' states between rounds."""

    @property
    def num_clients(self) -> int:
        """Number of clients in the federation, sampled or not."""

    def shard(self, clients: Tensor) -> Any:
        """Return this process's shard of some clients."""

    def by_architecture(self, clients: Tensor) -> Iterator[tuple[Any, slice | Tensor]]:
        """Split a list of clients by architecture."""


def require_federation(trainer: L.Trainer, callback: object) -> Any:
    """Return the federation of a Trainer, a :class:`FederationView`.

    Raises:
        MisconfigurationException: If the Trainer has another strategy.
    """
    strategy: Any = trainer.strategy
    require_federated(strategy, callback)
    return strategy.federation


class FederatedCallback(Callback):
    """A Lightning callback with hooks for the stages of a round.

    All Lightning hooks run as usual.

    Attributes:
        reads_clients: Whether it reads samples or states of clients: in a deployment, in which they
            stay on the nodes, it is refused.

    Raises:
        MisconfigurationException: At the start of a run whose strategy isn't a federated one.
    """

    reads_clients: ClassVar[bool] = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require a federated run, as others have no rounds."""
        require_federation(trainer, self)

    def on_round_start(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Called when the cohort is drawn, before anything is sent."""

    def on_local_training_start(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """Called when the clients have received ``round.received``, before they train."""

    def on_local_training_end(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """Called when clients have trained; ``round.uploads`` are the uploads before the gate."""

    def on_aggregation_start(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """Called when the gate has removed bad uploads, before the server's update."""

    def on_aggregation_end(
        self, trainer: L.Trainer, module: L.LightningModule, round: Round
    ) -> None:
        """Called after the server's update."""

    def on_round_end(self, trainer: L.Trainer, module: L.LightningModule, round: Round) -> None:
        """Called when the clients' states are stored, before evaluation."""

    def further_evaluations(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        data: FederatedDataset,
        rows: Tensor,
        clients: Tensor,
        step: str,
    ) -> Mapping[str, Evaluation]:
        """Return further models' evaluations, which are logged and tabulated like the others.

        Called in every evaluation except the sanity check, with the module in eval mode.

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

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        """Called after every evaluation but the sanity check, in every process.

        Values that are added after the last round, such as those of fine-tuned models, are in
        another call with all results of the round: they alone, if it had no validation.
        """


class RoundValues(FederatedCallback):
    """A callback that logs values at the end of the round in which they are measured.

    Attributes:
        _values: The round's values by name; replaced in every round.
    """

    _values: Mapping[str, float] = MappingProxyType({})

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round's values."""
        pl_module.log_dict(self._values, on_step=False, on_epoch=True, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Return the round's values, for a run resumed before they are logged."""
        return {"values": dict(self._values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        self._values = dict(state_dict["values"])
