"""The processes of a federated strategy: start and communication."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchmetrics import Metric

from lightning_pfl._lightning import (
    SubprocessScriptLauncher,
    connect_processes,
    default_backend,
    notice_termination,
    reduce_tensor,
    set_rank_for_messages,
)
from lightning_pfl.federation.presence import SILENCE, Presence
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.trainer import checks as flags

TIMEOUT = timedelta(minutes=30)
"""Timeout of collective calls, torch's default."""


class ProcessesStrategy(ParallelStrategy):
    """One process per device, as in Lightning's DDP, but without its wrapper around the module.

    Several processes are started by running the script again for each device, or by torchrun,
    SLURM and others. One process starts nothing and joins nothing.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As for
            every Lightning strategy.
        process_group_backend: Backend of torch.distributed; None: NCCL for GPUs, else Gloo.
        timeout: How long a process waits for the others before the run ends with an error.

    Attributes:
        ranks: The processes of the run.
        silence: Time without a sign of life after which a process counts as stopped; with Gloo.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: timedelta,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ValueError(
                f"Expected `timeout` to be a timedelta above 0, but got {timeout=}. Use "
                "datetime.timedelta(minutes=30), for example."
            )
        self.num_nodes = 1
        self.process_group_backend, self.timeout = process_group_backend, timeout
        self.silence = SILENCE
        self.ranks = Ranks()

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes * self.num_nodes > 1

    @property
    def root_device(self) -> torch.device:
        """Device that this process's clients train on."""
        assert self.parallel_devices
        return self.parallel_devices[self.local_rank if self.is_distributed else 0]

    def set_world_ranks(self) -> None:
        """Set this process's rank in the environment and for messages."""
        if not self.is_distributed:
            return
        assert self.cluster_environment is not None
        rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        set_rank_for_messages(self.global_rank)

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            assert self.cluster_environment is not None
            self._launcher = SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def setup_environment(self) -> None:
        """Set up the device, and join the process group."""
        assert self.cluster_environment is not None
        flags.check_processes(
            self.num_processes * self.num_nodes, self.cluster_environment.world_size()
        )
        super().setup_environment()
        if self.is_distributed:
            self.set_world_ranks()
            backend = self.process_group_backend or default_backend(self.root_device)
            connect_processes(self.cluster_environment, backend, timeout=self.timeout)
            # Lightning does so for nccl only; running gloo threads can abort the exit.
            atexit.unregister(leave_processes)
            atexit.register(leave_processes)
            where = self.cluster_environment.main_address, self.cluster_environment.main_port
            store = partial(TCPStore, *where, is_master=False, wait_for_workers=False)
            presence = None
            if backend == "gloo":
                presence = Presence(*where, self.global_rank, self.world_size, self.silence)
                atexit.register(presence.end)  # before the connections close
            self.ranks = Ranks(self.global_rank, self.world_size, self.root_device, presence, store)

    def setup(self, trainer: L.Trainer) -> None:
        """Set up the module and its optimizers."""
        if self.is_distributed:
            notice_termination(trainer)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the module to the device; every process gets that of process 0."""
        assert self.model is not None
        self.model.to(self.root_device)
        self.ranks.broadcast_module(self.model)

    def reduce(self, tensor: Any, architecture: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over processes, for values that users log with ``sync_dist=True``."""
        if not self.is_distributed or not isinstance(tensor, Tensor):
            return tensor
        return reduce_tensor(tensor, architecture, reduce_op=reduce_op)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other processes."""
        if self.is_distributed and distributed.is_initialized():
            by_gpu = distributed.get_backend() == "nccl"
            self.ranks.call(
                distributed.barrier, device_ids=[self.root_device.index] if by_gpu else None
            )

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object of one process to all."""
        if not self.is_distributed or not distributed.is_initialized():
            return obj
        return self.ranks.broadcast_object(obj, src)


def leave_processes() -> None:
    """End the process group and its threads."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


# --- metrics --------------------------------------------------------------------------------------


def not_distributed() -> bool:
    """Return False, for torchmetrics objects of one client, which aren't distributed."""
    return False


def keep_metrics_apart(module: nn.Module) -> Callable[[], None]:
    """Keep metrics of a client in its process, where torchmetrics would reduce over processes.

    Returns:
        A function that undoes it.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    before = [metric.distributed_available_fn for metric in metrics]
    for metric in metrics:
        metric.distributed_available_fn = not_distributed

    def undo() -> None:
        for metric, function in zip(metrics, before, strict=True):
            metric.distributed_available_fn = function

    return undo
