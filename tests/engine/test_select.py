"""``engine="auto"`` trains every module: for many clients at once where that gives the same, else
one client after another, and says why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_pfl.data.datasets import FederatedLoaders, FederatedTensorDataset
from lightning_pfl.engine import cost
from lightning_pfl.engine.probe import Estimate
from lightning_pfl.engine.select import _counted
from lightning_pfl.methods import FedAvg
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close
from tests.engine.nets import CLASSES, image_clients
from tests.trainer.setting import trainer


def clients() -> FederatedTensorDataset:
    return image_clients((9, 4, 1), batch_size=4)


class Classifier(L.LightningModule):
    """A user's own module; subclasses change one thing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES))
        self.layers(torch.zeros(2, 1, 5, 5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log_dict({"train_loss": loss, "twice": 2 * loss})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Recurrent(Classifier):
    """Reads the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 5, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(x.flatten(1, 2))[0])


class Attentive(Classifier):
    """Rows of a picture look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2)
        return super().forward(self.attention(rows, rows, rows, need_weights=False)[0])


class TwoRates(Classifier):
    """Two parameter groups, and a scheduler."""

    def configure_optimizers(self) -> Any:
        last: Any = self.layers[-1]
        groups: list[dict[str, Any]] = [
            {"params": [last.weight]},
            {"params": [last.bias], "lr": 0.3},
        ]
        optimizer = torch.optim.Adam(groups, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Measuring(Classifier):
    """Validates with a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("val_loss", self.accuracy)


class OwnSGD(torch.optim.SGD):
    """May do anything."""


class OwnOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return OwnSGD(self.parameters(), lr=0.1)


class Wrong(torch.autograd.Function):
    """The identity, with a wrong rule for many clients at once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return 1.1 * x, in_dims[0]


class Otherwise(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result: Tensor = Wrong.apply(super().training_step(batch, batch_idx))
        return result


MODULES: dict[str, tuple[Callable[[], Classifier], str, str]] = {
    "linear": (Classifier, "vectorized", "vectorized"),
    "BatchNorm": (lambda: Classifier(nn.BatchNorm2d(1)), "vectorized", "vectorized"),
    "dropout": (lambda: Classifier(nn.Dropout(0.4)), "vectorized", "vectorized"),
    "LSTM": (Recurrent, "vectorized", "vectorized"),
    "attention": (Attentive, "vectorized", "vectorized"),
    "groups and scheduler": (TwoRates, "vectorized", "vectorized"),
    "torchmetrics": (Measuring, "vectorized", "vectorized"),
    "own optimizer": (OwnOptimizer, "sequential .*OwnSGD", "vectorized"),
    "another result": (Otherwise, "sequential .*differs", "vectorized"),
}


def run(make: Callable[[], Classifier], engine: str) -> Fit:
    with pytest.MonkeyPatch.context() as patch:
        # So few clients of unequal sizes would be faster one after another.
        patch.setattr(cost, "PROGRAM", 0.0)
        return fit(FedAvg(), clients(), make(), 2, engine, val_data=clients())


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("clients_at_once")
@pytest.mark.parametrize("name", MODULES)
def test_every_module_trains_like_one_client_after_another(name: str) -> None:
    make, training, validation = MODULES[name]
    auto, slow = run(make, "auto"), run(make, "reference")
    choices = auto.strategy.federation.engine.choices
    for step, expected in (("training_step", training), ("validation_step", validation)):
        assert re.match(expected, choices[step]), choices
    assert_trees_close(auto.models, slow.models, rtol=1e-9, atol=1e-9)
    assert auto.metrics.keys() == slow.metrics.keys()
    assert auto.metrics == pytest.approx(slow.metrics, rel=1e-5)


@pytest.mark.parametrize("name", ["own optimizer", "another result"])
def test_what_can_not_run_at_once_is_refused_where_that_was_asked_for(name: str) -> None:
    match = r"Expected `training_step` of .* engine='vectorized'"
    with pytest.raises(ValueError, match=match):
        run(MODULES[name][0], "vectorized")


class Pairs(Dataset[Any]):
    """Samples by a function of a user's, which only a DataLoader can make minibatches of."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, at: int) -> Any:
        return torch.full((1, 5, 5), at / 10, dtype=torch.float64), at % 3


@pytest.mark.parametrize(
    ("sizes", "sampler", "expected"),
    [
        ([20, 20, 20, 20], False, "vectorized"),
        ([20, 16, 7, 13], False, "sequential"),
        ([20, 16, 7, 13], True, "vectorized"),  # what it makes isn't known before
    ],
)
def test_sizes_of_minibatches_that_loaders_make(
    sizes: list[int], sampler: bool, expected: str
) -> None:
    """Programs of many clients serve those whose minibatches have one size."""
    if sampler:
        samplers = [BatchSampler(SequentialSampler(range(size)), 8, False) for size in sizes]
        loaders = [
            DataLoader(Pairs(size), batch_sampler=one)
            for size, one in zip(sizes, samplers, strict=True)
        ]
    else:
        loaders = [DataLoader(Pairs(size), batch_size=8) for size in sizes]
    data = FederatedLoaders.from_any(loaders)
    found = fit(FedAvg(), data, Classifier(), engine="auto")
    assert found.strategy.federation.engine.choices["training_step"].startswith(expected)


@pytest.mark.usefixtures("clients_at_once")
def test_the_log_says_what_runs_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer(engine="auto", max_epochs=1).fit(OwnOptimizer(), clients(), clients())
    assert re.search(r"training_step runs sequential: .*OwnSGD", caplog.text)
    assert re.search(r"validation_step runs vectorized: \w+", caplog.text)


@pytest.mark.parametrize(("chunk_size", "at_once"), [(None, 3), (2, 2)])
def test_the_log_says_how_many_run_at_once_and_what_was_counted(
    chunk_size: int | None, at_once: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Products of 4 samples: forward, for weights' gradients, and in the head for inputs'."""
    million = 2 * 4 * (2 * 25 * 7 + 3 * 7 * CLASSES) / 1e6
    data = image_clients((8, 8, 4))
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 7), nn.Tanh())
    module = PersonalizedModule(backbone, nn.Linear(7, CLASSES), lr=0.1).double()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        made = trainer(engine="auto", max_epochs=1, chunk_size=chunk_size)
        made.fit(module, data, data)
    said = f"{at_once} at once, {million:.3g} million operations a gradient."
    assert f"training_step runs vectorized: vmap over the forward pass, {said}" in caplog.text


@pytest.mark.parametrize(
    ("operations", "said"),
    [(1234.5e6, "1,234"), (228.4e6, "228"), (5.316e6, "5.32"), (1.2e3, "0.0012")],
)
def test_the_log_writes_millions_out(operations: float, said: str) -> None:
    work: Any = None
    assert _counted(work, Estimate(operations, False)).startswith(f", {said} million operations")


@pytest.mark.usefixtures("clients_at_once")
def test_the_log_counts_no_clients_of_a_sanity_check(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        made = trainer(engine="auto", max_epochs=1, num_sanity_val_steps=2)
        made.fit(Classifier(), clients(), clients())
    line = re.search(r"validation_step runs vectorized: .*", caplog.text)
    assert line is not None
    assert "at once" not in line[0]


def test_the_probe_leaves_recordings_to_the_run() -> None:
    """Of six steps of known code on clients of one size two are recorded, without momentum and with
    it, and the others are replays: the probe has recorded none, and the first round's settings
    don't count as new in a later one, where they might change in each."""
    data = image_clients((8, 8, 8), batch_size=4)
    found = fit(FedAvg(local_epochs=3), data, Classifier(), engine="vectorized")
    engine: Any = found.strategy.federation.engine._engines["training_step"]
    assert len(engine.whole._recorded) == 2
    assert engine.whole.used == 4


def test_what_the_probe_counts_makes_no_known_step_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_pfl"):
        run(Classifier, "auto")
    assert "isn't known" not in caplog.text


class Printing(Classifier):
    """A step whose code isn't known, as it may print."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx < 0:
            print("no batch is before the first")
        return super().training_step(batch, batch_idx)


def test_a_step_that_several_engines_read_is_called_unknown_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_pfl"):
        run(Printing, "auto")
    assert caplog.text.count("The code of training_step isn't known: it calls 'print'.") == 1


class Counted(Dataset[Any]):
    """Samples that a collate function puts into minibatches with their number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 5, 5), float(index), dtype=torch.float64), index % CLASSES

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        inputs, labels = zip(*samples, strict=True)
        return torch.stack(inputs), torch.tensor(labels), len(samples)


def test_the_log_says_what_a_minibatch_holds_besides_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, loader = trainer(engine="auto", max_epochs=1), partial(DataLoader, batch_size=4)
    data = [loader(Counted(), collate_fn=Counted.collate) for _ in range(2)]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        made.fit(Printing(), data, data)
    why = "a minibatch holds int, where many clients need tensors"
    assert f"training_step runs sequential: vmap over the forward pass: {why};" in caplog.text
    assert "in_dim" not in caplog.text
