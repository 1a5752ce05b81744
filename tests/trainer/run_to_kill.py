"""A FedRep run that resumes itself: started by test_kill.py, and killed by it.

Usage: python run_to_kill.py FOLDER. Writes FOLDER/final.pt when it gets to the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pfl.methods import FedRep
from tests.trainer.setting import classes, network, trainer

ROUNDS = 12


def main(folder: Path) -> None:
    """Run, or go on, to the end."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
