"""Processes under torchrun or SLURM, on two nodes or one killed, end with the bits of one."""

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


Start = tuple[list[str], dict[str, str]]
"""The first words of a command, and its environment."""


def torchrun(nodes: int, port: int) -> list[Start]:
    """Start two processes on each node."""
    words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
    words += ["--nproc-per-node=2", "--max-restarts=3"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    # Else restarted processes find the addresses of dead ones in torchrun's store.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [([*words, f"--node-rank={number}"], environment) for number in range(nodes)]


def slurm(nodes: int, port: int) -> list[Start]:
    """Be the tasks that `srun --ntasks-per-node=2` starts."""
    environment = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "fit",
        "SLURM_NTASKS": f"{2 * nodes}",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": f"{nodes}",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    places = [
        {"SLURM_PROCID": f"{k}", "SLURM_LOCALID": f"{k % 2}", "SLURM_NODEID": f"{k // 2}"}
        for k in range(2 * nodes)
    ]
    return [([sys.executable], {**environment, **place}) for place in places]


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(
    ("launcher", "nodes", "killed"),
    [("torchrun", 2, False), ("torchrun", 1, True), ("torchrun", 2, True), ("slurm", 2, False)],
)
def test_processes_end_with_the_bits_of_one(
    launcher: str, nodes: int, killed: bool, tmp_path: Path
) -> None:
    one, two, marker = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    cli = PFLCLI(recipe(one, "SCAFFOLD"), run=False, save_config_callback=None)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    kill = {"class_path": f"{__name__}.KillOnce", "init_args": {"marker": str(marker)}}
    path, port = tmp_path / "recipe.yaml", free_port()
    path.write_text(yaml.safe_dump(recipe(two, "SCAFFOLD", *([kill] if killed else []))))
    command = ["-m", "lightning_pfl", "fit", "--config", str(path), "--ckpt_path", "last"]
    command += ["--config", str(ROOT / "configs" / "trainer" / "resume.yaml")]
    command += ["--trainer.devices=2", f"--trainer.num_nodes={nodes}"]
    if launcher == "slurm":
        plugin = "lightning.fabric.plugins.environments.SLURMEnvironment"
        command += [f"--trainer.plugins+={plugin}", "--trainer.plugins.auto_requeue=false"]
    starts = torchrun(nodes, port) if launcher == "torchrun" else slurm(nodes, port)
    running = [
        subprocess.Popen(
            [*start, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for start, environment in starts
    ]
    try:
        told = [node.communicate(timeout=1200)[0].decode() for node in running]
    finally:
        for node in running:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
    assert {node.returncode for node in running} == {0}, "\n".join(each[-3000:] for each in told)
    assert marker.exists() == killed
    expected, found = (
        torch.load(folder / "last.ckpt", weights_only=True)["federated"] for folder in (one, two)
    )
    for part in ("server", "client_states"):
        ours, theirs = named_leaves(expected[part]), named_leaves(found[part])
        assert ours.keys() == theirs.keys()
        assert [name for name, leaf in ours.items() if not torch.equal(leaf, theirs[name])] == []
    assert found["rounds"] == expected["rounds"] == 4
