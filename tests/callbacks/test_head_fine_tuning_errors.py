"""HeadFineTuning says what it was given, what it needs, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.fitting import QUIET
from tests.callbacks.setting import Data, quadratics, split, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"epochs": 5, "steps": 3},
            "exactly one of `epochs` and `steps`, but got epochs=5, steps=3",
        ),
        ({"epochs": None}, "but got epochs=None, steps=None"),
        ({"epochs": -1}, "Expected `epochs` to be a whole number >= 0, but got epochs=-1"),
        ({"steps": 1.5}, "Expected `steps` to be a whole number >= 0, but got steps=1.5"),
        ({"lr": -0.1}, "Expected `lr` to be a finite number > 0 or None, but got lr=-0.1"),
        ({"lr": "1"}, "Expected `lr` to be a finite number > 0 or None, but got lr='1'"),
        ({"lr": True}, "Expected `lr` to be a finite number > 0 or None, but got lr=True"),
        ({"when": "start"}, "Expected `when` to be 'end' or 'evaluation', but got when='start'"),
        ({"scope": None}, "Expected `scope` to name parameters, but got scope=None"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadFineTuning(**arguments)


def test_a_scope_that_matches_nothing_ends_the_run_before_it_begins() -> None:
    run = trainer(FedAvg(), HeadFineTuning("neck"))
    with pytest.raises(Exception, match=r"Expected `scope` to match .* but got scope='neck'"):
        run.fit(split(), quadratics())
    assert run.global_step == 0


def test_another_strategy_is_refused() -> None:
    run = L.Trainer(max_epochs=1, callbacks=[HeadFineTuning()], **QUIET)
    with pytest.raises(Exception, match="HeadFineTuning is used with SingleDeviceStrategy"):
        run.fit(split(), DataLoader(TensorDataset(torch.ones(2), torch.ones(2, 1))))


def test_models_of_nothing_and_nobody_are_errors() -> None:
    tuning = HeadFineTuning()
    with pytest.raises(RuntimeError, match="Expected a trained or loaded federation, but got none"):
        tuning.client_state_dict(0)
    trainer(FedAvg(), tuning).fit(split(), quadratics())
    with pytest.raises(KeyError, match=r"Expected `client` to be an id in 0\.\.3"):
        tuning.client_state_dict(4)


def test_training_data_are_needed_and_must_be_those_of_the_run(tmp_path: Path) -> None:
    run = trainer(FedAvg())
    run.fit(split(), quadratics())
    path = tmp_path / "run.ckpt"
    run.save_checkpoint(path)
    with pytest.raises(Exception, match="Expected training data to fine-tune on, but got none"):
        trainer(FedAvg(), HeadFineTuning()).test(split(), quadratics(), ckpt_path=path)
    other = Data(quadratics().subset([0, 1]), test=quadratics())
    with pytest.raises(
        Exception, match=r"training data of the 4 clients .* but got 2 clients or other"
    ):
        trainer(FedAvg(), HeadFineTuning()).test(split(), datamodule=other, ckpt_path=path)


def test_two_of_them_would_share_their_names() -> None:
    run = trainer(FedAvg(), HeadFineTuning(), HeadFineTuning("full"))
    with pytest.raises(Exception, match="Expected one HeadFineTuning, but got several"):
        run.fit(split(), quadratics())
