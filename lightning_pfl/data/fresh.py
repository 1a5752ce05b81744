"""FreshDataModule: clients that draw new training samples for every round."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pfl.data.datamodule import FederatedDataModule
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.data.sources.base import FreshSource


class FreshDataModule(FederatedDataModule):
    """A data module whose training samples are those of the round, and of no other.

    A round's samples come from ``source.draw(round)``, a function of the source's seed and the
    round, so that all methods see the same ones and a resumed run goes on with those that it would
    have had. Lightning fetches them in every round, which takes the Trainer's flag
    ``reload_dataloaders_every_n_epochs=1``. What is evaluated or adapted between two rounds on
    training data uses those of the round before. Test samples and new clients' samples stay.

    Args:
        source: Where the samples come from; it names their clients.
        num_clients: Number of clients, new ones included. None: as the source says.
        batch_size: Samples per training batch of a client.
        eval_batch_size: Samples per batch of a client in evaluation.
        seed: Has no effect on the samples, which the source's seed decides.
        new_clients: The last so many clients never take part.
        val_split: ``"train"``: there are no validation data; ``"test"``: the test split serves.

    Raises:
        MisconfigurationException: At the start of a fit without that flag.

    Example:
        >>> from lightning_pfl.data import LinearRepresentation
        >>> FreshDataModule(LinearRepresentation(num_clients=10)).num_clients
        10
    """

    def __init__(
        self,
        source: FreshSource,
        num_clients: int | None = None,
        batch_size: int = 10,
        eval_batch_size: int = 256,
        seed: int = 0,
        new_clients: int = 0,
        val_split: Literal["train", "test"] = "train",
    ) -> None:
        super().__init__(
            source,
            num_clients=num_clients,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            seed=seed,
            new_clients=new_clients,
            val_split=val_split,
        )

    def train_dataloader(self) -> FederatedTensorDataset:
        """Return the training data of the running round; of round 0 outside of a run."""
        trainer: Any = self.trainer
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fitting and trainer.reload_dataloaders_every_n_epochs != 1:
            raise MisconfigurationException(
                "Expected Trainer(reload_dataloaders_every_n_epochs=1), as FreshDataModule has "
                "other "
                "samples for every round, but got reload_dataloaders_every_n_epochs="
                f"{trainer.reload_dataloaders_every_n_epochs}. In YAML: "
                "trainer.reload_dataloaders_every_n_epochs: 1. For the same samples in all rounds "
                "there is FederatedDataModule."
            )
        data = copy.copy(super().train_dataloader())
        source: Any = self.source
        fields = source.draw(trainer.current_epoch if trainer is not None else 0)
        if len(fields[0]) != data.pool_size:
            raise ValueError(
                f"Expected `draw` of {type(source).__name__} to give {data.pool_size} samples, as "
                f"many as `load`, but got {len(fields[0])}. Draw the same number in every round."
            )
        data.fields = tuple(torch.as_tensor(leaf) for leaf in fields)
        return data
