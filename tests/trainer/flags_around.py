"""Arguments of the Trainer that concern what is around the rounds: devices, logs, plugins."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch import Tensor

from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.methods import FedRep, LocalOnly
from tests.trainer.flags_of_rounds import ends, fit, refused
from tests.trainer.setting import SIZES, Quadratic, classes, network, points, steps_of, trainer


def accelerator(tmp_path: Path) -> None:
    run, _ = fit(accelerator="cpu")
    assert run.strategy.root_device == torch.device("cpu")


def strategy(tmp_path: Path) -> None:
    run = trainer(strategy="federated", max_epochs=1)
    run.fit(Quadratic(), points(), points())
    assert type(run.strategy).__name__ == "FederatedStrategy"


def devices(tmp_path: Path) -> None:
    fit(devices=1)
    # What two processes do is tested in test_processes.py.
    run = trainer(devices=2)
    assert (run.world_size, run.num_devices, run.strategy.is_distributed) == (2, 2, True)


def num_nodes(tmp_path: Path) -> None:
    run = trainer(devices=3, num_nodes=2)
    assert (run.world_size, run.num_nodes) == (6, 2)


def precision(tmp_path: Path) -> None:
    for name, dtype in (
        (32, torch.float32),
        ("64-true", torch.float64),
        ("bf16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("16-true", torch.float16),
    ):
        run = trainer(FedRep(head_epochs=2), max_epochs=1, precision=name)
        run.fit(network(), *classes())
        state = run.strategy.client_state_dict(0)
        assert state["head.weight"].dtype == dtype
        assert not torch.equal(state["head.weight"].float(), network().head.weight)
    with pytest.warns(
        UserWarning, match="AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"
    ):
        trainer(precision="16-mixed")


def logger(tmp_path: Path) -> None:
    run, _ = fit(logger=[CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tb")])
    assert (Path(str(run.log_dir)) / "metrics.csv").exists()
    assert list((tmp_path / "tb").rglob("events.out.tfevents*"))


def callbacks(tmp_path: Path) -> None:
    refused(
        "callback StochasticWeightAveraging. It averages one model",
        callbacks=[StochasticWeightAveraging(1e-2)],
    )
    refused(
        "callback GradientAccumulationScheduler", callbacks=[GradientAccumulationScheduler({0: 2})]
    )

    refused("callback SpikeDetection. It checks the loss", callbacks=[SpikeDetection()])
    refused("callback LearningRateFinder. It trains one model", callbacks=[LearningRateFinder()])

    refused(
        r"ModelCheckpoint\(save_last='link'\)",
        callbacks=[ModelCheckpoint(tmp_path, save_last="link")],
        enable_checkpointing=True,
    )


def log_every_n_steps(tmp_path: Path) -> None:
    run, _ = fit(logger=CSVLogger(tmp_path), log_every_n_steps=7, max_epochs=2)
    text = (Path(str(run.log_dir)) / "metrics.csv").read_text()
    # Values of a round are values of an epoch: always logged.
    assert len([line for line in text.splitlines()[1:] if line]) == 4 + 1


def enable_checkpointing(tmp_path: Path) -> None:
    run, _ = fit(enable_checkpointing=True, default_root_dir=tmp_path)
    assert Path(run.checkpoint_callback.best_model_path).exists()
    assert fit(enable_checkpointing=False)[0].checkpoint_callback is None


def enable_progress_bar(tmp_path: Path) -> None:
    for bar in (TQDMProgressBar(), RichProgressBar()):
        run, _ = fit(enable_progress_bar=True, callbacks=[bar], max_epochs=2)
        assert run.progress_bar_metrics.keys() >= {"train_loss", "val_loss"}
        total = run.num_training_batches
        assert total == 4


def enable_model_summary(tmp_path: Path) -> None:
    assert fit(enable_model_summary=True)[0].global_step == 1


def deterministic(tmp_path: Path) -> None:
    try:
        fit(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def benchmark(tmp_path: Path) -> None:
    before = torch.backends.cudnn.benchmark
    try:
        fit(benchmark=True)
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before


def inference_mode(tmp_path: Path) -> None:
    modes = []

    class Notes(Quadratic):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            modes.append(torch.is_inference_mode_enabled())

    for wanted in (True, False):
        trainer(inference_mode=wanted).validate(Notes(), points((1, 0, 0, 0)), verbose=False)
    assert modes == [True, False]


def use_distributed_sampler(tmp_path: Path) -> None:
    for wanted in (True, False):  # one process: there is nothing to distribute
        ends(fit(use_distributed_sampler=wanted)[1], lambda client: steps_of(SIZES[client]))


def profiler(tmp_path: Path) -> None:
    simple = SimpleProfiler(dirpath=tmp_path, filename="profile")
    fit(profiler=simple)
    assert {
        "[Strategy]FederatedStrategy.training_step",
        "aggregation",
        "[Strategy]FederatedStrategy.validation_step",
        "run_training_epoch",
    } <= simple.recorded_durations.keys()
    for function in ("fit", "validate", "test", "predict"):
        by_torch = PyTorchProfiler(tmp_path, filename="torch")
        run = trainer(profiler=by_torch, max_epochs=1)
        data = [points()] * (2 if function == "fit" else 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its schedule wants more steps than there are here
            getattr(run, function)(Quadratic(), *data)
        # An error at the end, unless a step was counted.
        assert (tmp_path / f"{function}-torch.txt").exists()


def detect_anomaly(tmp_path: Path) -> None:
    seen = []

    class Notes(Quadratic):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(torch.is_anomaly_enabled())
            return super().training_step(batch, batch_idx)

    fit(Notes(), detect_anomaly=True)
    assert all(seen)
    assert seen
    for engine in ("sequential", "vectorized"):
        run = trainer(FedRep(), engine=engine, max_epochs=3, detect_anomaly=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run.fit(network(), *classes())
        assert run.current_epoch == 3
        assert not [each for each in said if "Error detected in" in str(each.message)]


def barebones(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    said = r"You are trying to `self.log\(\)` but `Trainer\(barebones=True\)`"
    for engine in ("sequential", "vectorized"):
        run = trainer(LocalOnly(), engine=engine, max_epochs=1, barebones=True, **quiet)
        run.callbacks.append(HeadFineTuning(["w"], epochs=1))
        with pytest.warns(UserWarning, match=said):
            run.fit(Quadratic(), points(), points())
        assert run.loggers == []
        ends(run.strategy, lambda client: steps_of(SIZES[client]))
        # As plain Lightning, it keeps no values; the strategy has those of each client.
        kept = [run.callback_metrics, run.logged_metrics, run.progress_bar_metrics]
        with pytest.warns(UserWarning, match=said):
            assert run.validate(run.lightning_module, points(), verbose=False) == [{}]
        kept += [run.callback_metrics, run.logged_metrics, run.progress_bar_metrics]
        assert kept == [{}] * 6
        assert run.strategy.client_metrics().keys() >= {"val_loss"}


def plugins(tmp_path: Path) -> None:
    class TwoTasks(LightningEnvironment):
        def world_size(self) -> int:
            return 2

    refused(
        r"Expected `devices` times .* but got 1 for 2 processes",
        plugins=[TwoTasks()],
    )


def sync_batchnorm(tmp_path: Path) -> None:
    refused(
        r"Trainer\(sync_batchnorm=True\)` .* Batch statistics belong to a client",
        sync_batchnorm=True,
    )


def default_root_dir(tmp_path: Path) -> None:
    run, _ = fit(default_root_dir=tmp_path, enable_checkpointing=True, logger=CSVLogger(tmp_path))
    assert tmp_path in Path(run.checkpoint_callback.best_model_path).parents


def enable_autolog_hparams(tmp_path: Path) -> None:
    run = trainer(
        FedRep(head_epochs=2), logger=CSVLogger(tmp_path), max_epochs=1, enable_autolog_hparams=True
    )
    run.fit(network(), *classes())
    assert "momentum" in (Path(str(run.log_dir)) / "hparams.yaml").read_text()


def model_registry(tmp_path: Path) -> None:
    fit(model_registry="some/name")  # only names a place for Lightning's own registry client
