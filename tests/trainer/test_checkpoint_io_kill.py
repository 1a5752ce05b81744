"""A run that is killed at random moments, also while it writes a checkpoint, ends with the bits of
one that isn't."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pfl.core.tree import leaves
from lightning_pfl.methods import FedRep
from tests.trainer.run_to_kill import ROUNDS, main
from tests.trainer.setting import classes, network, trainer

# The kills of the thorough test; fewer for a quick look.
KILLS = int(os.environ.get("LIGHTNING_PFL_KILLS", "30"))


def start(folder: Path) -> Any:
    """Start the run from a process that has imported what it needs, once for all runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__])
    process = context.Process(target=main, args=(folder,))
    process.start()
    return process


def files(folder: Path) -> dict[Path, int]:
    found = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it was renamed in between
            found[path] = path.stat().st_mtime_ns
    return found


def kill(folder: Path, delay: float) -> bool:
    """Start the run, kill it some seconds after it has written something; whether it still ran."""
    before, process = files(folder), start(folder)
    while process.is_alive() and files(folder) == before:
        time.sleep(0.001)
    time.sleep(delay)
    running: bool = process.is_alive()
    process.kill()
    process.join()
    return running


def finish(folder: Path) -> None:
    process = start(folder)
    process.join()
    assert process.exitcode == 0


def assert_final_equals_uninterrupted(folder: Path) -> None:
    whole = trainer(FedRep(head_epochs=1), participation=3, engine="sequential", max_epochs=ROUNDS)
    whole.fit(network(), *classes())
    final = torch.load(folder / "final.pt", weights_only=True)
    for mine, theirs in (
        (whole.strategy.server, final["server"]),
        (whole.strategy.federation.client_states.tree, final["client_states"]),
    ):
        pairs = list(zip(leaves(mine), leaves(theirs), strict=True))
        assert pairs
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, KILLS])
def test_a_killed_run_ends_like_an_uninterrupted_one(kills: int, tmp_path: Path) -> None:
    delays = random.Random(0)
    done = 0
    while done < kills:
        folder = tmp_path / f"run{done}"
        folder.mkdir()
        # Kill the same run several times on its way; a run that was too fast doesn't count.
        for _ in range(min(5, kills - done)):
            done += kill(folder, delays.uniform(0, 0.15))
            for checkpoint in folder.glob("*.ckpt"):
                torch.load(checkpoint, weights_only=True)  # complete, whatever moment it was
        finish(folder)
        assert_final_equals_uninterrupted(folder)


def test_the_run_saves_every_round(tmp_path: Path) -> None:
    run = trainer(
        FedRep(),
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path, save_last=True)],
    )
    run.fit(network(), *classes())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
