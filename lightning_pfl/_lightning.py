"""Lightning's private names for the training loops, imported in this file only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as connect_processes
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_tensor
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
    _validate_multiple_optimizers_support,
    _validate_optimizers_attached,
    _validate_scheduler_api,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.loops.utilities import _no_grad_context as no_grad_context
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies.launchers import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.call import (
    _call_callback_hooks,
    _call_lightning_datamodule_hook,
    _call_lightning_module_hook,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection as ResultCollection,
)
from lightning.pytorch.utilities.data import _update_dataloader as with_sampler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "ClientHooks",
    "ConnectedTrainer",
    "DataHolder",
    "EvaluationLoop",
    "FitLoop",
    "Loop",
    "PredictionLoop",
    "ResultCollection",
    "SubprocessScriptLauncher",
    "TrainingEpochLoop",
    "WrappingCheckpointIO",
    "call_batch_hook",
    "call_hooks",
    "call_module_hook",
    "close_step",
    "connect_processes",
    "connected",
    "copy_apart",
    "count_server_update",
    "default_backend",
    "forget_metrics",
    "is_interrupt",
    "is_overridden",
    "log_directly",
    "log_settings",
    "log_values",
    "no_grad_context",
    "notice_termination",
    "open_step",
    "optimizer_steps",
    "path_of_last",
    "publish_round",
    "read_optimizers",
    "reduce_tensor",
    "remember_metrics",
    "send_round",
    "send_without_clutter",
    "set_rank_for_messages",
    "set_rounds",
    "step_schedulers",
    "stop_if_terminated",
    "take_over",
    "validates_after_round",
    "with_sampler",
]
LoopT = TypeVar("LoopT", bound=Loop)


class ConnectedTrainer(L.Trainer):
    """The Trainer with the attributes that its connectors set, for annotations."""

    callbacks: list[Callback]
    datamodule: L.LightningDataModule | None
    fast_dev_run: bool | int
    overfit_batches: int | float
    profiler: Profiler
    reload_dataloaders_every_n_epochs: int
    _val_check_time_interval: float | None


def connected(trainer: L.Trainer) -> ConnectedTrainer:
    """Return the same Trainer, typed with the attributes that its connectors set."""
    return cast("ConnectedTrainer", trainer)


class DataHolder:
    """A replacement of ``CombinedLoader`` in loops; ``trainer.train_dataloader`` is ``iterables``.

    Args:
        data: The federated dataset of a split.
    """

    _mode = "sequential"

    def __init__(self, data: Any) -> None:
        self.iterables = data
        self.flattened = [data]


def take_over(kind: type[LoopT], old: Loop) -> LoopT:
    """Make a loop of another kind with an old loop's limits, data source and progress."""
    new = kind.__new__(kind)
    new.__dict__.update(old.__dict__)
    return new


# --- hooks ----------------------------------------------------------------------------------------


def call_hooks(trainer: L.Trainer, name: str, *args: Any, monitoring: bool | None = None) -> None:
    """Fire a hook on the callbacks and then the module, in Lightning's order.

    Args:
        trainer: The running Trainer.
        name: Name of the hook.
        *args: The hook's arguments after ``trainer`` and ``module``.
        monitoring: As in Lightning: callbacks that monitor values (True), the others (False, and
            then the module), or all.
    """
    _call_callback_hooks(trainer, name, *args, monitoring_callbacks=monitoring)
    if monitoring is not True:
        _call_lightning_module_hook(trainer, name, *args)


def call_module_hook(trainer: L.Trainer, name: str, *args: Any) -> Any:
    """Call a hook of the module only, and return its result."""
    return _call_lightning_module_hook(trainer, name, *args)


def call_batch_hook(trainer: L.Trainer, module: L.LightningModule, name: str, *args: Any) -> Any:
    """Call a hook on a batch: the data module's, if it has one, else the module's."""
    if (data := connected(trainer).datamodule) is not None and is_overridden(name, data):
        return _call_lightning_datamodule_hook(trainer, name, *args)
    return _call_lightning_module_hook(trainer, name, *args, pl_module=module)


ONCE_A_ROUND = (Timer, LearningRateMonitor, DeviceStatsMonitor)
"""Callbacks that say or log something for a step of the Trainer, which is a round.

Those of a subclass do, too, in the hooks that it leaves as they are.
"""


class ClientHooks:
    """Fires a per-batch hook on objects that override it.

    With a thousand clients in an evaluation, calling empty methods of every callback costs more
    than the evaluation.

    Args:
        trainer: The running Trainer.
        name: Name of the hook, such as ``"on_validation_batch_end"``.
        of_module: Whether the module's is one of them.
    """

    def __init__(self, trainer: L.Trainer, name: str, of_module: bool = True) -> None:
        self.trainer, self.name = trainer, name
        self.callbacks: list[Any] = [
            c for c in connected(trainer).callbacks if overrides(c, name, Callback)
        ]
        self._at_last = {id(c) for c in self.callbacks if _acts_once(c, name)}
        self.on_module = of_module and is_overridden(name, trainer.lightning_module)

    def __bool__(self) -> bool:
        """Whether anything overrides the hook."""
        return bool(self.callbacks) or self.on_module

    @property
    def may_write(self) -> bool:
        """Whether any may change what the module's steps read, unlike bars and checkpoints."""
        return self.on_module or not all(_only_reads(one, self.name) for one in self.callbacks)

    def __call__(self, *args: Any, last: bool) -> Any:
        """Fire the hook, and return the result of the module's.

        Args:
            *args: The hook's arguments after ``trainer`` and ``module``.
            last: Whether this is the last client, at whom callbacks of :data:`ONCE_A_ROUND` act.
        """
        if not self:
            return None
        module: Any = self.trainer.lightning_module
        before, module._current_fx_name = module._current_fx_name, self.name
        for callback in self.callbacks:
            if not last and id(callback) in self._at_last:
                continue
            with connected(self.trainer).profiler.profile(
                f"[Callback]{callback.state_key}.{self.name}"
            ):
                getattr(callback, self.name)(self.trainer, module, *args)
        module._current_fx_name = before
        return (
            _call_lightning_module_hook(self.trainer, self.name, *args) if self.on_module else None
        )


def _acts_once(callback: Any, name: str) -> bool:
    """Whether a callback's hook is that of a class of :data:`ONCE_A_ROUND`."""
    kinds = (kind for kind in ONCE_A_ROUND if isinstance(callback, kind))
    return any(not overrides(callback, name, kind) for kind in kinds)


def _only_reads(callback: Any, name: str) -> bool:
    """Whether a callback's hook is a progress bar's, or a checkpoint's that writes none there."""
    kind = type(callback)
    if name in vars(callback):
        return False
    if kind is ModelCheckpoint:
        return callback._every_n_train_steps < 1 and callback._train_time_interval is None
    return kind in (TQDMProgressBar, RichProgressBar)


def overrides(instance: object, name: str, parent: type) -> bool:
    """Whether an object overrides a method of ``parent``."""
    return name in vars(instance) or getattr(type(instance), name, None) is not getattr(
        parent, name
    )


# --- processes ------------------------------------------------------------------------------------


def set_rank_for_messages(rank: int) -> None:
    """Silence ``rank_zero_info`` and others in all processes but one."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def notice_termination(trainer: L.Trainer) -> None:
    """Record a SIGTERM until the end of the round, and pass it on to the processes started here.

    Lightning's handler also broadcasts, which can deadlock with the processes' other collective
    calls.
    """
    connector = trainer._signal_connector

    def notice(signum: Any, _: Any) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = notice  # type: ignore[method-assign]


# --- counters -------------------------------------------------------------------------------------


def count_server_update(loop: FitLoop) -> None:
    """Advance ``trainer.global_step`` by one."""
    for step in optimizer_steps(loop.epoch_loop):
        step.increment_ready()
        step.increment_completed()


def optimizer_steps(loop: TrainingEpochLoop) -> tuple[Any, Any]:
    """Return the counters of ``global_step``: with automatic, and with manual optimization."""
    automatic = loop.automatic_optimization.optim_progress.optimizer.step
    return automatic, loop.manual_optimization.optim_step_progress


def set_rounds(loop: FitLoop, finished: int, begun: int) -> None:
    """Set the epoch counters and the loggers' step to numbers of finished and begun rounds."""
    for tracker in (loop.epoch_progress.total, loop.epoch_progress.current):
        vars(tracker).update(ready=begun, started=begun, processed=finished, completed=finished)
    loop.epoch_loop._batches_that_stepped = finished


def validates_after_round(loop: FitLoop) -> bool:
    """Whether ``check_val_every_n_epoch`` asks for a validation after this round."""
    return bool(loop.epoch_loop._should_check_val_epoch())


# --- logging --------------------------------------------------------------------------------------


def log_values(
    trainer: L.Trainer,
    results: ResultCollection,
    hook: str,
    values: Mapping[str, float | Tensor],
    prog_bar: Iterable[str],
    logger: Iterable[str],
) -> None:
    """Store values as ``self.log(..., on_epoch=True)`` does.

    For each new value ``results.log`` searches all that its object holds for tensors to move, which
    takes twice as long as to make it. A barebones Trainer keeps none, and `self.log` says so.

    Args:
        trainer: The running Trainer.
        results: The active loop's collection.
        hook: The step under whose name they are kept.
        values: Scalars by name.
        prog_bar: Names that the progress bar shows.
        logger: Names that go to the loggers.
    """
    if trainer.barebones:
        for name in values:
            if not name.startswith("round/"):  # what the module logs
                L.LightningModule.log(trainer.lightning_module, name, 0.0)
        return
    shown, logged = set(prog_bar), set(logger)
    for name, value in values.items():
        number = torch.as_tensor(value, dtype=torch.get_default_dtype())
        kept = results.get(f"{hook}.{name}")
        if kept is None:
            about = _Metadata(hook, name, prog_bar=name in shown, logger=name in logged)
            # All processes have the same value: with `sync_dist` and without a reduction, Lightning
            # neither reduces the value nor advises to.
            about.sync = _Sync(_Sync.no_op, _should=True)
            kept = results[f"{hook}.{name}"] = _ResultMetric(about, is_tensor=True)
            if number.device.type != "cpu":
                kept.to(number.device)
        kept.forward(number, 1)
        kept.has_reset = False


def open_step(trainer: L.Trainer, results: ResultCollection, client: int) -> None:
    """Begin a "batch", as ``_LoggerConnector.on_batch_start`` does, so that hooks can log.

    Lightning's way to the result collection compares strings, which is slow for many clients.
    """
    connector = trainer._logger_connector
    connector._first_loop_iter = connector._first_loop_iter is None
    results.batch, results.dataloader_idx = client, None
    results.batch_size = 1  # the batch is a client id, from which no size can be read


def close_step(trainer: L.Trainer, results: ResultCollection, logs: bool) -> None:
    """End a "batch", and publish what hooks have logged ``on_step``; nothing without ``logs``."""
    if logs and any(metric.meta.on_step and not metric.has_reset for metric in results.values()):
        trainer._logger_connector.on_batch_end()
        if trainer.training:
            trainer._logger_connector.update_train_step_metrics()
    results.batch = results.batch_size = None


def publish_round(trainer: L.Trainer) -> None:
    """Publish a round's logged values in ``trainer.callback_metrics`` before its end.

    Lightning reduces an epoch's values after its last batch; a round has none.
    """
    trainer._logger_connector.epoch_end_reached()
    # Reading them stores them, for schedulers and callbacks that look during validation.
    _ = trainer.callback_metrics


def send_round(loop: FitLoop, further: Mapping[str, float]) -> None:
    """Send a round's values to the loggers, and advance their step by one per round.

    Args:
        loop: The fit loop.
        further: Values for the loggers that ``trainer.callback_metrics`` doesn't get.
    """
    connector = loop.trainer._logger_connector
    connector.on_epoch_end()
    # As `update_train_epoch_metrics`, in one row with `further`.
    extra = {name: torch.as_tensor(value) for name, value in further.items()}
    connector.log_metrics({**connector.metrics["log"], **extra})
    connector.reset_results()
    loop.epoch_loop._batches_that_stepped += 1


def stop_if_terminated(terminated: bool) -> None:
    """End the run, as Lightning does between epochs, if a process got a SIGTERM.

    The program's exit code then says so, as a shell's does: 128 + 15.
    """
    if terminated:
        raise SIGTERMException(128 + signal.SIGTERM)


def is_interrupt(exception: BaseException) -> bool:
    """Whether a run was stopped from outside, by SIGINT or SIGTERM."""
    return isinstance(exception, (KeyboardInterrupt, SIGTERMException))


def path_of_last(trainer: L.Trainer) -> Path | None:
    """Return where ``ckpt_path="last"`` looks; None without a ModelCheckpoint."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            name = callback.CHECKPOINT_NAME_LAST
            # A name with values in braces begins with one that only ModelCheckpoint can fill in.
            return Path(
                callback.dirpath, ("last" if "{" in name else name) + callback.FILE_EXTENSION
            )
    return None


def log_settings(trainer: L.Trainer, settings: Mapping[str, Any]) -> None:
    """Add settings to the hyper-parameters that loggers keep.

    TensorBoard shows those that it got first, so this comes before Lightning's, with Lightning's.
    """
    parts = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
    known = {
        name: value
        for part in parts
        if part is not None and part._log_hyperparams
        for name, value in (part.hparams_initial or {}).items()
    }
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.enable_validation:
            # The first evaluation knows the values to show beside them.
            logger._default_hp_metric = False
        logger.log_hyperparams({**settings, **known})


def send_without_clutter(trainer: L.Trainer, at_end: tuple[str, ...]) -> None:
    """Make Lightning send no chart of a line or of a dot to TensorBoard.

    It adds ``epoch`` to whatever it sends, which is TensorBoard's horizontal axis here.

    Args:
        trainer: The Trainer.
        at_end: Prefixes of values of the end of a fit, which are a text in TensorBoard.
    """
    trainer._logger_connector.log_metrics = partial(_send, trainer, at_end)  # type: ignore[method-assign]


def _send(
    trainer: L.Trainer,
    at_end: tuple[str, ...],
    metrics: Mapping[str, Any],
    step: int | None = None,
    round: int | None = None,
) -> None:
    """Send values to the loggers as ``_LoggerConnector.log_metrics`` does, or those of a round."""
    if trainer.barebones:
        return
    trainer._logger_connector._logged_metrics.update(metrics)
    rows = convert_tensors_to_scalars(dict(metrics))
    curves = {name: value for name, value in rows.items() if not name.startswith(at_end)}
    if step is None:
        now = trainer.fit_loop.epoch_loop._batches_that_stepped if round is None else round
        step = int(rows.pop("step", now))
        rows.setdefault("epoch", trainer.current_epoch if round is None else round)
    for logger in trainer.loggers if metrics else ():
        logger.log_metrics(curves if isinstance(logger, TensorBoardLogger) else rows, step)
        logger.save()


def remember_metrics(trainer: L.Trainer, values: Mapping[str, float | Tensor]) -> None:
    """Add values to ``trainer.callback_metrics``, which a barebones Trainer leaves empty."""
    if trainer.barebones:
        return
    trainer._logger_connector._callback_metrics.update(
        {name: torch.as_tensor(value) for name, value in values.items()}
    )


def forget_metrics(trainer: L.Trainer, names: Iterable[str]) -> None:
    """Remove values from the Trainer, where Lightning keeps the last of each name."""
    connector = trainer._logger_connector
    kept = connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics
    for name in names:
        for values in kept:
            values.pop(name, None)


def log_directly(
    trainer: L.Trainer,
    values: Mapping[str, float],
    logger: Iterable[str] | None = None,
    prog_bar: Iterable[str] = (),
    round: int | None = None,
) -> None:
    """Send values to the loggers and to ``trainer.callback_metrics``, where no loop collects them.

    A barebones Trainer keeps none.

    Args:
        trainer: The running Trainer.
        values: Scalars by name.
        logger: Names that go to the loggers; None: all.
        prog_bar: Names that the progress bar shows.
        round: The round that they are of, from 0: the loggers' step, and the epoch; None: now.
    """
    if trainer.barebones:
        return
    tensors = {name: torch.as_tensor(value) for name, value in values.items()}
    remember_metrics(trainer, tensors)
    connector, sent = trainer._logger_connector, values if logger is None else logger
    connector._progress_bar_metrics.update({name: values[name] for name in prog_bar})
    send: Callable[..., None] = connector.log_metrics  # see `send_without_clutter`
    send({name: tensors[name] for name in sent}, round=round)


# --- optimizers -----------------------------------------------------------------------------------


def copy_apart(module: Any) -> Any:
    """Copy a module deeply without its Trainer."""
    trainer, module._trainer = module._trainer, None
    try:
        return deepcopy(module)
    finally:
        module._trainer = trainer


def read_optimizers(
    module: L.LightningModule, configured: Any, check: Callable[[list[Optimizer]], None]
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Read what ``configure_optimizers`` returned, in any of its forms.

    Args:
        module: The user's module.
        configured: The returned value, not None.
        check: Called with the optimizers before the schedulers are looked at.
    """
    optimizers, schedulers, monitor = _configure_optimizers(configured)
    _validate_multiple_optimizers_support(optimizers, module)
    check(optimizers)
    configs = (
        _configure_schedulers_automatic_opt(schedulers, monitor)
        if module.automatic_optimization
        else _configure_schedulers_manual_opt(schedulers)
    )
    _validate_optimizers_attached(optimizers, configs)
    _validate_scheduler_api(configs, module)
    return optimizers, configs


def step_schedulers(loop: FitLoop, plateau: bool) -> None:
    """Step the schedulers of rounds: those that use a monitored value, or the others."""
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=plateau)
