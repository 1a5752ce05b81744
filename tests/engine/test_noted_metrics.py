"""torchmetrics objects in recorded steps of one client after another.

Their calls are noted in the step and made after it. A run that records must log the bits of one
that doesn't, and leave the objects as that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from lightning_pfl.methods import Ditto, FedAvg, FedMAP, FedRep, PFedMe
from lightning_pfl.methods.base import Method
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close
from tests.engine.nets import CLASSES, image_clients
from tests.engine.test_known_code_evaluations import assert_same as assert_same_values
from tests.engine.test_known_code_evaluations import evaluate
from tests.engine.test_known_code_steps import assert_same, models, replays, train
from tests.engine.users_steps import Plain

SIZES = 8, 0, 10, 13


pytestmark = pytest.mark.usefixtures("at_once")


class Measured(Plain):
    """Measures scores and classes in the way of subclasses."""

    acc: Any
    backbone: Any

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        self.acc = MulticlassAccuracy(CLASSES, average="micro")

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(scores, classes)
        self.log("acc", self.acc)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.measure(scores, y)
        self.log("loss", loss)
        return loss


class Updated(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc.update(preds=scores.argmax(1), target=classes)
        self.log("acc", self.acc, prog_bar=True)


class LogsValues(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log("acc", self.acc(scores, classes), batch_size=len(classes) + 3)
        self.log("most", self.acc(scores, classes), reduce_fx="max")


class Several(Measured):
    """States of counts, of lists and of a loss; one that isn't logged, and one of a layer."""

    def build(self) -> None:
        super().build()
        self.f1, self.auroc = MulticlassF1Score(CLASSES, average="macro"), BinaryAUROC()
        self.mean, self.total = MeanMetric(), SumMetric()
        self.backbone = Layer(self.backbone)

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.f1(scores, classes)
        self.total.update(scores.mean())
        self.log_dict({"f1": self.f1, "auroc": self.auroc, "seen": self.backbone.seen})
        self.auroc.update(scores.softmax(1)[:, 0], (classes == 0).long())


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.seen.update(out.abs().sum())
        return out


class Twice(Measured):
    """An object is called once more by some sizes of minibatches, and logged by the others."""

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(scores, classes)
        if len(classes) > 3:
            self.acc(scores.flip(1), classes)
        else:
            self.log("acc", self.acc)


class ChangesLater(Measured):
    """What a call was given is changed in place after it."""

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        seen = scores.detach().clone()
        self.acc(seen, classes)
        seen.zero_()
        self.log("acc", self.acc)


class Skips(Measured):
    """Measures the second minibatch of each epoch, too, on which no step is taken."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class AsksForTheClass(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        value = self.acc(scores, classes)
        self.log("acc", value if isinstance(value, Tensor) else 2.0)


class HasTwoNames(Measured):
    def build(self) -> None:
        super().build()
        self.other = self.acc

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.other(scores, classes)
        self.log("acc", self.other)


NOTED = [Measured, Updated, LogsValues, Several, Twice, ChangesLater, AsksForTheClass, HasTwoNames]


def slow(kinds: list[type[Measured]]) -> list[Any]:
    """Of kinds that the tests of evaluations have, those of steps are slow; and the reverse."""
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


class States(Callback):
    """Keeps what objects hold after each client and each evaluation."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def look(self, _: Any, module: Any, *__: Any) -> None:
        parts = {n: part for n, part in module.named_modules() if isinstance(part, Metric)}
        states = {
            f"{name}.{key}": torch.stack(list(value)) if isinstance(value, list) else value.clone()
            for name, part in parts.items()
            for key, value in part.metric_state.items()
            if not isinstance(value, list) or value
        }
        self.found.append(states | {f"{n}#": part._update_count for n, part in parts.items()})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module)


def run(make: Callable[[], Any], limit: int, **options: Any) -> tuple[Any, States]:
    kept = States()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.engine.test_known_code_steps.Changing", lambda *_: kept)
        given: dict[str, Any] = {"sizes": SIZES, "together": False, "rounds": 2, **options}
        return train(make, limit=limit, **given), kept


def assert_same_states(one: States, other: States) -> None:
    assert len(one.found) == len(other.found) > 5
    assert any(one.found)
    for found, expected in zip(one.found, other.found, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(*map(torch.as_tensor, (found[k], expected[k]))) for k in found)


@pytest.mark.quick
@pytest.mark.parametrize("make", [*NOTED[::2], *slow(NOTED[1::2]), Skips])
def test_recorded_steps_measure_what_steps_do(make: type[Measured]) -> None:
    (recorded, states), (plain, expected) = (run(make, limit) for limit in (99, 0))
    assert replays(recorded) > 3
    assert_same(recorded, plain)
    assert_same_states(states, expected)
    reference, _ = run(make, 0, engine="reference")
    assert_trees_close(models(recorded), models(reference))
    assert recorded.metrics == pytest.approx(reference.metrics, rel=1e-9)
    assert recorded.metrics.keys() == reference.metrics.keys()


class Still(Measured):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_an_accuracy_is_that_of_the_samples() -> None:
    """Of a client's minibatches of 4, 4 and 2 or 4, 4, 4 and 1 samples, at a rate of zero."""

    def make() -> Any:
        torch.manual_seed(0)
        return Still()

    recorded, _ = run(make, 99)
    assert replays(recorded) > 5
    module, data = make(), recorded.trainer.train_dataloader
    shares = []
    for rows in data.indices:
        if len(rows):
            x, y = data.gather(rows)
            shares.append((module(x).argmax(1) == y).double().mean())
    assert recorded.metrics["acc"] == pytest.approx(float(torch.stack(shares).mean()))
    assert len(shares) == 3


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedRep(head_epochs=2), {}),
        (Ditto(0.5, local_epochs=2), {}),
        (PFedMe(local_epochs=2), {}),
        (FedMAP(local_epochs=2), {}),
        (FedAvg(local_epochs=2), {"accumulate_grad_batches": 2}),
        (FedAvg(local_epochs=2), {"gradient_clip_val": 0.1}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "-".join(value),
)
def test_methods_and_flags(method: Method, options: dict[str, Any]) -> None:
    """Methods take gradients of which nothing is logged."""
    options = {"method": method, **options}
    (recorded, states), (plain, expected) = (run(Several, limit, **options) for limit in (99, 0))
    assert replays(recorded) > 5
    assert_same(recorded, plain)
    assert_same_states(states, expected)


# --- what isn't noted -----------------------------------------------------------------------------


class Computes(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc.update(scores, classes)
        self.log("acc", self.acc.compute())


class ComputesByAName(Measured):
    """Its own function has the name of one of the object's."""

    def compute(self) -> int:
        return 1

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc.update(scores, classes)
        self.log("acc", self.acc.compute() * self.compute())


class ReadsCounts(Measured):
    """Its own attribute has the name of a state."""

    tp = 2.0

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(scores, classes)
        self.log("acc", self.acc.tp.double().sum() * self.tp)


class ComparesCounts(Measured):
    num_classes = CLASSES

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(scores, classes)
        self.log("acc", self.acc)
        if self.acc.num_classes:
            self.log("classes", float(self.num_classes))


class ReadsValues(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log("error", 1 - self.acc(scores, classes))


class Branches(Measured):
    """All of its predictions are wrong."""

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log("wrong", 2.0 if self.acc((classes + 1) % CLASSES, classes) else 1.0)


class Compares(Measured):
    """All of its predictions are right."""

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log("right", 1.0 if self.acc(classes, classes) == 1 else 2.0)


class Formats(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log("right", 1.0 if len(f"{self.acc(classes, classes)}") < 20 else 2.0)


class Composes(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(scores, classes)
        self.log("double", self.acc + self.acc)


class Copies(Measured):
    """A copy is told what the object isn't."""

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc.clone().update(scores.flip(1), classes)
        self.acc.update(scores, classes)
        self.log("acc", self.acc)


class GivesNumbers(Measured):
    def build(self) -> None:
        self.acc = MeanMetric()

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(len(classes))
        self.log("acc", self.acc)


class Collects(Measured):
    def build(self) -> None:
        self.acc = MetricCollection({"acc": MulticlassAccuracy(CLASSES)})

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc["acc"](scores, classes)
        self.log("acc", self.acc["acc"])


class InADict(Measured):
    def build(self) -> None:
        self.acc = nn.ModuleDict({"acc": MulticlassAccuracy(CLASSES)})

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc["acc"](scores, classes)
        self.log("acc", self.acc["acc"])


class HasWindow(Measured):
    """Its state isn't a sum."""

    def build(self) -> None:
        self.acc = RunningMean(window=2)

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(scores.mean())
        self.log("acc", self.acc)


class Largest(Metric):
    """Its state is the mean of what each minibatch has."""

    full_state_update = False
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", torch.zeros((), dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, scores: Tensor) -> None:
        self.kept += scores.detach().max()

    def compute(self) -> Tensor:
        return self.kept


class HasItsOwn(Measured):
    def build(self) -> None:
        self.acc = Largest()

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.acc(scores)
        self.log("acc", self.acc)


OTHER = [Computes, ComputesByAName, ReadsCounts, ComparesCounts, ReadsValues, Composes]
OTHER += [Copies, GivesNumbers, Collects, InADict, HasWindow, HasItsOwn]
OTHER += [Branches, Compares, Formats]


@pytest.mark.parametrize("make", [*OTHER[::3], *slow([*OTHER[1::3], *OTHER[2::3]])])
def test_steps_that_do_more_with_objects_are_taken(make: type[Measured]) -> None:
    (recorded, states), (plain, expected) = (run(make, limit) for limit in (99, 0))
    assert replays(recorded) == 0
    assert_same(recorded, plain)
    assert_same_states(states, expected)


def test_many_at_once_have_copies_that_no_recording_knows() -> None:
    (recorded, _), (plain, _) = (run(Measured, limit, together=True) for limit in (99, 0))
    assert replays(recorded) == 0
    assert_same(recorded, plain)


@pytest.mark.parametrize("make", [Branches, Compares, Formats])
def test_many_at_once_read_no_value_before_it_is_known(make: type[Measured]) -> None:
    found, _ = run(make, 99, together=True)
    expected = "wrong" if make is Branches else "right"
    assert found.metrics[expected] == 1.0


def test_objects_in_steps_of_another_precision_are_called_there() -> None:
    recorded, _ = run(Single, 99, precision="bf16-mixed")
    assert replays(recorded) == 0


class Single(Measured):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


# --- clients that are run once more ---------------------------------------------------------------


class DrawsLate(Measured):
    """Its layer draws from the second round on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(nn.Dropout(0.0))

    def on_train_epoch_start(self) -> None:
        self.backbone[-1].p = 0.5 if self.current_epoch else 0.0


def test_a_client_that_is_trained_once_more_is_counted_once() -> None:
    recorded, states = run(DrawsLate, 99)
    plain, expected = run(DrawsLate, 0, engine="reference")
    assert_trees_close(models(recorded), models(plain))
    assert recorded.metrics == pytest.approx(plain.metrics, rel=1e-9)
    assert [found["acc#"] for found in states.found] == [one["acc#"] for one in expected.found]


def test_a_resumed_run_measures_the_same(tmp_path: Any) -> None:
    def run(rounds: int, path: Any = None) -> Fit:
        data = image_clients(SIZES)
        return fit(FedAvg(), data, Several(), rounds, "sequential", ckpt_path=path)

    whole = run(3)
    resumed = run(3, run(1).save(tmp_path / "last.ckpt"))
    assert replays(resumed) > 5
    assert resumed.metrics == whole.metrics
    assert {"f1", "auroc", "seen"} <= whole.metrics.keys()


# --- evaluations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*NOTED[1::2], *slow(NOTED[::2])])
def test_recorded_evaluations_measure_what_steps_do(make: type[Measured]) -> None:
    found, replays = evaluate(make)
    assert_same_values(found, evaluate(make, limit=0)[0])
    assert replays > 5
    reference, _ = evaluate(make, record=False)
    for one, other in zip(found, reference, strict=True):
        assert_trees_close(one.values, other.values)


@pytest.mark.parametrize("make", [*OTHER[1::3], *OTHER[2::3], *slow(OTHER[::3])])
def test_evaluations_that_do_more_with_objects_are_taken(make: type[Measured]) -> None:
    found, replays = evaluate(make)
    assert_same_values(found, evaluate(make, limit=0)[0])
    assert replays == 0
