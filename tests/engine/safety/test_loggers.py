"""Steps that call the Trainer's logger by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from lightning_pfl.methods import FedAvg
from lightning_pfl.testing.fitting import fit
from tests.engine.nets import CLASSES, image_clients
from tests.engine.users_steps import Plain

SIZES, ROUNDS = (8, 5, 8, 12), 2
STEPS = (2 + 2 + 2 + 3) * ROUNDS
"""All clients' minibatches of four samples."""


class Heard(Logger):
    """Counts what steps say to it."""

    name, version = "mine", 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.steps, self.evaluations = folder, 0, 0

    @property
    def log_dir(self) -> str:
        return str(self.folder)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps += "step" in metrics
        self.evaluations += "evaluation" in metrics

    @property
    def experiment(self) -> Any:
        return self


class Says(Plain):
    """Says what doesn't depend on a client, by one of two ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.said = way, 0
        self.layer = nn.Linear(25, CLASSES).double()

    def say(self, what: str) -> None:
        logger: Any = self.logger
        assert isinstance(logger, Heard)
        assert Path(logger.log_dir).is_dir()
        logger = logger.experiment if self.way == "experiment" else logger
        logger.log_metrics({what: 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.say("step")
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.say("evaluation")
        self.log("val_loss", self.layer(batch[0].flatten(1)).square().mean())


def run(module: Says, engine: str, folder: Path, together: bool = True) -> Heard:
    logger, data = Heard(folder), image_clients(SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pfl.engine.probe.batching_pays", lambda *_: together)
        patch.setattr("lightning_pfl.engine.probe.evaluating_pays", lambda *_: together)
        fitted = fit(FedAvg(), data, module, ROUNDS, engine, val_data=data, logger=logger)
    assert fitted.trainer.logger is logger
    return logger


@pytest.mark.parametrize("way", ["logger", "experiment"])
@pytest.mark.parametrize(
    ("engine", "together"),
    [("reference", False), ("sequential", False), ("auto", False), ("auto", True)],
)
def test_each_step_of_each_client_is_heard_once(
    engine: str, together: bool, way: str, tmp_path: Path
) -> None:
    heard = run(Says(way), engine, tmp_path, together)
    assert (heard.steps, heard.evaluations) == (STEPS, STEPS)


@pytest.mark.parametrize("way", ["logger", "experiment"])
def test_many_clients_at_once_are_refused(way: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the step calls a logger by itself"):
        run(Says(way), "vectorized", tmp_path)


class Counts(Says):
    """Changes attributes, which a probe puts back."""

    def __init__(self) -> None:
        super().__init__("none")
        self.count, self.listed = 0, list[int]()
        self.tensor = torch.zeros(())

    def say(self, what: str) -> None:
        if what == "step":
            self.count += 1
            self.listed.append(self.count)
            self.tensor += 1


def test_attributes_count_each_step_of_each_client_once(tmp_path: Path) -> None:
    module = Counts()
    run(module, "auto", tmp_path)
    assert module.count == int(module.tensor) == STEPS
    assert module.listed == [*range(1, STEPS + 1)]
