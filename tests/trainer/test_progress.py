"""What the hooks of callbacks get, which are called once per client."""

from __future__ import annotations

import logging
import random
from datetime import timedelta
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pfl.data import FederatedLoaders
from lightning_pfl.engine.checks import Checks
from lightning_pfl.methods import FedAvg
from lightning_pfl.testing import fit
from lightning_pfl.trainer.progress import ClientBatch, ClientOutputs
from tests.trainer.setting import SIZES, Quadratic, points, trainer


class Watching(L.Callback):
    def __init__(self) -> None:
        self.found: list[tuple[Any, Any, int]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append((outputs, batch, batch_idx))


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_outputs_have_the_mean_loss_of_the_client(engine: str) -> None:
    """One minibatch at w = 0: the loss of client k is |c_k|^2 / 2."""
    callback = Watching()
    run = trainer(engine=engine, max_epochs=1, callbacks=[callback])
    run.fit(Quadratic(), points((1, 2, 1, 2)), points())
    losses = {batch: float(outputs["loss"]) for outputs, batch, _ in callback.found}
    assert losses == pytest.approx({0: 0.5, 1: 2.0, 2: 5.0, 3: 16.0})
    assert [number for *_, number in callback.found] == [0, 1, 2, 3]


class NamedTimer(Timer):
    """Changes nothing in a hook."""

    def on_fit_end(self, *args: Any) -> None:
        self.ended = True


class EachTimer(Timer):
    """Asks for the time at each client by a hook of its own."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
@pytest.mark.parametrize(("kind", "times"), [(Timer, 1), (NamedTimer, 1), (EachTimer, len(SIZES))])
def test_how_often_a_timer_says_that_the_time_is_over(
    kind: type[Timer], times: int, engine: str, caplog: Any
) -> None:
    timer = kind(timedelta(microseconds=1))  # over before the first client ends
    run = trainer(engine=engine, max_epochs=9, callbacks=[timer])
    with caplog.at_level(logging.INFO):
        run.fit(Quadratic(), points(), points())
    assert run.current_epoch == 1
    assert caplog.text.count("Time limit reached") == times


class Stepping(Quadratic):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Rates(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.steps += [step] if "lr-SGD" in metrics else []


class NamedMonitor(LearningRateMonitor):
    """Changes nothing in a hook of a step."""

    def on_train_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_start(trainer, *args, **kwargs)


@pytest.mark.parametrize("kind", [LearningRateMonitor, NamedMonitor])
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_a_learning_rate_is_logged_once_a_round(
    engine: str, kind: type[LearningRateMonitor]
) -> None:
    logger = Rates()
    monitor = kind("step")
    run = trainer(engine=engine, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    run.fit(Stepping(), points(), points())
    assert logger.steps == [0, 1]


@pytest.mark.parametrize(
    "use", [lambda b: b[0], len, list, lambda b: b.shape, lambda b: b.to("cpu")]
)
def test_a_batch_without_samples_says_so(use: Any) -> None:
    with pytest.raises((TypeError, AttributeError), match="`batch` is the client"):
        use(ClientBatch(3))


def test_a_batch_is_the_clients_id() -> None:
    assert ClientBatch(3) == 3
    assert f"{ClientBatch(3)}" == "3"
    assert {3: "d"}[ClientBatch(3)] == "d"


def test_other_outputs_are_named() -> None:
    with pytest.raises(KeyError, match="Expected the key 'loss', but got 'preds'"):
        ClientOutputs(loss=torch.zeros(()))["preds"]


class Noisy(Dataset[Any]):
    """Numbers that a transform has changed at random."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        value = position + random.random() + float(np.random.randn())
        return {"x": torch.tensor([value])}


class Line(L.LightningModule):
    """A module whose code is known."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.line(batch["x"]), torch.ones_like(batch["x"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.line(batch["x"]), torch.ones_like(batch["x"])))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Listing(Line):
    """One whose code isn't, and which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(random.random())
        return super().training_step(batch, batch_idx) + float(np.random.rand())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(random.random())
        self.log("val_loss", torch.tensor(float(np.random.randn())))


class Drawing(L.Callback):
    """Draws whenever a client is done."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_fit_start(self, *_: Any) -> None:
        random.seed(3)
        np.random.seed(3)

    def draw(self) -> None:
        self.drawn.append((random.random(), float(np.random.randn())))

    def on_train_batch_start(self, *_: Any) -> None:
        self.draw()

    def on_train_batch_end(self, *_: Any) -> None:
        self.draw()

    def on_validation_batch_end(self, *_: Any) -> None:
        self.draw()


@pytest.mark.parametrize("make", [Line, Listing])
@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_hooks_draw_numbers_of_their_own(engine: str, make: Any) -> None:
    """Whatever a data set or a step has drawn for the client before."""
    callback, rounds, clients = Drawing(), 3, 3
    data = FederatedLoaders([DataLoader(Noisy(), batch_size=2) for _ in range(clients)])
    fit(FedAvg(), data, make(), rounds, engine, val_data=data, callbacks=[callback])
    python, numpy = random.Random(3), np.random.RandomState(3)
    expected = [(python.random(), float(numpy.randn())) for _ in callback.drawn]
    assert callback.drawn == expected
    assert len(expected) == 3 * rounds * clients


class Bar(TQDMProgressBar):
    """May do anything, as a class of a user's."""


def bar_with_a_function() -> TQDMProgressBar:
    bar = TQDMProgressBar()
    bar.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    return bar


@pytest.mark.parametrize(
    ("make", "reads_alone"),
    [
        (TQDMProgressBar, True),
        (RichProgressBar, True),
        (ModelCheckpoint, True),
        (lambda: ModelCheckpoint(every_n_train_steps=1), False),
        (lambda: ModelCheckpoint(train_time_interval=timedelta(hours=1)), False),
        (Bar, False),
        (bar_with_a_function, False),
        (Watching, False),
    ],
)
def test_code_is_read_again_after_hooks_that_may_change_it(
    make: Any, reads_alone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Once for each of 4 clients: a bar, and checkpoints of whole rounds, write to no module."""
    found: list[Checks] = []

    def look(self: Checks, *_: Any) -> None:
        found.append(self)

    monkeypatch.setattr(Checks, "look_after_hooks", look)
    run = trainer(
        engine="sequential", max_epochs=1, callbacks=[make()], default_root_dir=tmp_path,
        enable_progress_bar=True,
        enable_checkpointing=True, limit_val_batches=0,
    )  # fmt: skip
    run.fit(Quadratic(), points((1, 2, 1, 2)), points())
    assert len(found) == (0 if reads_alone else 4)
