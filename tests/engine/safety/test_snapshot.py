"""What users' layers keep beside their parameters: it stays with its client, or is refused."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_pfl.core.tree import Tree
from lightning_pfl.engine import trace
from lightning_pfl.engine.safety.snapshot import changed, restore, snapshot
from lightning_pfl.methods import FedAvg, FedRep, LocalOnly
from lightning_pfl.methods.base import LocalStep, Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal, local_round
from tests.engine.nets import CLASSES, compare, image_clients


class RunningMean(nn.Module):
    """Subtracts a running mean of what it has seen, as users' own normalisations do."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(25), persistent=persistent)

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


def network(*layers: nn.Module) -> PersonalizedModule:
    torch.manual_seed(1)
    backbone = nn.Sequential(*layers, nn.Flatten(), nn.Linear(25, 4), nn.Tanh())
    return PersonalizedModule(backbone, nn.Linear(4, CLASSES), lr=0.1).double()


def averaging(persistent: bool = True) -> PersonalizedModule:
    return network(nn.Flatten(), RunningMean(persistent))


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_frozen_buffer_stays_and_clients_do_not_meet_in_it(engine: str) -> None:
    def run(factor: float) -> Fit:
        data = image_clients((4, 4))
        data.fields[0][data.indices[0]] *= factor
        return fit(FedRep(head_epochs=3, body_epochs=0), data, averaging(), engine=engine)

    one, other = run(1.0), run(50.0)
    assert torch.equal(one.server["model"]["backbone.1.mean"], torch.zeros(25).double())
    assert_trees_equal(
        {k: v[1] for k, v in one.models.items()}, {k: v[1] for k, v in other.models.items()}
    )


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_clients_do_not_meet_in_a_buffer_outside_the_model(engine: str) -> None:
    def run(factor: float) -> Fit:
        data = image_clients((4, 4))
        data.fields[0][data.indices[0]] *= factor
        return fit(LocalOnly(local_epochs=2), data, averaging(False), engine=engine)

    one, other = run(1.0), run(50.0)
    assert_trees_equal(
        {k: v[1] for k, v in one.models.items()}, {k: v[1] for k, v in other.models.items()}
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda: network(nn.BatchNorm2d(1, track_running_stats=False)),
        lambda: network(nn.InstanceNorm2d(1, track_running_stats=True)),
        averaging,
    ],
    ids=["BatchNorm without statistics", "InstanceNorm with statistics", "running mean"],
)
@pytest.mark.parametrize("method", [FedAvg(local_epochs=2), FedRep(head_epochs=2)], ids=["a", "r"])
def test_layers_that_couple_samples_get_their_own_batches(
    make: Callable[[], Any], method: Method
) -> None:
    compare(make, image_clients((2, 5, 13, 3)), lambda: method)


def test_evaluation_keeps_batches_that_couple_samples() -> None:
    def losses(engine: str) -> Fit:
        data, module = (
            image_clients((2, 5, 13, 3)),
            network(nn.BatchNorm2d(1, track_running_stats=False)),
        )
        return fit(FedAvg(), data, module, engine=engine, val_data=data)

    want, got = losses("reference").metrics, losses("vectorized").metrics
    assert got["val_loss"] == pytest.approx(want["val_loss"], rel=1e-10)


# --- steps that are recorded ---


class Change(Callback):
    """Changes the module before a round."""

    def __init__(self, round: int, change: Callable[[Any], None]) -> None:
        self.round, self.change = round, change

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == self.round:
            self.change(pl_module)


class Sharper(nn.Module):
    """Reads a number that no fingerprint sees, and one whose name begins like Lightning's."""

    strength: ClassVar[list[float]] = [1.0]

    def __init__(self) -> None:
        super().__init__()
        self._hparams_strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * Sharper.strength[0] * self._hparams_strength


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.square()).mean(1)


class Unmarked(FedAvg):
    """Has a step that isn't recorded as a whole."""

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        return super().client_step(state, minibatches, client)


CHANGES: dict[str, Callable[[Any], None]] = {
    "loss": lambda m: setattr(m, "loss", squared),
    "layer": lambda m: m.backbone.__setitem__(3, nn.Sigmoid()),
    "name": lambda m: setattr(m.backbone[0], "_hparams_strength", 3.0),
    "unseen": lambda m: Sharper.strength.__setitem__(0, 3.0),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", [FedAvg(), Unmarked()], ids=["whole steps", "gradients"])
def test_a_recording_follows_the_module(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: Method,
    change: str,
) -> None:
    monkeypatch.setattr(trace, "WARM_UP", 0)
    caplog.set_level(logging.INFO)

    def run(engine: str) -> Fit:
        Sharper.strength[0] = 1.0
        module = network(Sharper())
        when = Change(2, CHANGES[change])
        return fit(method, image_clients((8, 8)), module, 4, engine, callbacks=[when])

    fast, slow = run("vectorized"), run("reference")
    Sharper.strength[0] = 1.0
    engine = fast.strategy.federation.engine._engines["training_step"]
    assert (engine.traces if isinstance(method, Unmarked) else engine.whole).used > 0
    # What a fingerprint sees begins another recording; what none sees ends the known ones.
    assert ("no longer recorded" in caplog.text) == (change == "unseen")
    assert_trees_close(fast.models, slow.models, rtol=1e-10, atol=1e-10)


def test_a_dropout_rate_may_be_raised_later() -> None:
    """The first step drew no random numbers, which is no promise for later rounds."""

    def run(engine: str) -> Fit:
        when = Change(1, lambda m: setattr(m.backbone[0], "p", 0.5))
        data, module = image_clients((8, 5)), network(nn.Dropout(0.0))
        return fit(FedAvg(), data, module, 3, engine, callbacks=[when])

    assert_trees_close(run("vectorized").models, run("reference").models, rtol=1e-10, atol=1e-10)


# --- steps that keep things on the module ---


class Keeping(L.LightningModule):
    """Keeps its losses in the way that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES))
        self.losses: list[Tensor] = []
        self.average = torch.zeros(())
        self.metric = MeanMetric()
        self.steps = 0
        self.recent: deque[Tensor] = deque(maxlen=100)
        self.nested: dict[str, dict[str, list[Tensor]]] = {"train": {"losses": []}}
        self.holder: Any = SimpleNamespace(losses=[], count=0)
        self.unregistered = [MeanMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.kind == "list":
            self.losses.append(loss.detach())
        elif self.kind == "attribute":
            self.average = 0.9 * self.average + 0.1 * loss.detach()
        elif self.kind == "metric":
            self.metric.update(loss.detach())
        elif self.kind == "deque":
            self.recent.append(loss.detach())
        elif self.kind == "nested":
            self.nested["train"]["losses"].append(loss.detach())
        elif self.kind == "object":
            self.holder.losses.append(loss.detach())
            self.holder.count += 1
        elif self.kind == "metric in a list":
            self.unregistered[0].update(loss.detach())
        else:
            self.steps += 1
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


KEPT: dict[str, Callable[[Any], int]] = {
    "list": lambda module: len(module.losses),
    "metric": lambda module: module.metric._update_count,
    "counter": lambda module: module.steps,
    "deque": lambda module: len(module.recent),
    "nested": lambda module: len(module.nested["train"]["losses"]),
    "object": lambda module: (len(module.holder.losses) + module.holder.count) // 2,
    "metric in a list": lambda module: module.unregistered[0]._update_count,
}
"""How often a step has kept something, by the kind of place."""


@pytest.mark.parametrize("kind", ["attribute", *KEPT])
def test_a_step_that_keeps_things_runs_one_client_at_a_time(kind: str) -> None:
    data = image_clients((4, 5), dtype=torch.float32)
    run = fit(FedAvg(), data, Keeping(kind), rounds=2, engine="auto")
    assert run.strategy.federation.engine.choices["training_step"].startswith("sequential")
    module: Any = run.module
    steps = 2 * (1 + 2)  # two rounds of one and two minibatches; the probe's are taken back
    if kind in KEPT:
        assert KEPT[kind](module) == steps
    kept = [
        *module.losses,
        *module.recent,
        *module.nested["train"]["losses"],
        *module.holder.losses,
    ]
    assert all(loss.isfinite() for loss in kept)
    assert module.average.isfinite()


def test_vectorized_says_what_a_step_keeps() -> None:
    data = image_clients((4, 5), dtype=torch.float32)
    with pytest.raises(ValueError, match="the step changes `losses`, which all clients share"):
        fit(FedAvg(), data, Keeping("list"), engine="vectorized")


class LateNoise(L.LightningModule):
    """Draws random numbers from the second minibatch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + torch.randn_like(batch[0]) if batch_idx > 0 else batch[0]
        return F.cross_entropy(self.net(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.usefixtures("clients_at_once")
def test_noise_may_come_later() -> None:
    data = image_clients((12, 9))
    fast, slow = (fit(FedAvg(), data, LateNoise(), 2, e) for e in ("auto", "reference"))
    assert fast.strategy.federation.engine.choices["training_step"].startswith("vectorized")
    assert_trees_close(fast.models, slow.models, rtol=1e-10, atol=1e-10)


class ByNumber(PersonalizedModule):
    """Scales what its backbone sees by the number of the minibatch."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.backbone(x * (1 + batch_idx))), y)


def test_features_that_depend_on_the_minibatch_are_not_cached() -> None:
    def make() -> Any:
        torch.manual_seed(1)
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.Tanh())
        return ByNumber(backbone, nn.Linear(4, CLASSES), lr=0.1).double()

    compare(make, image_clients((8, 8)), lambda: FedRep(head_epochs=3))


def test_an_error_in_a_batched_step_names_its_clients_and_the_way_out() -> None:
    class Broken(LateNoise):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch[0])[:, 7].sum()
            return loss

    with pytest.raises(RuntimeError, match=r"client_step failed for clients '0', '1'.*sequential"):
        local_round(FedAvg(), Broken(), image_clients((4, 4)), "vectorized")


def test_a_probe_looks_at_tensors_of_inference_mode() -> None:
    module: Any = Keeping("metric")
    with torch.inference_mode():
        module.metric.update(torch.tensor(2.0))
        module.average = torch.tensor(3.0)
        before = snapshot(module)
        assert changed(module, before) is None
        module.average.add_(1.0)
        assert changed(module, before) == "average"
        restore(module, before)
    assert float(module.average) == 3.0
    assert changed(module, before) is None


def test_a_generators_state_is_restored() -> None:
    layer: Any = nn.Linear(1, 1)
    layer.generator = torch.Generator().manual_seed(3)
    before = snapshot(layer)
    first = torch.rand(2, generator=layer.generator)
    assert changed(layer, before) == "generator"
    restore(layer, before)
    assert changed(layer, before) is None
    assert torch.equal(torch.rand(2, generator=layer.generator), first)
