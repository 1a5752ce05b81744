"""Modules of a user's whose steps read something that a callback changes during the fit.

``HONEST`` are those that may be recorded, ``UNKNOWN`` those that may read more, each with what
changes between rounds or clients.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import sys
from random import getrandbits
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_pfl.models.base import PersonalizedModule
from tests.engine.nets import CLASSES

GAIN = 1.0
GAINS = [1.0]
HERE: Any = sys.modules[__name__]


def as_they_were(patch: pytest.MonkeyPatch) -> None:
    """Begin as if nothing had changed, and put back afterwards what a change replaces."""
    patch.setattr(HERE, "GAINS", [1.0])
    patch.setattr(kept, "values", [1.0], raising=False)
    for owner, name in (
        *((HERE, "GAIN"), (HERE, "bent"), (F, "linear")),
        *((ReadsClass, "gain"), (ReadsClass, "bent"), (ReadsMode, "scaled")),
    ):
        patch.setattr(owner, name, inspect.getattr_static(owner, name))
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        patch.setattr(turned, name, getattr(turned, name))
    if "of_class" in vars(Asks):
        del Asks.of_class  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float32)
    random.seed(0)
    np.random.seed(0)


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


# --- steps that are recorded ----------------------------------------------------------------------


class ReadsAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weights = 1.0, (1.0, 2.0)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale * self.weights[0]


class ReadsType(ReadsAttribute):
    """Tells numbers apart that are equal."""

    def scaled(self, loss: Tensor) -> Tensor:
        factor = 2 if self.scale is True else math.copysign(3.0, self.scale)
        return loss * factor * (5 if isinstance(self.scale, float) else 7)


class Asks(ReadsAttribute):
    """Asks for what it may have: an attribute, one of its class, a layer, a hyper-parameter."""

    layer: Any

    def scaled(self, loss: Tensor) -> Tensor:
        loss = loss * getattr(self, "late", 1.0) + 0.1 * hasattr(self, "late")
        late = getattr(self, "of_class", None)
        if late is not None:
            loss = late(loss)
        if hasattr(self, "layer"):
            loss = loss + self.layer.weight.square().sum()
        weight: float = self.hparams.get("weight", 0.5) + ("weight" in self.hparams)
        return loss * weight


class HoldsLog(Plain):
    """Has a layer with an attribute that is called as Lightning's function for logs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(Logging())

    @property
    def held(self) -> dict[str, float]:
        held: dict[str, float] = self.backbone[-1].log  # type: ignore[assignment]
        return held


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = {"gain": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.log["gain"]


class HasOneOfTwo(ReadsAttribute):
    """Reads a layer that it has only with another setting."""

    other_head: Any

    def scaled(self, loss: Tensor) -> Tensor:
        if self.scale < 0:
            loss = loss + self.other_head(self.others).sum()
        return super().scaled(loss)


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


class CallsWithDefaults(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return turned(loss)


def turned(loss: Tensor, by: float = 1.0, *, times: float = 1.0) -> Tensor:
    return loss * by * times


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


class LogsTensor(ReadsTensor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("scale", self.scale)
        return super().training_step(batch, batch_idx)


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


def set_late(module: Any, number: int) -> None:
    if hasattr(module, "late"):
        del module.late
    else:
        module.late = 1.0 + 0.1 * number
    module.hparams.pop("weight", None)
    if number % 3 == 1:
        module.hparams["weight"] = 1.0 + 0.1 * number
        Asks.of_class = lambda self, loss: 2 * loss  # type: ignore[attr-defined]
    if number % 3 == 2:
        if "of_class" in vars(Asks):
            del Asks.of_class  # type: ignore[attr-defined]
        module.layer = nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False)
        nn.init.ones_(module.layer.weight)


def set_type_of_number(module: Any, number: int) -> None:
    module.scale = (True, 1, 1.0, 0.0, -0.0)[number % 5]


def set_hparam(module: Any, number: int) -> None:
    module.hparams["scale"] = 1.0 + 0.1 * number


def set_global(module: Any, number: int) -> None:
    HERE.GAIN = 1.0 + 0.1 * number


def set_function(module: Any, number: int) -> None:
    HERE.bent = (lambda loss: 2 * loss) if number % 2 else (lambda loss: 3 * loss)


def set_defaults(module: Any, number: int) -> None:
    if number % 2:
        turned.__defaults__ = (1.0 + 0.1 * number,)
    else:
        turned.__kwdefaults__ = {"times": 1.0 + 0.1 * number}


def set_code(module: Any, number: int) -> None:
    other = (lambda loss, by: 2 * loss * by) if number % 2 else (lambda loss, by: 3 * loss)
    turned.__code__ = other.__code__


def set_linear(module: Any, number: int) -> None:
    """Replace what layers of torch call."""
    F.linear = half if number % 2 else twice  # type: ignore[assignment]


def half(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return 0.5 * x @ weight.t() + bias


def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return 2.0 * x @ weight.t() + bias


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


def nothing(*_: Any) -> None:
    pass


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


def with_gain() -> tuple[Any, Any]:
    gain = 1.0

    def function(loss: Tensor) -> Tensor:
        return loss * gain

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    return function, change


class ReadsAround(Plain):
    """Calls a function with a number around it, which another function changes."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.change = with_gain()

    def scaled(self, loss: Tensor) -> Tensor:
        return self.function(loss)  # type: ignore[no-any-return]


def set_around(module: Any, number: int) -> None:
    module.change(1.0 + 0.1 * number)


class CallsPartial(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(torch.mul, other=1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        return self.function(loss)


def set_partial(module: Any, number: int) -> None:
    module.function.keywords["other"] = 1.0 + 0.1 * number


def times_global(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return function(*args) * GAIN

    return wrapped


class IsDecoratedByKnown(Plain):
    @times_global
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


class ReadsNested(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"gains": [SimpleNamespace(gain=1.0)]}

    def scaled(self, loss: Tensor) -> Tensor:
        gain: float = self.held["gains"][0].gain
        return loss * gain


def set_nested(module: Any, number: int) -> None:
    module.held["gains"][0].gain = 1.0 + 0.1 * number


def set_held(module: Any, number: int) -> None:
    held = module.hparams.get("held", getattr(module, "held", None))
    if isinstance(held, dict):
        held["gain"] = 1.0 + 0.1 * number
    elif isinstance(held, list):
        held.append(1.0 + 0.1 * number)
    else:
        held.gain = 1.0 + 0.1 * number


class ReadsEpoch(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + self.current_epoch)


class ReadsTrainer(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + self.trainer.current_epoch)


class ComputesByMath(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * math.exp(-self.current_epoch)


class ReadsMoreOfTrainer(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + len(self.trainer.callback_metrics))


class ReadsSteps(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + self.global_step)


class LogsEpoch(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        weight = min(1.0, self.current_epoch / 100)
        self.log("weight", weight)
        return loss * weight


class Warms(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * min(1.0, (self.current_epoch + 1) / 2)


class Anneals(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        left = 1 - self.trainer.current_epoch / (self.trainer.max_epochs or 1)
        penalty = left - loss / (2.0 + self.current_epoch)
        return 0.5**self.current_epoch * loss + -left * penalty


class Begins(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return 2 * loss if 0 < self.current_epoch < 2 else loss


class Turns(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * 3 if self.current_epoch % 2 else loss


class WritesInPlace(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        factor = torch.ones_like(loss)
        same = factor
        factor += self.current_epoch
        return loss * same


class HandsTheEpochOn(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return torch.mul(loss, self.current_epoch) + torch.full_like(loss, self.current_epoch)


HONEST: list[Any] = [
    (HasOneOfTwo, set_scale),
    (ReadsType, set_type_of_number),
    (Asks, set_late),
    (HoldsLog, set_held),
    (LogsEpoch, nothing),
    (Warms, nothing),
    (Anneals, nothing),
    (Begins, nothing),
    (Turns, nothing),
    (WritesInPlace, nothing),
    (HandsTheEpochOn, nothing),
    (ReadsEpoch, nothing),
    (ReadsTrainer, nothing),
    (ReadsHeld, set_held),
    (ReadsObject, set_held),
    (ReadsNested, set_nested),
    (ReadsAround, set_around),
    (CallsPartial, set_partial),
    (IsDecoratedByKnown, set_global),
    (ReadsNumber, nothing),
    (ComparesNumber, nothing),
    (LogsNumber, nothing),
    (ReadsAttribute, set_scale),
    (functools.partial(ReadsHparam, scale=1.0), set_hparam),
    (ReadsGlobal, set_global),
    (ReadsClass, set_class),
    (ReadsFunction, set_function),
    (CallsWithDefaults, set_defaults),
    (CallsWithDefaults, set_code),
    (Plain, set_linear),
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
    (LogsTensor, set_tensor),
    (HandsTheNumberOn, set_scale),
    (Regularised, set_scale),
    (Scheduled, set_scale),
    (Draws, set_scale),
    (DrawsWithoutKeys, set_scale),
]


# --- steps that read what a recording doesn't know ------------------------------------------------


class ReadsList(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * GAINS[-1]


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


class DrawsInPython(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * random.random()


class DrawsBits(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1 + getrandbits(3))


class TakesFromList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.take = [*map(float, range(1000))].pop

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.take()


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


class MakesMetric(Plain):
    def scaled(self, loss: Tensor) -> Tensor:
        metric = torchmetrics.MeanMetric()
        metric.update(loss.detach())
        self.log("mean", metric)
        return loss


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
        import tests.engine.users_steps as here

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


UNKNOWN: list[Any] = [
    (ComputesByMath, nothing),
    (ReadsSteps, nothing),
    (ReadsMoreOfTrainer, nothing),
    (ReadsList, set_list),
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
    (DrawsInPython, nothing),
    (DrawsBits, nothing),
    (TakesFromList, nothing),
    (DrawsInNumpy, nothing),
    (LogsFloat, nothing),
    (Branches, nothing),
    (Masks, nothing),
    (MasksDrawn, nothing),
    (SelectsLarge, nothing),
    (MakesMetric, nothing),
    (Catches, nothing),
    (OfFunction, set_list),
    (Imports, set_list),
    (Switches, nothing),
    (HasHook, set_list),
    (HasObject, set_list),
]


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


def unknown_head(x: Tensor) -> Tensor:
    return x * GAINS[-1]


def set_other_head(module: Any, number: int) -> None:
    """Set what `HasOneOfTwo` reads with another setting, for a while, and an unknown function."""
    if number == 2:
        module.scale, module.others, module.other_head = -1.0, torch.ones(1), unknown_head
    elif number == 9:
        del module.others, module.other_head
        module.scale = 1.0
    GAINS.append(1.0 + 0.1 * number)


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
