"""torchmetrics objects in ``training_step`` of many clients at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from lightning_pfl.methods import Ditto, FedAvg, FedRep, PFedMe
from lightning_pfl.testing.fitting import fit
from lightning_pfl.testing.rounds import local_round
from tests.engine.nets import CLASSES, compare, image_clients
from tests.engine.test_select import Classifier

SIZES = (9, 4, 1)


def clients() -> Any:
    return image_clients(SIZES, batch_size=4)


class Measured(Classifier):
    """Logs what subclasses measure on scores and classes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.build()

    def build(self) -> None:
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.accuracy(scores, classes)
        self.log("accuracy", self.accuracy)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        self.measure(scores, batch[1])
        return F.cross_entropy(scores, batch[1])


class Updated(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.accuracy.update(preds=scores.argmax(1), target=classes)
        self.log("accuracy", self.accuracy)


class Several(Measured):
    """States of sums, of lists, and of a loss; a layer that has one."""

    def build(self) -> None:
        self.f1 = MulticlassF1Score(CLASSES, average="macro")
        self.inner: Any = nn.ModuleDict({"auroc": BinaryAUROC()})
        self.mean = MeanMetric()

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.f1(scores, classes)
        self.inner["auroc"](scores.softmax(1)[:, 0], (classes == 0).long())
        self.mean(scores.mean())
        self.log_dict({"f1": self.f1, "auroc": self.inner["auroc"], "mean": self.mean})


class Collected(Measured):
    def build(self) -> None:
        self.metrics = MetricCollection(
            {
                "micro": MulticlassAccuracy(CLASSES, average="micro"),
                "macro": MulticlassAccuracy(CLASSES, average="macro"),
                "f1": MulticlassF1Score(CLASSES),
            },
            prefix="train_",
        )

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.metrics(scores, classes)
        self.log_dict(self.metrics)


class OfBatches(Measured):
    """Logs the value of each minibatch, whose mean is another number than the object's."""

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log("accuracy", self.accuracy(scores, classes))


class CollectedOfBatches(Collected):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log_dict(self.metrics(scores, classes))


KINDS = [Measured, Updated, Several, Collected, OfBatches, CollectedOfBatches]


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets")
@pytest.mark.parametrize("transform", ["forward", "grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_one_client_after_another(kind: type[Measured], transform: str) -> None:
    compare(kind, clients(), transform=transform, chunk_sizes=(2,))


def test_values_over_phases_and_accumulated_minibatches() -> None:
    method: Callable[[], Any] = lambda: FedRep("layers", head_steps=3, body_steps=0)  # noqa: E731
    compare(lambda: Measured(nn.Flatten()), clients(), method, settings={"accumulate": 2})


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_an_accuracy_by_hand(engine: str) -> None:
    """At learning rate 0 it is that of the first model, in both engines, for each client's mean."""

    class Still(Measured):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module, data = Still(), clients()
    with torch.no_grad():
        hits = [
            (module(data.gather(own)[0]).argmax(1) == data.gather(own)[1]).double().mean()
            for own in data.indices
        ]
    run = fit(FedAvg(local_epochs=2), data, module, 2, engine)
    assert run.metrics["accuracy"] == pytest.approx(float(torch.stack(hits).mean()), rel=1e-6)
    choice = run.federation.engine.choices["training_step"]
    assert choice.startswith(engine)
    assert not module.accuracy.update_called


class Told(Measured):
    """Counts the samples that its object is told."""

    def build(self) -> None:
        self.samples = SumMetric()

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.samples.update(torch.ones_like(classes).sum())
        self.log("samples", self.samples)


class TwoLosses(FedAvg):
    """Measures the loss twice before each step."""

    def client_step(self, state: Any, minibatches: Any, client: Any) -> Any:
        for _ in range(2):
            client.loss(state["model"], minibatches)
        return super().client_step(state, minibatches, client)


class Looped(Told):
    """Takes its steps in Lightning's own loop, as it has a hook in them."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.steps = True


@pytest.mark.parametrize(
    ("kind", "method", "engine"),
    [
        *((Told, method, "vectorized") for method in (TwoLosses, Ditto, PFedMe)),
        *((Told, method, "sequential") for method in (TwoLosses, Ditto, PFedMe)),
        (Looped, Ditto, "sequential"),
    ],
)
def test_an_object_is_told_each_sample_once(
    kind: type[Told], method: Callable[..., Any], engine: Any
) -> None:
    """However many gradients and losses a method computes in a step."""
    result = local_round(method(local_epochs=2), kind(), clients(), engine).result
    assert result.logs["samples"].tolist() == [2.0 * size for size in SIZES]


class Reading(Measured):
    """Computes with the value inside the step."""

    def measure(self, scores: Tensor, classes: Tensor) -> None:
        self.log("double", 2 * self.accuracy(scores, classes))


class Resetting(Measured):
    def measure(self, scores: Tensor, classes: Tensor) -> None:
        super().measure(scores, classes)
        self.accuracy.reset()


class ReadAtTheEnd(OfBatches):
    """Logs values of minibatches, and in the end that of all."""

    def on_train_epoch_end(self) -> None:
        self.log("all", self.accuracy.compute())
        self.accuracy.reset()


@pytest.mark.usefixtures("clients_at_once")
def test_an_object_that_a_hook_may_read_is_updated_by_all_clients() -> None:
    data = image_clients((3, 5), batch_size=5)

    class Still(ReadAtTheEnd):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Still()
    images, classes = data.fields
    with torch.no_grad():
        hits = module(images).argmax(1) == classes
    run = fit(FedAvg(), data, module, 1, "auto")
    assert run.metrics["all"] == pytest.approx(float(hits.double().mean()), rel=1e-6)
    assert "updated but not logged" in run.federation.engine.choices["training_step"]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.usefixtures("clients_at_once")
@pytest.mark.parametrize(
    ("kind", "why"),
    [(Reading, "TorchmetricsValue"), (Resetting, "computes or resets")],
)
def test_what_needs_the_value_inside_the_step_runs_sequentially(
    kind: type[Measured], why: str
) -> None:
    run = fit(FedAvg(), clients(), kind(), 1, "auto")
    choice = run.federation.engine.choices["training_step"]
    assert choice.startswith("sequential")
    assert why in choice
