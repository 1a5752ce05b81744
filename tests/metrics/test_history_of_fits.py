"""What a validation logs, or doesn't: training goes on, and the right round is the best."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.metrics.history import History, higher_is_better
from tests.trainer.setting import SIZES, Quadratic, mean, points, trained, trainer


class Silent(Quadratic):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class Sometimes(Quadratic):
    """Logs an accuracy in every other round."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        if self.trainer.current_epoch % 2 == 0:
            self.log("val_acc", torch.tensor(0.5 - self.trainer.current_epoch / 10))


def after(rounds: int) -> torch.Tensor:
    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        w = mean([trained(w, client) for client in range(len(SIZES))], list(map(float, SIZES)))
    return w


def test_a_validation_that_logs_nothing_ends_nothing() -> None:
    run, module = trainer(max_epochs=3), Silent()
    run.fit(module, points(), points())
    assert run.strategy.federation.rounds == run.current_epoch == 3
    torch.testing.assert_close(module.w.detach(), after(3))
    assert run.strategy.federation.history.summary() == {}


def test_a_value_logged_in_some_rounds_chooses_among_those() -> None:
    run = trainer(max_epochs=4)
    run.fit(Sometimes(), points(), points())
    assert run.strategy.federation.rounds == 4
    summary = run.strategy.federation.history.summary()
    assert summary["best/round"] == 0
    assert summary["best/val_acc"] == 0.5
    assert summary["last10/val_acc"] == pytest.approx((0.5 + 0.3) / 2)


class Exhausted(FederatedCallback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: next(iter(())))


@pytest.mark.parametrize(
    "hook", ["on_train_epoch_start", "on_round_start", "on_validation_end", "on_train_epoch_end"]
)
def test_a_stop_iteration_is_an_error_and_no_end(hook: str) -> None:
    run = trainer(max_epochs=3, callbacks=[Exhausted(hook)], num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match=r"Expected a round to run to its end, but .*StopIter"):
        run.fit(Quadratic(), points(), points())


ERRORS = (
    "val_mse val/rmse valMSE val_error top1_err val_ppl val_perplexity cer val_nll WER val_mae/std",
    "global/val_mae hingeLoss val_losses MSE_val val_nrmse val_crps huber fpr",
)


@pytest.mark.parametrize("name", " ".join(ERRORS).split())
def test_of_losses_and_errors_the_smallest_is_the_best(name: str) -> None:
    assert not higher_is_better(name)
    history = History()
    for round, value in enumerate([3.0, 1.0, 2.0]):
        history.update(round, {name: value})
    assert history.summary()["best/round"] == 1


@pytest.mark.parametrize(
    "name", ["val_acc", "val_auroc", "f1", "R2", "merit", "val_cerberus", "interrater", "powerful"]
)
def test_of_everything_else_the_largest_is_the_best(name: str) -> None:
    assert higher_is_better(name)
    history = History()
    for round, value in enumerate([2.0, 3.0, 1.0]):
        history.update(round, {"val_mse": -value, name: value})
    assert history.summary()["best/round"] == 1
