"""Checks of the Trainer's flags, callbacks and the module's hooks for federated training.

Each setting works as in Lightning, or raises an error that names it and a remedy.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl._lightning import connected, is_overridden
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.core.checks import (
    check_choice,
    check_integer,
    check_number,
    is_integer,
    is_number,
)
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.checks import is_ours
from lightning_pfl.engine.optimizer_options import check_optimizer
from lightning_pfl.engine.select import UNPROBED, check_engine
from lightning_pfl.engine.vectorized.metrics import HOOKS
from lightning_pfl.federation.gate import MaxNorm
from lightning_pfl.federation.hooks import ESTIMATE, estimates_in
from lightning_pfl.methods.base import Method
from lightning_pfl.trainer.checkpoint_io import AtomicCheckpointIO

REFUSED_CALLBACKS: dict[type[Callback], str] = {
    StochasticWeightAveraging: "It averages one model; use a method with a server optimizer.",
    WeightAveraging: "It averages one model; use a method with a server optimizer.",
    BaseFinetuning: "It freezes layers of one model; use a method's phases, or HeadFineTuning.",
    SpikeDetection: "It checks the loss of each step; set `max_update_norm` of the strategy.",
    ModelPruning: "It prunes one model in place; prune the result of `client_module`.",
    GradientAccumulationScheduler: "Set `trainer.accumulate_grad_batches` to one number.",
    LearningRateFinder: "It trains one model; compare a few learning rates on validation data.",
    BatchSizeFinder: "It trains one model; set `batch_size` of the data, and `chunk_size`.",
}


def check_imports() -> None:
    """Warn where ``pytorch_lightning`` is imported, whose modules Lightning refuses unnamed."""
    if "pytorch_lightning" in sys.modules:
        rank_zero_warn(
            "`pytorch_lightning` is imported. Its LightningModule, Trainer and callbacks are other "
            "classes than those of `lightning`, which FederatedStrategy works with. Use "
            "`import lightning as L` for all of them."
        )


def check_strategy(
    method: object,
    engine: str,
    seed: int | None,
    chunk_size: int | None,
    max_update_norm: MaxNorm,
    client_state_device: str,
    cuda_graphs: bool,
) -> None:
    """Check the arguments of :class:`~lightning_pfl.FederatedStrategy`.

    Raises:
        TypeError: If the method is none.
        ValueError: If a setting is out of its range.
    """
    if method is not None and not isinstance(method, Method):
        raise TypeError(
            f"Expected `method` to be a federated method, but got method={method!r}. Pass an "
            "instance, such as FedAvg()."
        )
    if method is not None and not hasattr(method, "weighting"):
        raise TypeError(
            f"Expected `__init__` of {type(method).__name__} to call `super().__init__(...)`, "
            "which takes `local_epochs`, `local_steps` and `weighting`, but it does not. Add it."
        )
    check_engine(engine)
    if cuda_graphs and engine in UNPROBED:
        raise ValueError(
            "Expected engine='auto' or 'vectorized' with cuda_graphs=True, as graphs are steps of "
            f"many clients, but got engine={engine!r}. Leave out one of both."
        )
    check_choice(
        "client_state_device", client_state_device, ("auto", "device", "host"), "Use 'auto'."
    )
    if seed is not None:
        check_integer("seed", seed, 0, "Use None for that of seed_everything.")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, 1, "Use None to fit the memory.")
    if max_update_norm is not None and max_update_norm != "auto":
        advice = "Use 'auto' for one that follows the round, or None for no bound."
        check_number("max_update_norm", max_update_norm, advice, positive=True, infinite=True)


def refuse(flag: str, got: object, remedy: str) -> MisconfigurationException:
    """Make the error for a Trainer flag, with its names in Python and YAML and a remedy."""
    return MisconfigurationException(
        f"FederatedStrategy does not support `Trainer({flag}={got!r})` (`trainer.{flag}` in a "
        f"recipe). {remedy}"
    )


def check_writes_shards(plugin: CheckpointIO) -> None:
    """Require the strategy's own way to write files, for checkpoints in folders.

    Raises:
        MisconfigurationException: If the user chose a plugin.
    """
    if type(plugin) is not AtomicCheckpointIO:
        raise MisconfigurationException(
            "Expected no checkpoint plugin for state_dict_type='sharded', whose files processes "
            f"write themselves, but got {type(plugin).__name__}. Leave it out, or use "
            "state_dict_type='full'."
        )


def check_sharded(path: Any, storage_options: Any) -> None:
    """Require a path on a disk, for checkpoints in folders.

    Raises:
        MisconfigurationException: If it is a URL, or there are options for one.
    """
    if "://" in str(path) or storage_options is not None:
        raise MisconfigurationException(
            f"Expected a path on a disk for state_dict_type='sharded', but got {str(path)!r} with "
            f"{storage_options=}. Save to a disk that all processes share, or use "
            "state_dict_type='full'."
        )


def check_processes(asked: int, present: int) -> None:
    """Require the number of processes that the Trainer was asked for.

    Args:
        asked: ``devices`` times ``num_nodes``.
        present: Number of processes according to the environment (torchrun, srun, mpirun).

    Raises:
        MisconfigurationException: If the numbers differ.
    """
    if asked != present:
        raise MisconfigurationException(
            f"Expected `devices` times `num_nodes` to be the number of processes, but got {asked} "
            f"for {present} processes. Set `trainer.devices` and `trainer.num_nodes` to what "
            "torchrun, srun or mpirun starts."
        )


def check_one_process(architectures: int, processes: int) -> None:
    """Require one process for clients with different architectures.

    Raises:
        MisconfigurationException: If there are several.
    """
    if architectures > 1 and processes > 1:
        raise MisconfigurationException(
            f"Expected devices=1 for {architectures} architectures, but got {processes} processes. "
            "Use one process."
        )


def digest_clients(names: Sequence[str], num_samples: Tensor) -> str:
    """Return a short string that differs for other clients."""
    return hashlib.sha256(repr((list(names), num_samples.tolist())).encode()).hexdigest()


def check_same_clients(digests: Sequence[str]) -> None:
    """Require that all processes have loaded the same clients.

    Args:
        digests: Result of :func:`digest_clients` in each process.

    Raises:
        MisconfigurationException: If the clients of a process differ.
    """
    if other := [rank for rank, found in enumerate(digests) if found != digests[0]]:
        raise MisconfigurationException(
            "Expected all processes to load the same clients, but those of process "
            f"{other[0]} have other names or numbers of samples than those of process 0. Seed "
            "their draws, for example with seed_everything(0) at the top of the script."
        )


def check_shared_run(trainer: L.Trainer) -> None:
    """Refuse callbacks and plugins that save a checkpoint in one process alone.

    A checkpoint has all clients' states, so all processes must write it together.

    Raises:
        MisconfigurationException: If there is such a callback or plugin.
    """
    for callback in connected(trainer).callbacks:
        name = type(callback).__name__
        on_exception = getattr(callback, "save_on_exception", False)
        if isinstance(callback, OnExceptionCheckpoint) or on_exception:
            raise MisconfigurationException(
                f"FederatedStrategy can't save when {name} asks for it in one of "
                f"{trainer.world_size} processes, as all have client states. Remove {name} or its "
                "`save_on_exception=True`, and resume with ckpt_path='last' from "
                "ModelCheckpoint(save_last=True)."
            )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        raise MisconfigurationException(
            "FederatedStrategy can't save in the middle of a round of "
            f"{trainer.world_size} processes, as SLURMEnvironment(auto_requeue=True) asks. Pass "
            "Trainer(plugins=[SLURMEnvironment(auto_requeue=False)]), and resume with "
            "ckpt_path='last' from ModelCheckpoint(save_last=True)."
        )


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse flags and callbacks that have no meaning for rounds.

    Raises:
        MisconfigurationException: If there is such a flag or callback.
    """
    if connected(trainer)._val_check_time_interval is not None:
        raise refuse(
            "val_check_interval",
            connected(trainer)._val_check_time_interval,
            "Use check_val_every_n_epoch (in rounds).",
        )
    by_steps = trainer.check_val_every_n_epoch is None and isinstance(
        trainer.val_check_interval, int
    )
    if not by_steps and trainer.val_check_interval != 1:
        raise refuse(
            "val_check_interval",
            trainer.val_check_interval,
            "Use check_val_every_n_epoch in rounds, or an int with check_val_every_n_epoch=None.",
        )
    check_trainer_numbers(trainer)
    if trainer._accelerator_connector._layer_sync is not None:
        raise refuse(
            "sync_batchnorm",
            True,
            "Batch statistics belong to a client.",
        )
    for callback in connected(trainer).callbacks:
        check_callback(callback)
    if trainer.world_size > 1:
        check_shared_run(trainer)


def check_overlap(trainer: L.Trainer, device: torch.device) -> None:
    """Require a device that computes while Python goes on, and nothing that waits for values.

    Raises:
        MisconfigurationException: For a CPU, and for callbacks and schedulers that monitor a value.
    """
    expected = "with FederatedStrategy(overlap_evaluation=True)"
    if device.type == "cpu":
        raise MisconfigurationException(
            f"Expected a GPU {expected}, but the Trainer runs on 'cpu', where an evaluation has "
            "ended once Python goes on. Use Trainer(accelerator='gpu'), or leave it out."
        )
    monitors = [
        f"{type(callback).__name__}(monitor={monitor!r})"
        for callback in connected(trainer).callbacks
        # Ours get them while the federation is as it was in the validation.
        if not isinstance(callback, FederatedCallback)
        and (monitor := getattr(callback, "monitor", None)) is not None
    ]
    monitors += [
        f"{type(config.scheduler).__name__} (monitor {config.monitor!r})"
        for config in trainer.strategy.lr_scheduler_configs
        if config.reduce_on_plateau
    ]
    if monitors:
        raise MisconfigurationException(
            f"Expected nothing that decides by a round's values {expected}, which reads them once "
            f"the next round has begun, but got {', '.join(monitors)}. Leave out one of both."
        )


def check_trainer_numbers(trainer: L.Trainer) -> None:
    """Refuse numbers that Lightning doesn't check.

    Raises:
        MisconfigurationException: If a number is out of its range.
    """
    accumulate, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    if not is_integer(accumulate, 1):
        raise refuse("accumulate_grad_batches", accumulate, "Use a whole number >= 1.")
    if clip is not None and not (is_number(clip) and clip >= 0):
        raise refuse("gradient_clip_val", clip, "Use a number > 0, or None for no clipping.")
    for flag in ("check_val_every_n_epoch", "val_check_interval"):
        every = getattr(trainer, flag)
        if every is not None and every < 1:
            raise refuse(flag, every, "Use a number of rounds >= 1; limit_val_batches=0 for none.")


def check_unused(trainer: L.Trainer) -> None:
    """Refuse a new federation in a Trainer with finished rounds.

    Raises:
        MisconfigurationException: If the Trainer has finished rounds of another federation.
    """
    if trainer.global_step:
        raise MisconfigurationException(
            "Expected the module, method and clients of the Trainer's last fit, after "
            f"{trainer.global_step} rounds, but got others. Use a new Trainer."
        )


def check_kept(trainer: L.Trainer, owner: L.Trainer, rounds: int) -> None:
    """Refuse to evaluate another module in the place of trained clients, which would be lost.

    Args:
        trainer: The Trainer that evaluates.
        owner: The Trainer of the federation.
        rounds: Finished rounds of the federation.

    Raises:
        MisconfigurationException: If the clients were trained by this Trainer.
    """
    if trainer is owner and rounds:
        raise MisconfigurationException(
            "Expected the module, method and clients of the Trainer's last fit, whose clients were "
            f"trained for {rounds} rounds, but got others. Use a new Trainer for them, or pass "
            "ckpt_path to load other clients."
        )


def check_unchanged(module: L.LightningModule, changed: Sequence[str]) -> None:
    """Refuse a module into which other weights were loaded since its last round.

    Args:
        module: The module.
        changed: Names of the parameters that were changed.

    Raises:
        MisconfigurationException: If there is one.
    """
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise MisconfigurationException(
            f"Expected {type(module).__name__} as its last round left it, but `{changed[0]}`{more} "
            "was changed since, and this Trainer has a trained model of each client. Use a new "
            "Trainer to start from the module, or pass ckpt_path to go back to a checkpoint."
        )


class ModuleAtStart:
    """The module with which a fit or a round begins, to notice changes that reach no client.

    Args:
        splits: The parameter split of each architecture.
        module: The Trainer's module.
        callbacks: Its callbacks.
    """

    def __init__(
        self,
        splits: Sequence[ParameterSplit],
        module: L.LightningModule,
        callbacks: Sequence[Callback],
    ) -> None:
        self._splits = splits
        self._layers = [_layers(split) for split in splits]
        # Others leave a module as it is.
        hooks = any(is_overridden(hook, module) for hook in HOOKS)
        self._hooked = hooks or not all(map(is_ours, callbacks))
        self._models: list[Model] = [split.model() for split in splits] if self._hooked else []

    def renew(self) -> None:
        """Take the model as it is now for that with which a round begins."""
        for split, model in zip(self._splits, self._models, strict=False):
            module = split.module
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, old in model.items():
                old.copy_(tensors[name].detach())  # into the same memory, round after round

    def check(self) -> None:
        """Refuse what hooks have frozen, unfrozen or replaced, and what they have written.

        Raises:
            MisconfigurationException: Names the parameter or the buffer.
        """
        for split, layers in zip(self._splits, self._layers, strict=True):
            now = {name for name, leaf in split.module.named_parameters() if leaf.requires_grad}
            if other := sorted(now ^ set(split.trainable)):
                raise _changed(split.module, other[0], "frozen or unfrozen")
            for name, layer in _layers(split).items():
                if layer is not layers[name]:  # in which engines put no client's tensors
                    raise _changed(split.module, name, "put into another layer")
        self.check_values()

    def check_values(self) -> None:
        """Refuse what hooks have written.

        Raises:
            MisconfigurationException: Names the parameter or the buffer.
        """
        for split, before in zip(self._splits, self._models, strict=False):
            module = split.module
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            kinds = {name: (leaf.shape, leaf.dtype) for name, leaf in tensors.items()}
            for name, old in before.items():
                if kinds.get(name) != (old.shape, old.dtype):
                    raise _changed(module, name, "replaced")
            pairs = {name: (tensors[name].detach(), old) for name, old in before.items()}
            # One wait for a device. A NaN isn't equal to itself, so a difference is looked at.
            if pairs and torch.stack([now.eq(old).all() for now, old in pairs.values()]).all():
                continue
            for name, (now, old) in pairs.items():
                if not torch.allclose(now, old, rtol=0, atol=0, equal_nan=True):
                    raise _changed(module, name, "changed")


def _layers(split: ParameterSplit) -> dict[str, Any]:
    """Find the layer of each entry of a model, and of its further names."""
    layers = dict(split.module.named_modules())
    names = (*split.names, *split.aliases)
    return {name: layers.get(name.rpartition(".")[0]) for name in names}


def _changed(module: Any, name: str, how: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"Expected the model of {type(module).__name__} to stay as it was in `setup`, or as a "
        f"round left it, but `{name}` was {how} in a later hook, of which no client would hear. Do "
        "so in `__init__`, `configure_model` or `setup`; for what isn't a client's take a buffer "
        "outside of the model, `register_buffer(..., persistent=False)`."
    )


def check_flags_stay(trainer: L.Trainer, settings: EngineSettings) -> None:
    """Refuse flags of local training that a hook has changed during a fit.

    Args:
        trainer: The Trainer.
        settings: Those with which the fit began.

    Raises:
        MisconfigurationException: If one was.
    """
    began = {
        "gradient_clip_val": settings.clip_value,
        "accumulate_grad_batches": settings.accumulate,
    }
    for flag, value in began.items():
        if (now := getattr(trainer, flag)) != value:
            raise MisconfigurationException(
                f"Expected `trainer.{flag}` to stay {value} during a fit, but a hook has set it to "
                f"{now}, of which no client would hear. Set it before `fit`; clip by a number that "
                "changes in `configure_gradient_clipping`."
            )


def check_estimates(module: L.LightningModule) -> None:
    """Require that a module asks in ``configure_optimizers`` alone for the steps of a run.

    Raises:
        MisconfigurationException: If it does elsewhere.
    """
    if found := [name for name in estimates_in(module) if name != "configure_optimizers"]:
        raise MisconfigurationException(
            f"Expected `trainer.{ESTIMATE}` to be read in `configure_optimizers`, but "
            f"`{found[0]}` of {type(module).__name__} reads it, where it counts clients or "
            f"minibatches. Keep it in an attribute there: `self.total = self.trainer.{ESTIMATE}`."
        )


def check_finite(module: L.LightningModule) -> None:
    """Require finite initial parameters.

    Raises:
        MisconfigurationException: If one isn't.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise MisconfigurationException(
                "Expected a module with finite initial parameters, but "
                f"{type(module).__name__} has a NaN or an infinity in {name}. Check its "
                "initialisation, or the loaded checkpoint."
            )


def check_callback(callback: Callback) -> None:
    """Refuse a callback that works on one model's training, or that could lose a checkpoint.

    Raises:
        MisconfigurationException: If it is one.
    """
    name = type(callback).__name__
    if not isinstance(callback, Callback):
        raise MisconfigurationException(
            f"Expected callbacks of `lightning`, but {name} is one of {type(callback).__module__}. "
            "Use `import lightning as L` and `lightning.pytorch` in the place of "
            "`pytorch_lightning`, whose classes are others."
        )
    for kind, remedy in REFUSED_CALLBACKS.items():
        if isinstance(callback, kind):
            raise MisconfigurationException(
                f"FederatedStrategy does not support the callback {name}. {remedy}"
            )
    if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
        raise MisconfigurationException(
            f"FederatedStrategy does not support {name}(save_last='link'), which can lose the last "
            "checkpoint if the run is killed. Use save_last=True."
        )


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Require optimizers of which every client can get fresh copies.

    Raises:
        TypeError: If one can't be copied for clients; see :func:`check_optimizer`.
    """
    for optimizer in optimizers:
        check_optimizer(optimizer)


def check_trains(module: L.LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Require optimizers that hold parameters of the module.

    Raises:
        MisconfigurationException: If they hold none that trains.
    """
    trained = {
        id(leaf) for one in optimizers for group in one.param_groups for leaf in group["params"]
    }
    ours = [leaf for leaf in module.parameters() if leaf.requires_grad]
    if ours and not any(id(leaf) in trained for leaf in ours):
        raise MisconfigurationException(
            f"Expected `configure_optimizers` of {type(module).__name__} to return an optimizer of "
            f"its parameters, but {type(optimizers[0]).__name__} holds none of them. Make it with "
            "self.parameters()."
        )


def check_keeps_optimizers(method: Method, keeps: bool) -> None:
    """Refuse to keep optimizer states for a method in which they would mean nothing.

    Raises:
        MisconfigurationException: If they are to be kept.
    """
    why = method.fresh_optimizer
    if method.measures_travel:
        why = "it measures how far an optimizer goes that begins at rest"
    if keeps and why:
        raise MisconfigurationException(
            f"Expected keep_optimizer_state=False for {type(method).__name__}, as {why}, but got "
            "True. Leave it out."
        )


def check_architectures(optimizers: Sequence[Sequence[Optimizer]]) -> None:
    """Require one optimizer for each of several architectures.

    Args:
        optimizers: Those of each architecture.

    Raises:
        MisconfigurationException: If one of several architectures has several.
    """
    most = max(map(len, optimizers))
    if len(optimizers) > 1 and most > 1:
        raise MisconfigurationException(
            f"Expected one optimizer for each of {len(optimizers)} architectures, but "
            f"`configure_optimizers` returned {most} optimizers. Use one module for all clients."
        )
