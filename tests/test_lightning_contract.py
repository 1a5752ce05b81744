"""What `_lightning.py` relies on: names, signatures and behaviour of Lightning's private parts, and
the order of hooks.

If this file fails after an upgrade of Lightning, read the changed part there and adapt
`_lightning.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _validate_optimizers_attached,
    _validate_scheduler_api,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_pfl import _lightning
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.methods import FedAvg
from tests.trainer.setting import Quadratic, points, trainer

pytestmark = pytest.mark.quick


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            _call_callback_hooks,
            ["trainer", "hook_name", "args", "monitoring_callbacks", "kwargs"],
        ),
        (
            _call_lightning_module_hook,
            ["trainer", "hook_name", "args", "pl_module", "kwargs"],
        ),
        (_configure_optimizers, ["optim_conf"]),
        (_configure_schedulers_automatic_opt, ["schedulers", "monitor"]),
        (_validate_optimizers_attached, ["optimizers", "lr_scheduler_configs"]),
        (_validate_scheduler_api, ["lr_scheduler_configs", "model"]),
        (_lightning.no_grad_context, ["loop_run"]),
        (_lightning.with_sampler, ["dataloader", "sampler", "mode"]),
        (_LoggerConnector.on_batch_end, ["self"]),
        (_LoggerConnector.update_train_step_metrics, ["self"]),
        (_LoggerConnector.reset_results, ["self"]),
        (_LoggerConnector.epoch_end_reached, ["self"]),
        (_LoggerConnector.on_epoch_end, ["self"]),
        (_LoggerConnector.log_metrics, ["self", "metrics", "step"]),
        (
            _TrainingEpochLoop.update_lr_schedulers,
            ["self", "interval", "update_plateau_schedulers"],
        ),
        (_TrainingEpochLoop._should_check_val_epoch, ["self"]),
        (
            _lightning.SubprocessScriptLauncher.__init__,
            ["self", "cluster_environment", "num_processes", "num_nodes"],
        ),
        (_lightning.SubprocessScriptLauncher.kill, ["self", "signum"]),
        (
            _lightning.connect_processes,
            [
                "cluster_environment",
                "torch_distributed_backend",
                "global_rank",
                "world_size",
                "kwargs",
            ],
        ),
        (_lightning.default_backend, ["device"]),
        (_lightning.reduce_tensor, ["result", "group", "reduce_op"]),
        (_EvaluationLoop._verify_dataloader_idx_requirement, ["self"]),
        (_EvaluationLoop._on_evaluation_end, ["self", "args", "kwargs"]),
        (_FitLoop.run, ["self"]),
        (_FitLoop.setup_data, ["self"]),
        (_FitLoop.reset, ["self"]),
        (_FitLoop.on_advance_start, ["self"]),
        (_FitLoop.advance, ["self"]),
        (_FitLoop.on_advance_end, ["self"]),
        (_FitLoop.on_run_end, ["self"]),
        (_FitLoop.on_save_checkpoint, ["self"]),
        (_FitLoop.on_load_checkpoint, ["self", "state_dict"]),
    ],
)
def test_signature(function: Any, expected: list[str]) -> None:
    assert parameters(function) == expected


def test_values_are_kept_as_self_log_keeps_them() -> None:
    """``results.log`` is what ``self.log`` calls."""
    run = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    kept, expected = _ResultCollection(training=True), _ResultCollection(training=True)
    for value in (1.5, torch.tensor(-3, dtype=torch.int64)):
        values = {"a": value, "b": 2 * value}
        _lightning.log_values(run, kept, "training_step", values, ["a"], ["b"])
        for name, number in (("a", float(value)), ("b", 2 * float(value))):
            flags = {"prog_bar": name == "a", "logger": name == "b", "sync_dist": True}
            one = torch.tensor(number)
            expected.log("training_step", name, one, on_epoch=True, batch_size=1, **flags)
    assert kept.keys() == expected.keys()
    for key, found in kept.items():
        assert vars(found).keys() == vars(expected[key]).keys()
        assert found.meta == expected[key].meta
        assert found.has_reset == expected[key].has_reset
        assert found.cumulated_batch_size == expected[key].cumulated_batch_size == 2
    assert kept.metrics(on_step=False) == expected.metrics(on_step=False)
    assert kept.metrics(on_step=False)["callback"] == {"a": -0.75, "b": -1.5}


@pytest.mark.parametrize(("barebones", "kept"), [(False, {"a": 1.0}), (True, {})])
def test_a_barebones_trainer_keeps_no_values(barebones: bool, kept: dict[str, float]) -> None:
    """As those of a validation that is read late, which no loop collects."""
    flags: Any = {} if barebones else {"logger": False, "enable_checkpointing": False}
    run = L.Trainer(accelerator="cpu", barebones=barebones, **flags)
    _lightning.send_without_clutter(run, at_end=())
    _lightning.log_directly(run, {"a": 1.0}, prog_bar=["a"])
    assert run.callback_metrics == run.progress_bar_metrics == kept


def test_the_loops_have_the_attributes_that_the_federated_loops_use() -> None:
    run = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    fit, validation, prediction = run.fit_loop, run.fit_loop.epoch_loop.val_loop, run.predict_loop
    for loop, names in (
        (fit, "epoch_loop epoch_progress max_batches _data_source _combined_loader"),
        (fit, "_last_train_dl_reload_epoch _should_reload_train_dl"),
        (fit.epoch_loop, "batch_progress automatic_optimization val_loop _results"),
        (fit, "_should_accumulate"),
        (fit.epoch_loop, "_batches_that_stepped"),
        (validation, "batch_progress _max_batches _results _logged_outputs _has_run _data_source"),
        (validation, "_trainer_fn _stage _combined_loader _last_val_dl_reload_epoch _module_mode"),
        (validation, "_should_reload_val_dl inference_mode verbose"),
        (prediction, "batch_progress max_batches epoch_batch_indices _predictions _data_source"),
        (prediction, "_combined_loader inference_mode"),
        (L.Trainer, "_evaluation_loop"),
        (run, "_logger_connector _val_check_time_interval _accelerator_connector"),
        (run._logger_connector, "_callback_metrics _logged_metrics _progress_bar_metrics"),
        (run._logger_connector, "_first_loop_iter"),
        (run.strategy, "_checkpoint_io _launcher _configure_launcher"),
        (LightningCLI, "_get _parse_ckpt_path"),
        (L.LightningModule(), "_current_fx_name _trainer"),
        (run, "received_sigterm _signal_connector"),
        (run._signal_connector, "received_sigterm _sigterm_notifier_fn"),
        (run._accelerator_connector, "_layer_sync"),
    ):
        assert [name for name in names.split() if not hasattr(loop, name)] == []
    step = fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    assert run.global_step == step.total.completed == 0


class Numbered(Logger):
    """Keeps the names and the step of what it is given."""

    name, version = "numbered", 0

    def __init__(self) -> None:
        self.found: list[tuple[str, int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.found += [(name, step) for name in metrics]

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def test_loggers_number_values_by_the_rounds_that_are_done() -> None:
    """As Lightning does: by batches that stepped, from 0, of which a round is one."""
    logger = Numbered()
    run = trainer(FedAvg(), max_epochs=3, logger=logger)
    run.fit(Quadratic(), points(), points())
    assert [step for name, step in logger.found if name == "train_loss"] == [0, 1, 2]
    assert run.fit_loop.epoch_loop._batches_that_stepped == 3
    _lightning.set_rounds(run.fit_loop, finished=2, begun=3)
    assert run.fit_loop.epoch_loop._batches_that_stepped == 2


def test_the_logger_connector_serves_only_subclasses_of_lightnings_loops() -> None:
    assert issubclass(_lightning.FitLoop, _FitLoop)
    assert issubclass(_lightning.EvaluationLoop, _EvaluationLoop)
    assert issubclass(_lightning.PredictionLoop, _PredictionLoop)
    source = inspect.getsource(_LoggerConnector.should_update_logs.fget)  # type: ignore[attr-defined]
    assert "isinstance(loop, pl.loops._FitLoop)" in source
    assert "raise NotImplementedError(loop)" in source


def test_a_scheduler_that_steps_first_is_recognised_by_the_mark_that_the_strategy_sets() -> None:
    # `strategy.setup_optimizers` sets `_opt_called`; if torch renames it, schedulers warn again.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        scheduler.step()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def test_take_over_keeps_what_the_trainer_configured() -> None:
    run = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=7, max_steps=5
    )

    class Other(_FitLoop):
        pass

    loop = _lightning.take_over(Other, run.fit_loop)
    assert type(loop) is Other
    assert (loop.max_epochs, loop.max_steps) == (7, 5)
    assert loop.epoch_loop is run.fit_loop.epoch_loop


# --- the order of events

EVALUATION = [
    "on_validation_start",
    "on_validation_epoch_start",
    *["on_validation_batch_start", "on_validation_batch_end"] * 2,
    "on_validation_epoch_end",
    "on_validation_end",
]

ROUND = [
    "on_train_epoch_start",
    "on_round_start",
    "on_local_training_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_local_training_end",
    "on_aggregation_start",
    "on_aggregation_end",
    "on_round_end",
    "on_train_batch_end",
    *EVALUATION[:-2],
    "on_clients_evaluated",  # not in the sanity check
    *EVALUATION[-2:],
    "on_train_epoch_end",
]

FIT = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    *EVALUATION,
    "on_sanity_check_end",
    "on_train_start",
    *ROUND,
    *ROUND,
    "on_train_end",
    "on_fit_end",
    "teardown",
]


class Recorder(FederatedCallback):
    """Records every hook that fires."""

    def __init__(self) -> None:
        self.called: list[str] = []
        hooks = [
            name
            for name in dir(FederatedCallback)
            if name.startswith("on_") or name in ("setup", "teardown")
        ]
        # Those that the engines can't call are refused when they are overridden.
        inside = (
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_before_zero_grad",
        )
        for name in hooks:
            if name not in inside:
                setattr(self, name, self.recording(name))

    def recording(self, name: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> None:
            self.called.append(name)

        return hook


def test_the_order_of_events_of_a_fit() -> None:
    recorder = Recorder()
    run = trainer(FedAvg(), participation=2, max_epochs=2, callbacks=[recorder])
    run.fit(Quadratic(), points(), points((1, 0, 0, 2)))
    assert recorder.called == FIT


def test_hooks_of_the_module_fire_after_those_of_callbacks() -> None:
    order: list[str] = []

    class Module(Quadratic):
        def on_train_epoch_end(self) -> None:
            order.append("module")

    class First(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            order.append("callback")

    run = trainer(FedAvg(), max_epochs=1, callbacks=[First()])
    run.fit(Module(), points(), points())
    assert order == ["callback", "module"]
