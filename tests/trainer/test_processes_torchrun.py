"""Processes under torchrun, on two nodes or one of them killed, end with the bits of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_pfl.cli import PFLCLI
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import Round
from lightning_pfl.core.tree import named_leaves
from lightning_pfl.deploy.processes import free_port

ROOT = Path(__file__).parents[2]


class KillOnce(FederatedCallback):
    """Kills the last process in round 2, in the middle of its work, once.

    Args:
        marker: A file that says that it is done.
    """

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def on_local_training_end(self, trainer: Any, module: Any, round: Round) -> None:
        if (
            trainer.global_rank == trainer.world_size - 1
            and round.number == 2
            and not self.marker.exists()
        ):
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def recipe(folder: Path, method: str, *callbacks: dict[str, Any]) -> dict[str, Any]:
    checkpoint = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": str(folder), "save_last": True, "every_n_epochs": 1},
    }
    return {
        "seed_everything": 3,
        "method": {"class_path": method},
        "model": {"class_path": "MLP", "init_args": {"sizes": [64, 8, 10], "lr": 0.05}},
        "data": {
            "class_path": "FederatedDataModule",
            "init_args": {
                "source": {"class_path": "Digits"},
                "num_clients": 8,
                "batch_size": 32,
                "val_fraction": 0.2,
            },
        },
        "trainer": {
            "max_epochs": 4,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "strategy": {
                "class_path": "FederatedStrategy",
                "init_args": {"participation": 0.75, "engine": "sequential"},
            },
            "callbacks": [checkpoint, *callbacks],
        },
    }


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(("nodes", "killed"), [(2, False), (1, True), (2, True)])
def test_processes_end_with_the_bits_of_one(nodes: int, killed: bool, tmp_path: Path) -> None:
    one, two, marker = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    cli = PFLCLI(recipe(one, "SCAFFOLD"), run=False, save_config_callback=None)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    kill = {"class_path": f"{__name__}.KillOnce", "init_args": {"marker": str(marker)}}
    path, port = tmp_path / "recipe.yaml", free_port()
    path.write_text(yaml.safe_dump(recipe(two, "SCAFFOLD", *([kill] if killed else []))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Else restarted processes find the addresses of dead ones in torchrun's store.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    running = []
    for number in range(nodes):
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
        launcher += ["--nproc-per-node=2", f"--node-rank={number}", "--max-restarts=3"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command = ["-m", "lightning_pfl", "fit", "--config", str(path), "--ckpt_path", "last"]
        command += ["--config", str(ROOT / "configs" / "trainer" / "resume.yaml")]
        command += ["--trainer.devices=2", f"--trainer.num_nodes={nodes}"]
        running.append(
            subprocess.Popen(
                [*launcher, *command],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    try:
        told = [node.communicate(timeout=1200)[0].decode() for node in running]
    finally:
        for node in running:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
    assert [node.returncode for node in running] == [0] * nodes, "\n".join(
        each[-3000:] for each in told
    )
    assert marker.exists() == killed
    expected, found = (
        torch.load(folder / "last.ckpt", weights_only=True)["federated"] for folder in (one, two)
    )
    for part in ("server", "client_states"):
        ours, theirs = named_leaves(expected[part]), named_leaves(found[part])
        assert ours.keys() == theirs.keys()
        assert [name for name, leaf in ours.items() if not torch.equal(leaf, theirs[name])] == []
    assert found["rounds"] == expected["rounds"] == 4
