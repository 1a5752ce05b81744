"""Training of one new client in Lightning's own loop, for modules with code inside a step."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.federation.checkpoint import load_optimizer
from lightning_pfl.methods.base import Method, Phase


class SavedRates(L.Callback):
    """Sets learning rates before the first step.

    Args:
        saved: Class name and state of each optimizer; empty for none.
        lr: One learning rate for all; None keeps them.
    """

    def __init__(self, saved: Sequence[tuple[str, dict[str, Any]]], lr: float | None) -> None:
        self.saved, self.lr = saved, lr

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the settings."""
        for optimizer, (kind, state) in zip(trainer.optimizers, self.saved, strict=False):
            load_optimizer(optimizer, kind, state)
        for optimizer in trainer.optimizers if self.lr is not None else ():
            for group in optimizer.param_groups:
                group["lr"] = self.lr


def check_adapts_alone(method: Method) -> None:
    """Raise MisconfigurationException for a method whose new clients take steps of their own."""
    if type(method).adaptation_step is not Method.adaptation_step:
        raise MisconfigurationException(
            f"Expected a module without code inside a step for {type(method).__name__}, whose new "
            "clients take steps of their own. Use scope='head' with a method such as FedAvg or "
            "FedRep, or leave out the module's hooks."
        )


def train_alone(
    module: L.LightningModule,
    train: Collection[str],
    data: FederatedDataset,
    phase: Phase,
    saved: Sequence[tuple[str, dict[str, Any]]],
    seed: int,
) -> L.LightningModule:
    """Train some entries of a module as ``Trainer.fit`` does; all others stay as they are.

    Args:
        module: The module with the starting model; it is changed.
        train: Names of the entries that train.
        data: The client's data.
        phase: Length and learning rate.
        saved: Settings of the optimizers in the checkpoint, by class name.
        seed: Seed of the order of samples and of random layers.
    """
    before = {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}
    trainable = {name: p.requires_grad for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable[name] and name in train)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1 if phase.epochs is None else int(phase.epochs),  # type: ignore[arg-type]
        max_steps=-1 if phase.steps is None else int(phase.steps),  # type: ignore[arg-type]
        callbacks=[SavedRates(saved, phase.lr)],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with (
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),
        seeded(derive(seed, "new clients"), everything=True),
    ):
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*but have no `val_dataloader`.*")
        trainer.fit(module, _loader(data))
    module.trainer = None
    kept = {name: leaf for name, leaf in before.items() if name not in train}
    module.load_state_dict({**module.state_dict(), **kept})
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable[name])
    return module


def _loader(data: FederatedDataset) -> DataLoader[Any]:
    """Return the only client's DataLoader."""
    if not isinstance(data, FederatedTensorDataset):
        return data.loaders[0]
    positions: Any = data.indices[0].tolist()
    if data.drop_last == "single" and len(positions) % data.batch_size == 1:
        raise MisconfigurationException(
            "Expected a DataLoader for a module with code inside a step, but got data with "
            "drop_last='single'. Use another batch size."
        )

    def collect(rows: list[int]) -> Any:
        batch = data.gather(torch.tensor(rows))
        return batch if data.augment is None else data.augment(batch)

    return DataLoader(
        positions,
        batch_size=data.batch_size,
        shuffle=data.shuffle,
        drop_last=data.drop_last is True,
        collate_fn=collect,
    )
