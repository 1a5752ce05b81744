"""BestRound: early stopping of each client's personal model."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pfl.contract.callback import FederatedCallback, require_federation
from lightning_pfl.contract.records import ClientResults
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice
from lightning_pfl.federation.evaluate import direction, keep_best


class BestRound(FederatedCallback):
    """Keeps each client's personal model of the round that was best for it in validation.

    After the fit, ``trainer.test``, ``predict`` and ``validate``, ``client_state_dict`` and
    ``client_module`` use that model, also from a checkpoint alone. The fit itself goes on from the
    models of now, and logs them. Clients without validation samples have the model of now. It takes
    the memory of a model for each client, in the client's process; after a fit in all of them, if
    these models take at most 1 GiB together.

    Args:
        monitor: The value, as ``validation_step`` logs it.
        mode: ``"min"``, ``"max"``, or None: by the value's name or its torchmetrics object.

    Raises:
        ValueError: If ``mode`` is another one.
        MisconfigurationException: At the start of a fit that validates on test data; after the
            first validation if it doesn't log the value.

    Example:
        >>> BestRound("val_acc").monitor
        'val_acc'
    """

    reads_clients: ClassVar[bool] = True

    def __init__(
        self, monitor: str = "val_loss", mode: Literal["min", "max"] | None = None
    ) -> None:
        check_types(BestRound.__init__, locals())
        if mode is not None:
            check_choice("mode", mode, ("min", "max"), "Leave it out for the value's own.")
        self.monitor, self.mode = monitor, mode
        self._federation: Any = None

    @property
    def rounds(self) -> dict[str, int]:
        """Each client's best round, from 0, by its name."""
        federation = self._federation
        best = {} if federation is None else federation.best
        return {federation.client_names[client]: one.round for client, one in best.items()}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require validation on data that aren't the test's."""
        super().setup(trainer, pl_module, stage)
        self._federation = require_federation(trainer, self)
        self._federation.keeps_best = True
        data: Any = getattr(trainer, "datamodule", None)
        if stage == "fit" and getattr(data, "val_split", "train") == "test":
            raise MisconfigurationException(
                "Expected validation data of their own for BestRound, but got val_split='test', "
                "with which test data would choose the models. Use val_fraction=0.2."
            )

    def on_clients_evaluated(
        self, trainer: L.Trainer, module: L.LightningModule, results: ClientResults
    ) -> None:
        """Keep the models of clients that were never better."""
        if trainer.state.fn != TrainerFn.FITTING or results.split != "val":
            return
        if (evaluation := results.evaluations.get("")) is None:
            return  # other models alone, after a last round without validation
        if self.monitor not in evaluation.values:
            raise MisconfigurationException(
                f"Expected a value that `validation_step` logs, but got monitor={self.monitor!r} "
                f"and {', '.join(map(repr, evaluation.values)) or 'nothing'} logged. Use one of "
                "these."
            )
        higher = direction(self.monitor, evaluation) if self.mode is None else self.mode == "max"
        federation = self._federation
        ids = {name: client for client, name in enumerate(federation.client_names)}
        clients = torch.tensor([ids[name] for name in results.names], dtype=torch.int64)
        values = evaluation.values[self.monitor]
        keep_best(federation, clients, values, higher, results.round)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the span of the chosen rounds."""
        if rounds := self.rounds.values():
            rank_zero_info(
                f"{len(rounds)} clients use their models of the rounds {min(rounds)} to "
                f"{max(rounds)}, each the best in {self.monitor!r}."
            )
