"""FreshDataModule: new training samples in every round."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pfl.data.datamodule import FederatedDataModule
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.data.sources.base import FreshSource


class FreshDataModule(FederatedDataModule):
    """A data module that draws new training samples in every round.

    A round's samples are ``source.draw(round)``, a function of the source's seed and the round, so
    all methods and resumed runs see the same ones. Lightning fetches them in every round, which
    needs ``Trainer(reload_dataloaders_every_n_epochs=1)``. Evaluation or adaptation on training
    data between two rounds uses the samples of the round before. Test samples and new clients'
    samples stay.

    Args:
        source: A source that can draw samples; it names their clients.
        num_clients: Number of clients, new ones included. None: that of the source.
        batch_size: Samples per training batch of a client.
        eval_batch_size: Samples per batch of a client in evaluation.
        seed: Has no effect on the samples, which depend on the source's seed.
        new_clients: Number of clients, the last ones, that never take part.
        val_split: ``"train"``: no validation data; ``"test"``: validation uses the test split.

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

    def keep_clients(self, names: Collection[str]) -> None:
        """Keep all: a round's samples are new, and the loops keep some of them."""

    def train_dataloader(self) -> FederatedTensorDataset:
        """Return the training data of the current round, or of round 0 outside of a run."""
        trainer: Any = self.trainer
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fitting and trainer.reload_dataloaders_every_n_epochs != 1:
            raise MisconfigurationException(
                "Expected Trainer(reload_dataloaders_every_n_epochs=1) for FreshDataModule, but "
                "got reload_dataloaders_every_n_epochs="
                f"{trainer.reload_dataloaders_every_n_epochs}. Set it to 1, or use "
                "FederatedDataModule for the same samples in all rounds."
            )
        data = copy.copy(super().train_dataloader())
        source: Any = self.source
        fields = source.draw(trainer.current_epoch if trainer is not None else 0)
        if len(fields[0]) != data.pool_size:
            raise ValueError(
                f"Expected `draw` of {type(source).__name__} to return {data.pool_size} samples, "
                f"as `load` does, but got {len(fields[0])}. Draw the same number in every round."
            )
        data.fields = tuple(torch.as_tensor(leaf) for leaf in fields)
        return data
