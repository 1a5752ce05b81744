"""Arguments of the Trainer that concern rounds: how many, on how much data, how clients train."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    Timer,
)
from torch import Tensor

from lightning_pfl.data import FederatedTensorDataset
from lightning_pfl.methods import LocalOnly
from tests.trainer.setting import CENTRES, LR, SIZES, Quadratic, points, steps_of, trained, trainer

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
        r"Trainer\(val_check_interval=2\)` .* with check_val_every_n_epoch=None",
        val_check_interval=2,
    )
    refused(
        r"Trainer\(val_check_interval=60.0\)` .* Use check_val_every_n_epoch",
        val_check_interval="00:00:01:00",
    )
    refused(
        r"Trainer\(val_check_interval=0\)` .* Use a number of rounds >= 1",
        val_check_interval=0,
        check_val_every_n_epoch=None,
    )


def check_val_every_n_epoch(tmp_path: Path) -> None:
    seen = Validations()
    fit(max_epochs=5, check_val_every_n_epoch=2, callbacks=[seen], num_sanity_val_steps=0)
    assert seen.rounds == [1, 3]
    for wrong in (0, -1):
        refused(
            rf"Trainer\(check_val_every_n_epoch={wrong}\)` .* Use a number of rounds >= 1",
            check_val_every_n_epoch=wrong,
        )


def num_sanity_val_steps(tmp_path: Path) -> None:
    for steps, want in ((0, [0]), (2, [-1, 0]), (-1, [-1, 0])):
        seen = Validations()
        run, _ = fit(num_sanity_val_steps=steps, callbacks=[seen])
        assert seen.rounds == want
        assert "val_loss" in run.callback_metrics


def accumulate_grad_batches(tmp_path: Path) -> None:
    _, strategy = fit(accumulate_grad_batches=2)
    for client, size in enumerate(SIZES):
        w = trained(ZERO, client, steps_of(size) // 2)
        if steps_of(size) % 2:  # as in Lightning, a last incomplete group is still divided by two
            w = trained(w, client, 1, LR / 2)
        torch.testing.assert_close(strategy.client_state_dict(client)["w"], w, rtol=0, atol=1e-12)
    for wrong in (0, -1, 1.5, {0: 2}):
        refused(
            r"Trainer\(accumulate_grad_batches=.*\)` .* Use a whole number >= 1",
            accumulate_grad_batches=wrong,
        )


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
    ends(fit(gradient_clip_val=0.0)[1], lambda client: steps_of(SIZES[client]))
    for wrong in (-0.5, float("nan")):
        refused(
            r"Trainer\(gradient_clip_val=.*\)` .* Use a number > 0, or None",
            gradient_clip_val=wrong,
        )


def gradient_clip_algorithm(tmp_path: Path) -> None:
    _, strategy = fit(gradient_clip_val=0.5, gradient_clip_algorithm="value")
    torch.testing.assert_close(
        strategy.client_state_dict(3)["w"], clipped(0.5, "value"), rtol=0, atol=1e-12
    )


def reload_dataloaders_every_n_epochs(tmp_path: Path) -> None:
    loaded: list[tuple[str, int]] = []

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> FederatedTensorDataset:
            loaded.append(("train", self.trainer.current_epoch))  # type: ignore[union-attr]
            return points()

        def val_dataloader(self) -> FederatedTensorDataset:
            loaded.append(("val", self.trainer.current_epoch))  # type: ignore[union-attr]
            return points()

    def loads(rounds: int, name: str, **fit: Any) -> list[tuple[str, int]]:
        loaded.clear()
        path = tmp_path / f"{name}.ckpt"
        saver = LambdaCallback(on_train_epoch_end=lambda run, _: run.save_checkpoint(path))
        run = trainer(
            LocalOnly(), max_epochs=rounds, reload_dataloaders_every_n_epochs=2, callbacks=[saver]
        )
        run.fit(Quadratic(), datamodule=Data(), **fit)
        return list(loaded)

    every = [(split, round) for round in (0, 2, 4) for split in ("train", "val")]
    assert loads(6, "whole") == every
    for stopped in (3, 4):  # in the middle, and at the end of two rounds with the same data
        loads(stopped, f"stopped{stopped}")
        resumed = loads(6, "resumed", ckpt_path=str(tmp_path / f"stopped{stopped}.ckpt"))
        assert [load for load in resumed if load[1] >= 4] == every[4:]
