"""A FedRep run that resumes itself: started by test_checkpoint_io_kill.py, and killed by it."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pfl.methods import FedRep
from tests.trainer.setting import classes, network, trainer

ROUNDS = 12


def main(folder: Path) -> None:
    """Run, or go on, to the end, and write FOLDER/final.pt there."""
    torch.set_num_threads(1)  # as in the tests
    run = trainer(
        FedRep(head_epochs=1),
        participation=3,
        engine="sequential",
        max_epochs=ROUNDS,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
    )
    run.fit(network(), *classes(), ckpt_path="last")
    final = {
        "server": run.strategy.server,
        "client_states": run.strategy.federation.client_states.tree,
    }
    torch.save(final, folder / "unfinished.pt")
    (folder / "unfinished.pt").replace(folder / "final.pt")
