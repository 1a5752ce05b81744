"""Recorded steps of a LightningModule of the user's: the numbers of the steps themselves.

Each module reads something that a callback changes during the fit, between rounds or between
clients. A run that records must end with the bits of one that doesn't, and replay honest steps.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_pfl.core.tree import Tree
from lightning_pfl.engine import trace
from lightning_pfl.methods import Ditto, FedAvg, FedProx, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal
from tests.engine.nets import CLASSES, image_clients

ROUNDS = 4
GAIN = 1.0
GAINS = [1.0]
HERE: Any = sys.modules[__name__]
SLOW = pytest.mark.slow
ENGINES = pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record at the second call, so that short tests replay."""
    monkeypatch.setattr(trace, "WARM_UP", 1)
    yield
    torch.set_default_dtype(torch.float32)


class Plain(L.LightningModule):
    """An ordinary module."""

    hparams: Any

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters(settings)
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.Tanh())
        self.head = nn.Linear(4, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.scaled(F.cross_entropy(self(x), y))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Changing(Callback):
    """Changes something before each round but the first, or after each client."""

    def __init__(self, change: Callable[[Any, int], Any], often: bool) -> None:
        self.change, self.often, self.done = change, often, 0

    def _change(self, trainer: L.Trainer) -> None:
        self.done += 1
        self.change(trainer.lightning_module, self.done)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch and not self.often:
            self._change(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.often:
            self._change(trainer)


def train(
    make: Callable[[], Any],
    together: bool,
    change: Callable[[Any, int], Any] = lambda *_: None,
    often: bool = False,
    limit: int = 99,
    sizes: tuple[int, ...] = (8, 8, 8, 8),
    method: Method | None = None,
    engine: str = "auto",
    **options: Any,
) -> Fit:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "LIMIT", limit)
        patch.setattr("lightning_pfl.engine.probe.batching_pays", lambda *_: together)
        # Put back afterwards what a change replaces.
        patch.setattr(HERE, "GAINS", [1.0])
        patch.setattr(kept, "values", [1.0], raising=False)
        for owner, name in ((HERE, "GAIN"), (HERE, "bent"), (ReadsClass, "gain"),
                            (ReadsClass, "bent"), (ReadsMode, "scaled")):  # fmt: skip
            patch.setattr(owner, name, inspect.getattr_static(owner, name))
        torch.set_default_dtype(torch.float32)
        random.seed(0)
        np.random.seed(0)
        return fit(
            FedAvg(local_epochs=2) if method is None else method,
            image_clients(sizes),
            make(),
            ROUNDS,
            engine,
            callbacks=[Changing(change, often)],
            options={"chunk_size": 2},
            **options,
        )


def replays(run: Fit) -> int:
    selected: Any = run.federation.engine
    engine = selected._engines["training_step"]
    return int(engine.whole.used + engine.traces.used)


def assert_same(recorded: Fit, plain: Fit) -> None:
    assert replays(plain) == 0
    for found, expected in zip(recorded.recorder.servers, plain.recorder.servers, strict=True):
        assert_trees_equal(found, expected)
    assert_trees_equal(recorded.client_state, plain.client_state)
    assert recorded.metrics == plain.metrics
    for one, other in zip(recorded.recorder.rounds, plain.recorder.rounds, strict=True):
        assert one.metrics == other.metrics


def models(run: Fit) -> Tree:
    return {str(number): tree for number, tree in enumerate(run.recorder.servers)}


# --- steps that are recorded ----------------------------------------------------------------------


class ReadsAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weights = 1.0, (1.0, 2.0)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale * self.weights[0]


class ReadsHparam(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.hparams.scale * self.hparams["scale"]  # type: ignore[no-any-return]


class ReadsGlobal(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * GAIN


class ReadsClass(Plain):
    gain = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.gain

    @staticmethod
    def bent(loss: Tensor) -> Tensor:
        return loss

    def scaled(self, loss: Tensor) -> Tensor:
        return self.bent(loss * self.twice)


class ReadsFunction(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return bent(loss)


def bent(loss: Tensor) -> Tensor:
    return loss


class ReadsTensor(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones((), dtype=torch.float64)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale


class ReadsBuffer(ReadsTensor):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)


class ReadsMask(Plain):
    """No client has a mask of its own, as infinities can't be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, torch.inf], dtype=torch.float64))

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale[0]  # type: ignore[index]


class ReadsFrozen(ReadsTensor):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)


class MakesTensor(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * torch.full((), 1 / 3)


class ReadsMode(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.head.training else 3 * loss


class Inherits(ReadsAttribute):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "other": None}


class Logs(Plain):
    """Logs by other options in each form of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.kind = False, "mean"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, reduction="none")
        right = (logits.detach().argmax(1) == y).double()
        self.log_dict({"loss": loss.mean(), "acc": right.mean()}, on_step=True, on_epoch=True)
        self.log("again", loss.mean(), batch_size=1)
        self.log("again", right.mean(), batch_size=3 * len(x))
        self.log("size", len(x), batch_size=2 * len(x))
        self.log("most", loss.max(), reduce_fx="max", prog_bar=self.shown, logger=not self.shown)
        self.log("all", loss.sum(), reduce_fx=torch.sum)
        self.log(f"{self.kind}_loss", loss.mean())
        return loss.mean()


class HandsTheNumberOn(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared(batch, batch_idx, "train")

    def shared(self, batch: Any, number: int, stage: str) -> Tensor:
        x, y = batch if isinstance(number, int) else ()  # pytest rewrites asserts
        self.log(f"{stage}_acc", multiclass_accuracy(
            self(x).softmax(1), y, CLASSES, average="micro", validate_args=False))  # fmt: skip
        return F.nll_loss(self(x).log_softmax(1), y)


class Regularised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn, self.val_acc = nn.CrossEntropyLoss(), torchmetrics.MeanMetric()
        self.backbone.append(nn.BatchNorm1d(4).double())

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        with torch.no_grad():
            scale = self.head.weight.norm()
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return self.loss_fn(self(batch[0]), batch[1]) + 0.01 * penalty / (1 + scale)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_acc(self(batch[0]).mean())
        self.log("val_acc", self.val_acc)


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Draws(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * torch.rand((), dtype=torch.float64)


class DrawsWithoutKeys(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = F.rrelu(self(batch[0]), training=True)
        drawn = torch.multinomial(logits.detach().softmax(1), 1).squeeze(1)
        return F.cross_entropy(logits, batch[1]) + F.cross_entropy(logits, drawn)


class Weighted(PersonalizedModule):
    """Overrides a function of PersonalizedModule, which still has means of samples."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.Tanh()), nn.Linear(4, CLASSES), lr=0.1
        )
        self.double()
        self.scale = 1.0

    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        values = super().per_sample(batch)
        return {**values, "loss": values["loss"] * self.scale}


def set_scale(module: Any, number: int) -> None:
    module.scale = 1.0 + 0.1 * number


def set_hparam(module: Any, number: int) -> None:
    module.hparams["scale"] = 1.0 + 0.1 * number


def set_global(module: Any, number: int) -> None:
    HERE.GAIN = 1.0 + 0.1 * number


def set_function(module: Any, number: int) -> None:
    HERE.bent = (lambda loss: 2 * loss) if number % 2 else (lambda loss: 3 * loss)


def set_class(module: Any, number: int) -> None:
    ReadsClass.gain = 1.0 + 0.1 * number
    ReadsClass.bent = staticmethod(lambda loss: 2 * loss)  # type: ignore[method-assign]


def set_tensor(module: Any, number: int) -> None:
    if number % 2:
        module.scale = torch.full_like(module.scale, 1.0 + 0.1 * number)
    else:
        module.scale.mul_(1.5)


def set_memory(module: Any, number: int) -> None:
    module.scale.data = torch.full_like(module.scale, 1.0 + 0.1 * number)


def set_type(module: Any, number: int) -> None:
    torch.set_default_dtype(torch.float64 if number % 2 else torch.float32)


def set_mode(module: Any, number: int) -> None:
    module.head.train(number % 2 == 0)


def set_step(module: Any, number: int) -> None:
    """Replaces the loss of all modules, and then a method of this one."""
    if number == 1:
        ReadsMode.scaled = lambda self, loss: 2 * loss  # type: ignore[method-assign]
    else:
        module.scaled = (lambda loss: 2 * loss) if number % 2 else (lambda loss: 3 * loss)


def set_logs(module: Any, number: int) -> None:
    module.shown, module.kind = number % 2 == 1, ("a", "b", "c")[number % 3]


HONEST: list[Any] = [
    (ReadsAttribute, set_scale),
    (functools.partial(ReadsHparam, scale=1.0), set_hparam),
    (ReadsGlobal, set_global),
    (ReadsClass, set_class),
    (ReadsFunction, set_function),
    (ReadsTensor, set_tensor),
    (ReadsTensor, set_memory),
    (ReadsBuffer, set_memory),
    (ReadsMask, set_memory),
    (ReadsFrozen, set_memory),
    (MakesTensor, set_type),
    (ReadsMode, set_mode),
    (ReadsMode, set_step),
    (Inherits, set_scale),
    (Weighted, set_scale),
    (Logs, set_logs),
    (HandsTheNumberOn, set_scale),
    (Regularised, set_scale),
    (Scheduled, set_scale),
    (Draws, set_scale),
    (DrawsWithoutKeys, set_scale),
]


@pytest.mark.parametrize(
    ("make", "change"), HONEST, ids=lambda value: getattr(value, "__name__", "ReadsHparam")
)
@pytest.mark.parametrize(
    ("often", "sizes", "together"),
    [
        pytest.param(False, (8, 8, 8, 8), True, id="rounds, at once"),
        pytest.param(True, (8, 0, 10, 12), False, id="clients, one by one"),
        pytest.param(True, (8, 0, 10, 12), True, id="clients, at once", marks=SLOW),
        pytest.param(False, (8, 8, 8, 8), False, id="rounds, one by one", marks=SLOW),
    ],
)
def test_honest_steps_are_replayed(
    make: Any, change: Any, often: bool, sizes: tuple[int, ...], together: bool
) -> None:
    recorded, plain = (train(make, together, change, often, limit, sizes) for limit in (99, 0))
    assert_same(recorded, plain)
    assert replays(recorded) > 5


@ENGINES
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        (FedRep(head_epochs=2), {}),
        (Ditto(0.5, local_epochs=2), {"gradient_clip_val": 0.1}),
        (FedProx(0.5, local_epochs=2), {"accumulate_grad_batches": 2}),
        (FedAvg(local_epochs=4), {"accumulate_grad_batches": 2}),
        (FedAvg(local_epochs=2), {"precision": "bf16-mixed"}),
        (FedAvg(local_epochs=2), {"precision": "64-true"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "-".join(value),
)
def test_methods_and_flags(method: Method, flags: dict[str, Any], together: bool) -> None:
    make = ReadsAttribute if flags.get("precision") != "bf16-mixed" else Single
    options = {"method": method, "sizes": (8, 8, 12, 8), **flags}
    recorded, plain = (
        train(make, together, set_scale, limit=limit, **options) for limit in (99, 0)
    )
    assert replays(recorded) > 5
    assert_same(recorded, plain)


class Single(ReadsAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (ReadsAttribute, set_scale),
        (Logs, set_logs),
        (Weighted, set_scale),
        (Regularised, set_scale),
    ],
)
def test_both_engines_agree(make: Any, change: Any) -> None:
    options: dict[str, Any] = {"sizes": (8, 0, 10, 12)}
    reference = train(make, False, change, engine="reference", **options)
    assert replays(reference) == 0
    for together in (True, False):
        recorded = train(make, together, change, **options)
        assert replays(recorded) > 5
        assert_trees_close(models(recorded), models(reference))
        assert recorded.metrics == pytest.approx(reference.metrics, rel=1e-9)


# --- steps that read what a recording doesn't know ------------------------------------------------


class ReadsEpoch(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + self.current_epoch)


class ReadsTrainer(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + self.trainer.current_epoch)


class ReadsSteps(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + self.global_step)


class ReadsList(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * GAINS[-1]


class ReadsHeld(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"gain": 1.0}

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.held["gain"]


class ReadsObject(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace(gain=1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.held.gain  # type: ignore[no-any-return]


class ReadsHeldHparam(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.hparams.held["gain"]  # type: ignore[no-any-return]


class CountsHparam(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        self.hparams["count"] += 1
        return loss * self.hparams["count"]  # type: ignore[no-any-return]


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def scaled(self, loss: Tensor) -> Tensor:
        self.count += 1
        return loss * self.count


class Appends(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def scaled(self, loss: Tensor) -> Tensor:
        self.seen.append(1)
        return loss * len(self.seen)


class CountsInBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros((), dtype=torch.float64)

    def scaled(self, loss: Tensor) -> Tensor:
        self.count.add_(1)
        return loss * self.count


class HasClosure(Plain):
    def __init__(self) -> None:
        super().__init__()
        held = self.held = [1.0]
        self.function = lambda loss: loss * held[-1]

    def scaled(self, loss: Tensor) -> Tensor:
        return self.function(loss)  # type: ignore[no-any-return, no-untyped-call]


class ReadsProperty(Plain):
    @property
    def gain(self) -> float:
        return GAINS[-1]

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.gain


class GetsAttributes(Plain):
    def __getattr__(self, name: str) -> Any:
        return GAINS[-1] if name == "gain" else super().__getattr__(name)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.gain  # type: ignore[no-any-return]


def times_gain(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return function(*args) * GAINS[-1]

    return wrapped


class IsDecorated(Plain):
    @times_gain
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


class Overrides(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * GAINS[-1]


class ReadsNumber(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + batch_idx)


class ComparesNumber(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return 2 * loss if batch_idx == 3 else loss


class LogsNumber(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", batch_idx, reduce_fx="max")
        return super().training_step(batch, batch_idx)


class DrawsInPython(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * random.random()


class DrawsInNumpy(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * float(np.random.rand())


class LogsFloat(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        self.log("value", float(loss.detach()))
        self.log("item", loss.item())
        return loss


class Branches(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return 2 * loss if loss > 1.09 else loss


class Masks(Plain):
    """The number of samples in the mean is a number in a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        return losses.mean() + losses[y > 0].sum() / (1 + len(losses[y > 0]))


class MasksDrawn(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(F.rrelu(self(x), training=True), y, reduction="none")
        return losses.mean() + losses[y > 0].sum()


class SelectsLarge(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        return losses.mean() + losses[losses >= losses.median()].mean()


class HasMetric(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.acc = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.acc(logits, y)
        self.log("acc", self.acc)
        return F.cross_entropy(logits, y)


class Catches(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        try:
            return loss * (1.0 if float(loss.detach()) > 1.09 else 2.0)
        except Exception:
            return loss


class OfFunction(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return kept(loss) * kept.values[-1]  # type: ignore[attr-defined, no-any-return]


def kept(loss: Tensor) -> Tensor:
    return loss


class HasDefault(Plain):
    def scaled(self, loss: Tensor, gains: Any = GAINS) -> Tensor:
        return loss * HasDefault.scaled.__defaults__[0][-1]  # type: ignore[index, no-any-return]


class Imports(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        import tests.engine.test_known_code_steps as here

        return loss * here.GAINS[-1]


class Switches(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        self.head.eval()
        return loss if self.head.training else 2 * loss


class HasHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda _, __, out: out * GAINS[-1])


class HasObject(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(Scaling().double())


class Scaling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * GAINS[-1]


def set_list(module: Any, number: int) -> None:
    GAINS.append(1.0 + 0.1 * number)
    kept.values = [1.0 + 0.1 * number]  # type: ignore[attr-defined]


def set_held(module: Any, number: int) -> None:
    held = module.hparams.get("held", getattr(module, "held", None))
    if isinstance(held, dict):
        held["gain"] = 1.0 + 0.1 * number
    elif isinstance(held, list):
        held.append(1.0 + 0.1 * number)
    else:
        held.gain = 1.0 + 0.1 * number


def nothing(*_: Any) -> None:
    pass


UNKNOWN: list[Any] = [
    (ReadsEpoch, nothing),
    (ReadsTrainer, nothing),
    (ReadsSteps, nothing),
    (ReadsList, set_list),
    (ReadsHeld, set_held),
    (ReadsObject, set_held),
    (lambda: ReadsHeldHparam(held={"gain": 1.0}), set_held),
    (lambda: CountsHparam(count=0), nothing),
    (Counts, nothing),
    (Appends, nothing),
    (CountsInBuffer, nothing),
    (HasClosure, set_held),
    (ReadsProperty, set_list),
    (GetsAttributes, set_list),
    (IsDecorated, set_list),
    (Overrides, set_list),
    (ReadsNumber, nothing),
    (ComparesNumber, nothing),
    (LogsNumber, nothing),
    (DrawsInPython, nothing),
    (DrawsInNumpy, nothing),
    (LogsFloat, nothing),
    (Branches, nothing),
    (Masks, nothing),
    (MasksDrawn, nothing),
    (SelectsLarge, nothing),
    (HasMetric, nothing),
    (Catches, nothing),
    (OfFunction, set_list),
    (Imports, set_list),
    (Switches, nothing),
    (HasHook, set_list),
    (HasObject, set_list),
]


@pytest.mark.parametrize(
    ("make", "change"), UNKNOWN, ids=lambda value: getattr(value, "__name__", str(value))
)
@pytest.mark.parametrize(
    ("often", "together"),
    [
        pytest.param(False, False, id="rounds, one by one"),
        pytest.param(False, True, id="rounds, at once", marks=SLOW),
        pytest.param(True, False, id="clients, one by one", marks=SLOW),
        pytest.param(True, True, id="clients, at once", marks=SLOW),
    ],
)
def test_steps_that_may_read_more_are_taken(
    make: Any, change: Any, often: bool, together: bool
) -> None:
    recorded = train(make, together, change, often)
    assert_same(recorded, train(make, together, change, often, limit=0))
    assert replays(recorded) == 0


class BecomesUnknown(ReadsAttribute):
    """Its attribute holds a list in some rounds."""

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (self.scale if isinstance(self.scale, float) else self.scale[-1])


def set_scale_or_list(module: Any, number: int) -> None:
    if number == 3:
        module.scale = [2.0]
    elif number == 4:
        module.scale.append(5.0)
    else:
        module.scale = 1.0 + number % 2


@ENGINES
@pytest.mark.parametrize("often", [False, True], ids=["rounds", "clients"])
def test_a_step_is_recorded_while_it_is_known(often: bool, together: bool) -> None:
    options = {"change": set_scale_or_list, "often": often}
    recorded, plain = (
        train(BecomesUnknown, together, limit=limit, **options)  # type: ignore[arg-type]
        for limit in (99, 0)
    )
    assert replays(recorded) > 5
    assert_same(recorded, plain)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * GAINS[-1]


def with_unknown_layer() -> PersonalizedModule:
    torch.manual_seed(1)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), Unknown())
    return PersonalizedModule(backbone, nn.Linear(4, CLASSES), lr=0.1).double()


def set_list_late(module: Any, number: int) -> None:
    """Between two clients of a round, after steps have been replayed."""
    if number == 10:
        GAINS.append(3.0)


@ENGINES
def test_steps_of_unknown_layers_are_compared_again_after_a_hook(together: bool) -> None:
    options: dict[str, Any] = {"change": set_list_late, "often": True}
    recorded, plain = (
        train(with_unknown_layer, together, limit=limit, **options) for limit in (99, 0)
    )
    assert replays(recorded) > 5
    assert_same(recorded, plain)


def test_what_a_step_prints_is_printed_in_each(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Plain):
        def scaled(self, loss: Tensor) -> Tensor:
            print("a step")
            return loss

    run = train(Prints, together=False)
    steps = ROUNDS * 4 * 4
    assert replays(run) == 0
    assert capsys.readouterr().out.count("a step") >= steps


@ENGINES
def test_a_resumed_run_ends_with_the_same_bits(together: bool, tmp_path: Any) -> None:
    def run(rounds: int, path: Any = None) -> Fit:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "ROUNDS", rounds)
            return train(Logs, together, lambda module, _: set_logs(module, 1), ckpt_path=path)

    whole = run(5)
    checkpoint = run(2).save(tmp_path / "last.ckpt")
    resumed = run(5, checkpoint)
    assert_trees_equal(resumed.server, whole.server)
    assert_trees_equal(resumed.client_state, whole.client_state)
    assert resumed.metrics == whole.metrics
    assert math.isfinite(resumed.metrics["loss"])
