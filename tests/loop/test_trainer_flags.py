"""Every argument of the Trainer: it works as a Lightning user expects, or it is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import FedRep, LocalOnly
from tests.loop.setting import (
    CENTRES,
    LR,
    SIZES,
    Quadratic,
    classes,
    network,
    points,
    steps_of,
    trained,
    trainer,
)

ZERO = torch.zeros(2, dtype=torch.float64)


def fit(module: L.LightningModule | None = None, data: Any = None, **flags: Any) -> tuple[Any, Any]:
    """LocalOnly on the quadratic federation, so that every client's end has a closed form."""
    run = trainer(LocalOnly(), **{"max_epochs": 1, **flags})
    chosen = module or Quadratic()
    run.fit(chosen, data or points(), points())
    return run, run.strategy


def ends(strategy: Any, steps: Callable[[int], int], lr: float = LR) -> None:
    """Check where the clients have ended, given their numbers of steps."""
    for client in range(4):
        want = trained(ZERO, client, steps(client), lr)
        torch.testing.assert_close(
            strategy.client_state_dict(client)["w"], want, rtol=0, atol=1e-12
        )


def refused(match: str, **flags: Any) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        fit(**flags)


# --- the table


def accelerator(tmp_path: Path) -> None:
    run, _ = fit(accelerator="cpu")
    assert run.strategy.root_device == torch.device("cpu")


def strategy(tmp_path: Path) -> None:
    run = trainer(strategy="federated", max_epochs=1)
    run.fit(Quadratic(), points(), points())
    assert type(run.strategy).__name__ == "FederatedStrategy"


def devices(tmp_path: Path) -> None:
    fit(devices=1)
    refused(
        r"Trainer\(devices=2\)` \(`trainer.devices` in a recipe\)\. .* set devices=1", devices=2
    )


def num_nodes(tmp_path: Path) -> None:
    refused(r"Trainer\(num_nodes=2\)` .* set num_nodes=1", num_nodes=2)


def precision(tmp_path: Path) -> None:
    for name, dtype in (
        (32, torch.float32),
        ("64-true", torch.float64),
        ("bf16-mixed", torch.float32),
    ):
        run = trainer(FedRep(), max_epochs=1, precision=name)
        run.fit(network(), *classes())
        state = run.strategy.client_state_dict(0)
        assert state["head.weight"].dtype == dtype
        assert not torch.equal(state["head.weight"].float(), network().head.weight)
    with pytest.warns(
        UserWarning, match="AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"
    ):
        trainer(precision="16-mixed")
    refused(
        r"Trainer\(precision='bf16-true'\)` .* Use '32-true', '64-true' or 'bf16-mixed'",
        precision="bf16-true",
    )


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

    class Inside(Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            pass

    refused("can't call `on_before_optimizer_step` of the callback Inside", callbacks=[Inside()])
    refused(
        r"ModelCheckpoint\(save_last='link'\)",
        callbacks=[ModelCheckpoint(tmp_path, save_last="link")],
        enable_checkpointing=True,
    )


def fast_dev_run(tmp_path: Path) -> None:
    run, strategy = fit(fast_dev_run=1, max_epochs=9)
    assert (run.current_epoch, run.global_step) == (1, 1)
    ends(strategy, lambda client: 1)


def max_epochs(tmp_path: Path) -> None:
    run, strategy = fit(max_epochs=3)
    assert (run.current_epoch, run.global_step) == (3, 3)
    ends(strategy, lambda client: 3 * steps_of(SIZES[client]))


class StopsAtOnce(Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.should_stop = True


def min_epochs(tmp_path: Path) -> None:
    assert fit(max_epochs=9, callbacks=[StopsAtOnce()])[0].current_epoch == 1
    assert fit(max_epochs=9, min_epochs=3, callbacks=[StopsAtOnce()])[0].current_epoch == 3


def max_steps(tmp_path: Path) -> None:
    run, _ = fit(max_epochs=-1, max_steps=2)
    assert (run.current_epoch, run.global_step) == (2, 2)


def min_steps(tmp_path: Path) -> None:
    assert fit(max_epochs=9, min_steps=2, callbacks=[StopsAtOnce()])[0].global_step == 2


def max_time(tmp_path: Path) -> None:
    assert fit(max_epochs=10**6, max_time=timedelta(seconds=0.2))[0].current_epoch < 10**6
    timer = Timer(timedelta(0))
    assert fit(max_epochs=10**6, callbacks=[timer])[0].current_epoch <= 1


def limit_train_batches(tmp_path: Path) -> None:
    ends(fit(limit_train_batches=1)[1], lambda client: 1)
    ends(fit(limit_train_batches=0.5)[1], lambda client: steps_of(SIZES[client]) // 2)
    assert fit(limit_train_batches=0)[0].global_step == 0


def evaluated(limit: Any, stage: str) -> list[int]:
    """Samples that each client was evaluated on."""
    seen = dict.fromkeys(range(4), 0)

    class Counts(Quadratic):
        def loss(self, batch: Any) -> Tensor:
            if not self.trainer.training:
                seen[int((batch[0][0] == CENTRES).all(1).nonzero())] += len(batch[0])
            return super().loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    run = trainer(LocalOnly(), **{f"limit_{stage}_batches": limit})
    function = {"val": run.validate, "test": run.test}.get(stage)
    if function is not None:
        function(Counts(), points(), verbose=False)
    else:
        run.predict(Counts(), points())
    return list(seen.values())


def limit_val_batches(tmp_path: Path) -> None:
    assert evaluated(1, "val") == [2, 2, 2, 2]
    assert evaluated(1.0, "val") == list(SIZES)
    assert "val_loss" not in fit(limit_val_batches=0)[0].callback_metrics


def limit_test_batches(tmp_path: Path) -> None:
    assert evaluated(2, "test") == [4, 4, 3, 4]


def limit_predict_batches(tmp_path: Path) -> None:
    assert evaluated(2, "predict") == [4, 4, 3, 4]


def overfit_batches(tmp_path: Path) -> None:
    run, strategy = fit(overfit_batches=1)
    ends(strategy, lambda client: 1)
    assert run.limit_val_batches == 1


class Validations(Callback):
    def __init__(self) -> None:
        self.rounds: list[int] = []

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.rounds.append(-1 if trainer.sanity_checking else trainer.current_epoch)


def val_check_interval(tmp_path: Path) -> None:
    seen = Validations()
    fit(
        max_epochs=5,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        callbacks=[seen],
        num_sanity_val_steps=0,
    )
    assert seen.rounds == [1, 3]
    refused(
        r"Trainer\(val_check_interval=0.5\)` .* Use check_val_every_n_epoch", val_check_interval=0.5
    )
    refused(
        r"Trainer\(val_check_interval=2\)` .* together with check_val_every_n_epoch=None",
        val_check_interval=2,
    )
    refused(
        r"Trainer\(val_check_interval=60.0\)` .* Use check_val_every_n_epoch",
        val_check_interval="00:00:01:00",
    )


def check_val_every_n_epoch(tmp_path: Path) -> None:
    seen = Validations()
    fit(max_epochs=5, check_val_every_n_epoch=2, callbacks=[seen], num_sanity_val_steps=0)
    assert seen.rounds == [1, 3]


def num_sanity_val_steps(tmp_path: Path) -> None:
    for steps, want in ((0, [0]), (2, [-1, 0]), (-1, [-1, 0])):
        seen = Validations()
        run, _ = fit(num_sanity_val_steps=steps, callbacks=[seen])
        assert seen.rounds == want
        assert "val_loss" in run.callback_metrics


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


def accumulate_grad_batches(tmp_path: Path) -> None:
    _, strategy = fit(accumulate_grad_batches=2)
    for client, size in enumerate(SIZES):
        w = trained(ZERO, client, steps_of(size) // 2)
        if steps_of(size) % 2:  # as in Lightning, a last incomplete group is still divided by two
            w = trained(w, client, 1, LR / 2)
        torch.testing.assert_close(strategy.client_state_dict(client)["w"], w, rtol=0, atol=1e-12)


def clipped(value: float, algorithm: str) -> Tensor:
    w = ZERO
    for _ in range(steps_of(SIZES[3])):
        grad = w - CENTRES[3]
        if algorithm == "norm":
            grad = grad * min(1.0, value / (float(grad.norm()) + 1e-6))
        else:
            grad = grad.clamp(-value, value)
        w = w - LR * grad
    return w


def gradient_clip_val(tmp_path: Path) -> None:
    _, strategy = fit(gradient_clip_val=0.5)
    torch.testing.assert_close(
        strategy.client_state_dict(3)["w"], clipped(0.5, "norm"), rtol=0, atol=1e-12
    )


def gradient_clip_algorithm(tmp_path: Path) -> None:
    _, strategy = fit(gradient_clip_val=0.5, gradient_clip_algorithm="value")
    torch.testing.assert_close(
        strategy.client_state_dict(3)["w"], clipped(0.5, "value"), rtol=0, atol=1e-12
    )


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
        "local_training",
        "aggregation",
        "evaluation",
        "run_training_epoch",
    } <= simple.recorded_durations.keys()


def detect_anomaly(tmp_path: Path) -> None:
    seen = []

    class Notes(Quadratic):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(torch.is_anomaly_enabled())
            return super().training_step(batch, batch_idx)

    fit(Notes(), detect_anomaly=True)
    assert all(seen)
    assert seen


def barebones(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    run, strategy = fit(barebones=True, **quiet)
    assert run.loggers == []
    ends(strategy, lambda client: steps_of(SIZES[client]))


def plugins(tmp_path: Path) -> None:
    class TwoTasks(LightningEnvironment):
        def world_size(self) -> int:
            return 2

    refused("runs in one process, but the environment says that there are 2", plugins=[TwoTasks()])


def sync_batchnorm(tmp_path: Path) -> None:
    refused(
        r"Trainer\(sync_batchnorm=True\)` .* Batch statistics belong to a client",
        sync_batchnorm=True,
    )


def reload_dataloaders_every_n_epochs(tmp_path: Path) -> None:
    calls = []

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> FederatedTensorDataset:
            calls.append(self.trainer.current_epoch)  # type: ignore[union-attr]
            return points()

    run = trainer(
        LocalOnly(), max_epochs=4, reload_dataloaders_every_n_epochs=2, limit_val_batches=0
    )
    with pytest.warns(UserWarning, match="no `val_dataloader`"):
        run.fit(Quadratic(), datamodule=Data())
    assert calls == [0, 2]


def default_root_dir(tmp_path: Path) -> None:
    run, _ = fit(default_root_dir=tmp_path, enable_checkpointing=True, logger=CSVLogger(tmp_path))
    assert tmp_path in Path(run.checkpoint_callback.best_model_path).parents


def enable_autolog_hparams(tmp_path: Path) -> None:
    run = trainer(FedRep(), logger=CSVLogger(tmp_path), max_epochs=1, enable_autolog_hparams=True)
    run.fit(network(), *classes())
    assert "momentum" in (Path(str(run.log_dir)) / "hparams.yaml").read_text()


def model_registry(tmp_path: Path) -> None:
    fit(model_registry="some/name")  # only names a place for Lightning's own registry client


TABLE: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        accelerator, strategy, devices, num_nodes, precision, logger, callbacks, fast_dev_run,
        max_epochs, min_epochs, max_steps, min_steps, max_time, limit_train_batches,
        limit_val_batches, limit_test_batches, limit_predict_batches, overfit_batches,
        val_check_interval, check_val_every_n_epoch, num_sanity_val_steps, log_every_n_steps,
        enable_checkpointing, enable_progress_bar, enable_model_summary, accumulate_grad_batches,
        gradient_clip_val, gradient_clip_algorithm, deterministic, benchmark, inference_mode,
        use_distributed_sampler, profiler, detect_anomaly, barebones, plugins, sync_batchnorm,
        reload_dataloaders_every_n_epochs, default_root_dir, enable_autolog_hparams, model_registry,
    )
}  # fmt: skip


def test_the_table_has_every_argument_of_the_trainer() -> None:
    assert set(TABLE) == set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}


@pytest.mark.parametrize("flag", TABLE)
def test_flag(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TABLE[flag](tmp_path)
