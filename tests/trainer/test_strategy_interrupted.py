"""Runs that end from outside: by Ctrl-C, by SIGTERM, after the last round."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lightning_pfl import load_clients
from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.methods import FedAvg, LocalOnly
from tests.callbacks.setting import quadratics, split
from tests.trainer.setting import Quadratic, points, trainer


class Interrupt(FederatedCallback):
    """Stops the program in round 2, at a hook."""

    def __init__(self, hook: str, sigterm: bool = False) -> None:
        self.sigterm = sigterm
        setattr(self, hook, self.stop)

    def stop(self, run: Any, *_: Any) -> None:
        if run.current_epoch != 2 or run.sanity_checking:
            return
        if not self.sigterm:
            raise KeyboardInterrupt
        run._signal_connector.received_sigterm = True


def run(folder: Path, *callbacks: Any, **kwargs: Any) -> Any:
    kept = ModelCheckpoint(folder, every_n_epochs=100)
    return trainer(
        LocalOnly(), max_epochs=4, callbacks=[kept, *callbacks], enable_checkpointing=True, **kwargs
    )


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("hook", "sigterm", "code", "rounds"),
    [
        ("on_train_batch_start", False, 1, 2),
        ("on_aggregation_start", False, 1, 2),
        ("on_validation_batch_start", False, 1, 3),
        ("on_train_batch_start", True, 143, 3),
    ],
)
def test_an_interrupted_run_is_saved_and_goes_on_as_if_it_had_not_been(
    hook: str, sigterm: bool, code: int, rounds: int, tmp_path: Path, caplog: Any
) -> None:
    whole = run(tmp_path / "whole")
    whole.fit(Quadratic(), points(), points())
    first = run(tmp_path, Interrupt(hook, sigterm))
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as ended:
        first.fit(Quadratic(), points(), points())
    assert re.search(rf"after {rounds} rounds and is saved .*last\.ckpt'. Go on", caplog.text)
    assert ended.value.code == code
    rest = run(tmp_path)
    rest.fit(Quadratic(), points(), points(), ckpt_path="last")
    for client in range(4):
        expected: Any = whole.strategy.client_state_dict(client)
        found = rest.strategy.client_state_dict(client)
        assert torch.equal(found["w"], expected["w"])
    assert rest.callback_metrics.keys() == whole.callback_metrics.keys()
    for name, value in whole.callback_metrics.items():
        assert torch.equal(rest.callback_metrics[name], value), name


def test_a_run_without_checkpoints_says_that_it_is_lost(caplog: Any) -> None:
    lost = trainer(LocalOnly(), max_epochs=4, callbacks=[Interrupt("on_train_batch_start")])
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
        lost.fit(Quadratic(), points(), points())
    assert "after 2 rounds and isn't saved" in caplog.text


class Saving(Callback):
    """Saves a checkpoint at the end of each round, as a callback of a user's may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has changed")
@pytest.mark.parametrize("killed", [0, 1, 3])
def test_callbacks_that_monitor_values_see_the_round_of_a_checkpoint_written_before_them(
    killed: int, tmp_path: Path
) -> None:
    def run(folder: Path, resume: Path | None = None) -> Any:
        kept = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1)
        # No round is better by so much than the first one: it is the last but three.
        stopping = EarlyStopping("val_loss", min_delta=100.0, patience=3)
        callbacks = [stopping, Saving(folder), kept]
        run = trainer(LocalOnly(), max_epochs=6, callbacks=callbacks, enable_checkpointing=True)
        run.fit(Quadratic(), points(), points(), ckpt_path=resume)
        assert (run.current_epoch, stopping.wait_count, stopping.stopped_epoch) == (4, 3, 3)
        return {Path(path).name: value for path, value in kept.best_k_models.items()}

    whole = run(tmp_path / "whole")
    assert whole.keys() == {f"epoch={round}.ckpt" for round in range(4)}
    rest = run(tmp_path / "rest", tmp_path / "whole" / f"{killed}.ckpt")
    assert rest == {name: whole[name] for name in list(whole)[killed:]}


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("check_on_train_epoch_end", [True, False])
def test_a_run_that_is_terminated_in_the_round_in_which_it_stops_early_has_no_further_one(
    check_on_train_epoch_end: bool, hook: str, tmp_path: Path
) -> None:
    def stopping() -> EarlyStopping:
        # No round is better by so much than the first one: the third is the last.
        return EarlyStopping(
            "val_loss",
            min_delta=100.0,
            patience=2,
            check_on_train_epoch_end=check_on_train_epoch_end,
        )

    whole = run(tmp_path / "whole", stopping())
    whole.fit(Quadratic(), points(), points())
    first = run(tmp_path, stopping(), Interrupt(hook, sigterm=True))
    with pytest.raises(SystemExit):
        first.fit(Quadratic(), points(), points())
    rest = run(tmp_path, stopping())
    rest.fit(Quadratic(), points(), points(), ckpt_path="last")
    rounds = [each.strategy.federation.rounds for each in (whole, first, rest)]
    assert rounds == [3, 3, 3]
    assert rest.callback_metrics.keys() == whole.callback_metrics.keys()
    # Without the callback, it goes on to the end.
    free = run(tmp_path)
    with pytest.warns(UserWarning, match="Be aware that when using `ckpt_path`"):
        free.fit(Quadratic(), points(), points(), ckpt_path="last")
    assert free.strategy.federation.rounds == 4


def test_a_run_that_was_killed_after_its_last_round_has_its_summary(tmp_path: Path) -> None:
    whole = trainer(LocalOnly(), max_epochs=3)
    whole.fit(Quadratic(), points(), points())
    path = str(tmp_path / "last.ckpt")
    whole.save_checkpoint(path)
    rest = trainer(LocalOnly(), max_epochs=3)
    rest.fit(Quadratic(), points(), points(), ckpt_path=path)
    assert "last10/val_loss" in whole.callback_metrics
    assert "best/val_loss" in whole.callback_metrics
    for name, value in whole.callback_metrics.items():
        assert torch.equal(rest.callback_metrics[name], value), name


@pytest.mark.parametrize(
    ("every", "tuned"), [(1, ["ft/val_loss"]), (2, [])], ids=["with tuned models", "earlier round"]
)
def test_a_resumed_run_knows_what_was_evaluated_for_each_client(
    every: int, tuned: list[str], tmp_path: Path
) -> None:
    """Also without a further evaluation, and so do the clients of the file."""

    def run(path: str | None = None) -> Any:
        callbacks = [HeadFineTuning(epochs=1) for _ in tuned]
        run = trainer(FedAvg(), max_epochs=3, callbacks=callbacks, check_val_every_n_epoch=every)
        run.fit(split(), quadratics(), quadratics((4, 0, 3, 5)), ckpt_path=path)
        return run

    whole = run()
    path = str(tmp_path / "last.ckpt")
    whole.save_checkpoint(path)
    expected = whole.strategy.client_metrics()
    assert expected.keys() == {"num_samples", "val_loss", "global/val_loss", *tuned}
    assert expected["val_loss"].keys() == {"0", "2", "3"}
    assert run(path).strategy.client_metrics("val") == expected
    assert load_clients(path, split(), FedAvg()).client_metrics() == expected


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_fit_knows_nothing_of_another_modules_evaluation() -> None:
    run = trainer(FedAvg(), max_epochs=1)
    run.validate(split(), quadratics(), verbose=False)
    assert run.strategy.client_metrics()
    run.fit(split(), quadratics())
    with pytest.raises(ValueError, match="evaluations of none"):
        run.strategy.client_metrics()
