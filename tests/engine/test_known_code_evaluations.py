"""Replayed evaluations of a LightningModule of the user's: the values of its steps themselves.

Each module reads something that changes between evaluations or between clients. An engine that
records must return the bits of one that doesn't, and replay honest steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import Model
from lightning_pfl.engine import trace
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized import evaluation as together
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit, quiet, quiet_trainer
from lightning_pfl.testing.rounds import assert_trees_close, assert_trees_equal
from lightning_pfl.trainer.strategy import FederatedStrategy
from tests.engine.nets import image_clients
from tests.engine.users_steps import (
    HONEST,
    UNKNOWN,
    Draws,
    DrawsWithoutKeys,
    HandsTheNumberOn,
    Logs,
    Plain,
    ReadsAttribute,
    Regularised,
    as_they_were,
    nothing,
    set_logs,
    set_scale,
)

EVALUATIONS = 3
HERE: Any = sys.modules[__name__]
SIZES = (16, 0, 10, 20, 16)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record at the second call, so that short tests replay."""
    monkeypatch.setattr(trace, "WARM_UP", 1)
    yield
    torch.set_default_dtype(torch.float32)


def evaluating(make: Callable[[], Any]) -> Any:
    """Make a module that logs its training loss when it is evaluated."""
    module = make()
    kind = type(module)
    if "validation_step" not in vars(kind):
        decorated = kind.__name__.startswith("IsDecorated")
        takes = 3 if decorated else kind.training_step.__code__.co_argcount
        step = Evaluated.validation_step if takes == 3 else EvaluatedAlone.validation_step
        module.__class__ = type(kind.__name__, (kind,), {"validation_step": step})
    return module


class Evaluated(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.training_step(batch, batch_idx)
        self.log("val_loss", found["loss"] if isinstance(found, dict) else found)


class EvaluatedAlone(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch))  # type: ignore[call-arg]


def models(module: Any, number: int) -> Model:
    """Another model for each client and evaluation."""
    generator = torch.Generator().manual_seed(number)

    def one(leaf: Tensor) -> Tensor:
        shape = len(SIZES), *leaf.shape
        return leaf + 0.1 * torch.randn(shape, generator=generator, dtype=leaf.dtype)

    split = ParameterSplit(module)
    # Buffers stay: infinities of a mask have no sum, and a variance isn't negative.
    return {
        name: leaf.expand(len(SIZES), *leaf.shape) if name in split.buffers else one(leaf)
        for name, leaf in split.model().items()
    }


def evaluate(
    make: Callable[[], Any],
    change: Callable[[Any, int], Any] = lambda *_: None,
    often: bool = False,
    limit: int = 99,
    record: bool = True,
    numbers: tuple[int | None, ...] = (None,),
    at_once: bool = False,
    evaluations: int | None = None,
) -> tuple[list[Evaluation], int]:
    """Evaluate some times, and count replays.

    Args:
        make: Makes the module.
        change: Gets it, and how often it was called, before each evaluation or after each client.
        often: Whether after each client.
        limit: Largest number of recordings.
        record: Whether steps may be recorded.
        numbers: The numbers of data sets, one after another.
        at_once: Whether two clients at once, of which one without ``record`` is watched in all.
        evaluations: How often; None for ``EVALUATIONS``.
    """
    found, done, data = [], 0, image_clients(SIZES)
    evaluations = EVALUATIONS if evaluations is None else evaluations
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(trace, "LIMIT", limit)
        as_they_were(patch)
        module = evaluating(make)
        module.trainer = quiet_trainer(FederatedStrategy(FedAvg()), evaluations)
        split, settings = ParameterSplit(module), EngineSettings()
        engine: Any = SequentialEngine(module, split, settings, record=record)
        if at_once:
            engine = VectorizedEngine(module, split, settings)
            patch.setattr(together, "samples_at_once", lambda data: 2 * max(SIZES))
            if not record:
                patch.setattr(together.VectorizedEvaluation, "_gathers", lambda self, data: False)

        def on_clients(positions: list[int], losses: Any = None) -> bool:
            nonlocal done
            if often:
                done += 1
                change(module, done)
            return often

        for number in range(evaluations):
            module.trainer.fit_loop.epoch_progress.current.processed = number
            module.eval()
            if number and not often:
                done += 1
                change(module, done)
            for which in numbers:
                work = EvaluationWork(
                    models(module, number),
                    torch.arange(len(SIZES)),
                    data,
                    "validation_step",
                    dataloader_idx=which,
                )
                found.append(engine.evaluate(work, on_clients))
    step: Any = engine._evaluation._steps["validation_step"]
    return found, step.traces.used


def assert_same(found: list[Evaluation], expected: list[Evaluation]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_trees_equal(one.values, other.values)
        assert torch.equal(one.counts, other.counts)
        assert one.options == other.options


AT_ONCE = [pair for pair in HONEST if pair[0] not in (Draws, DrawsWithoutKeys, Regularised)]
"""Those that neither draw, which ``vmap`` refuses, nor call torchmetrics objects."""
OFTEN = pytest.mark.parametrize(
    "often",
    [
        pytest.param(False, id="evaluations", marks=pytest.mark.slow),
        pytest.param(True, id="clients"),
    ],
)


@pytest.mark.parametrize(
    ("make", "change"), HONEST, ids=lambda value: getattr(value, "__name__", "ReadsHparam")
)
@OFTEN
def test_honest_steps_are_replayed(make: Any, change: Any, often: bool) -> None:
    # The number of the evaluation is another one in each, and what changes after each client has
    # changed often enough in two.
    times = 5 if not often else 3 if change is nothing else 2
    found, replays = evaluate(make, change, often, evaluations=times)
    expected, none = evaluate(make, change, often, limit=0, evaluations=times)
    assert none == 0
    assert_same(found, expected)
    assert replays > 5
    assert all(len(one.values) for one in found)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("make", "change"), AT_ONCE, ids=lambda value: getattr(value, "__name__", "ReadsHparam")
)
@OFTEN
def test_honest_steps_of_many_clients_are_replayed(
    make: Any, change: Any, often: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of steps that are watched, wherever these run for many clients at once."""
    monkeypatch.setattr(HERE, "EVALUATIONS", 6)

    def seldom(module: Any, number: int) -> None:
        """Change something after the first of three chunks, then after the second and so on."""
        if number % (7 if often else 3) == 1:
            change(module, number)

    expected, none = evaluate(make, seldom, often, record=False, at_once=True)
    found, replays = evaluate(make, seldom, often, at_once=True)
    assert none == 0
    assert_same(found, expected)
    assert replays > 5


class Scaled(PersonalizedModule):
    """Reads a setting that changes between evaluations."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.ReLU()), nn.Linear(6, 4))
        self.scale = 1.0

    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs) * self.scale


class Shouts(Scaled):
    """Its code isn't known."""

    def forward(self, inputs: Any) -> Tensor:
        print(end="")
        return super().forward(inputs)


@pytest.mark.parametrize(("kind", "replayed"), [(Scaled, 3 * 2 * 2), (Shouts, 0)])
def test_means_of_samples_are_replayed(
    kind: type[Scaled], replayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of padded minibatches too.

    With each of two settings there are five evaluations of two chunks, one wider than the other. A
    chunk is taken once, recorded once, and replayed three times.
    """
    monkeypatch.setattr(together, "samples_at_once", lambda data: 2 * max(SIZES))
    torch.manual_seed(0)
    module, data = kind().double(), image_clients(SIZES)
    module.trainer = quiet_trainer(FederatedStrategy(FedAvg()), EVALUATIONS)
    engine = VectorizedEngine(module.eval(), ParameterSplit(module), EngineSettings())
    for number in range(10):
        module.scale = 1.0 + number // 5
        stacked = models(module, number)
        work = EvaluationWork(stacked, torch.arange(len(SIZES)), data, "validation_step")
        found = engine.evaluate(work).values
        for client in filter(SIZES.__getitem__, range(len(SIZES))):
            inputs, labels = data.gather(data.indices[client])
            model = {name: leaf[client] for name, leaf in stacked.items()}
            output = functional_call(module, model, (inputs,))
            hits = output.argmax(1).eq(labels).double().mean()
            expected = {"val_loss": F.cross_entropy(output, labels), "val_acc": hits}
            assert_trees_close({name: found[name][client] for name in found}, expected)
        assert found["val_loss"][SIZES.index(0)].isnan()
    assert engine._evaluation._steps["validation_step"].traces.used == replayed


@pytest.mark.parametrize(
    ("make", "change"), UNKNOWN, ids=lambda value: getattr(value, "__name__", str(value))
)
@OFTEN
def test_steps_that_may_read_more_are_taken(make: Any, change: Any, often: bool) -> None:
    found, replays = evaluate(make, change, often, evaluations=2)
    assert_same(found, evaluate(make, change, often, limit=0, evaluations=2)[0])
    assert replays == 0


@pytest.mark.parametrize(
    ("make", "change"), UNKNOWN, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_steps_of_many_clients_that_may_read_more_are_taken(make: Any, change: Any) -> None:
    def run(record: bool) -> Any:
        try:
            return evaluate(make, change, True, record=record, at_once=True, evaluations=2)
        except Exception as error:
            return str(error), 0

    (found, replays), (expected, _) = run(True), run(False)
    assert replays == 0
    if isinstance(expected, list):
        assert_same(found, expected)
    else:
        assert expected in found


def draws_by_torch(module: Any, loss: Tensor) -> Tensor:
    return loss * torch.rand((), dtype=torch.float64)


def draws_by_numpy(module: Any, loss: Tensor) -> Tensor:
    return loss * float(np.random.rand())


def unchanged(module: Any, loss: Tensor) -> Tensor:
    return loss


@pytest.mark.parametrize("known", [draws_by_torch, unchanged])
def test_steps_that_draw_elsewhere_from_some_client_on(known: Callable[..., Tensor]) -> None:
    """What NumPy draws is that of the client, and nothing of it is replayed."""

    def set_draws(module: Any, number: int) -> None:
        type(module).scaled = draws_by_numpy if number % len(SIZES) in (2, 3) else known

    def make() -> Plain:
        return type("Plain", (Plain,), {"scaled": known})()  # type: ignore[no-any-return]

    found, replays = evaluate(make, set_draws, often=True)
    reference, _ = evaluate(make, set_draws, often=True, record=False)
    assert replays > 5
    for one, other in zip(found, reference, strict=True):
        assert_trees_close(one.values, other.values)


def test_drawn_values_are_those_of_each_minibatch() -> None:
    """The mean of the ones that dropout keeps is torch's, after the seed of a minibatch."""

    class Kept(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log(
                "kept", F.dropout(torch.ones(1000), 0.25, training=True).mean() + 0 * batch[1][0]
            )

    found, replays = evaluate(Kept)
    assert replays > 5
    expected = []
    for client, size in enumerate(SIZES):
        drawn = []
        for number, start in enumerate(range(0, size, 4)):
            generator = torch.Generator().manual_seed(derive(0, "validation_step", client, number))
            ones = torch.empty(1000).bernoulli_(0.75, generator=generator) / 0.75
            drawn += [float(ones.mean())] * min(4, size - start)
        expected.append(sum(drawn) / size if size else torch.nan)
    for one in found:
        want = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(one.values["kept"], want, equal_nan=True, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "change"),
    [(ReadsAttribute, set_scale), (Logs, set_logs), (HandsTheNumberOn, set_scale)],
)
@OFTEN
def test_values_are_those_of_the_reference(make: Any, change: Any, often: bool) -> None:
    found, replays = evaluate(make, change, often)
    reference, none = evaluate(make, change, often, record=False)
    assert (replays > 5, none) == (True, 0)
    for one, other in zip(found, reference, strict=True):
        assert_trees_close(one.values, other.values)


class Several(Plain):
    """Reads the number of the data set."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log(f"loss_{dataloader_idx}", loss * (1 + dataloader_idx))


@pytest.mark.parametrize("at_once", [False, True])
def test_the_number_of_the_data_set_is_read(at_once: bool) -> None:
    found, replays = evaluate(Several, numbers=(0, 1), at_once=at_once)
    assert_same(found, evaluate(Several, numbers=(0, 1), limit=0, at_once=at_once)[0])
    assert replays > 5
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert_trees_close({"loss_1": 2 * one.values["loss_0"]}, other.values)


class LogsSome(Plain):
    """Logs by the number of samples, and in the last minibatch of some clients nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if len(batch[0]) > 2:
            self.log("loss", loss, batch_size=7 + len(batch[0]))
            self.log("most", loss, reduce_fx="max", prog_bar=len(batch[0]) > 3)


@pytest.mark.parametrize("at_once", [False, True])
def test_minibatches_of_other_sizes_log_otherwise(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """The mean of a client of 4, 4 and 3 samples has the weights 11, 11 and 10."""
    monkeypatch.setattr(HERE, "SIZES", (16, 0, 11, 10, 2))
    found, replays = evaluate(LogsSome, at_once=at_once)
    assert_same(found, evaluate(LogsSome, limit=0, at_once=at_once)[0])
    assert replays > 5
    module, data = LogsSome(), image_clients((16, 0, 11, 10, 2))
    for number, one in enumerate(found):
        for client, sizes in ((2, (4, 4, 3)), (3, (4, 4))):
            model = {name: leaf[client] for name, leaf in models(module, number).items()}
            batches = data.indices[client].split(4)[: len(sizes)]
            losses = torch.stack([
                F.cross_entropy(functional_call(module, model, (x,)), y)
                for x, y in map(data.gather, batches)
            ])  # fmt: skip
            weights = torch.tensor(sizes) + 7
            expected = {"loss": (losses * weights).sum() / weights.sum(), "most": losses.max()}
            got = {name: value[client] for name, value in one.values.items()}
            assert_trees_close(got, expected)
        assert one.counts.tolist() == [16, 0, 11, 10, 2]
        assert all(value[[1, 4]].isnan().all() for value in one.values.values())


def test_sizes_that_come_again_are_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four sizes of minibatches, with room for two."""
    made, record = [], trace.Traces._record

    def counting(self: Any, *args: Any) -> Any:
        made.append(self)
        return record(self, *args)

    monkeypatch.setattr(trace.Traces, "_record", counting)
    found, replays = evaluate(Logs, limit=2)
    assert len(made) == 2
    assert_same(found, evaluate(Logs, limit=0)[0])
    assert replays > 5


def test_recordings_of_settings_that_are_gone_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each third evaluation has another attribute, and two sizes of minibatches."""
    monkeypatch.setattr(HERE, "EVALUATIONS", 12)

    def change(module: Any, number: int) -> None:
        module.scale = float(number // 3)

    found, replays = evaluate(ReadsAttribute, change, limit=2)
    assert_same(found, evaluate(ReadsAttribute, change, limit=0)[0])
    assert replays > 12 * 5


class SelectsLate(Plain):
    """Its evaluation can't be recorded, its training can."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.log("val_loss", losses[losses >= losses.median()].mean())


def run(make: Callable[[], Any], engine: str, rounds: int = 4, path: Any = None) -> Fit:
    data = image_clients(SIZES)
    return fit(FedAvg(), data, make(), rounds, engine, val_data=data, ckpt_path=path)


def test_an_evaluation_that_is_not_replayed_leaves_training_replayed() -> None:
    found = run(SelectsLate, "sequential")
    engine: Any = found.federation.engine
    assert engine._sequential.whole.used > 5
    assert engine._sequential.whole._refused == set()
    assert engine._sequential.traces.enabled
    reference = run(SelectsLate, "reference")
    assert found.metrics == pytest.approx(reference.metrics, rel=1e-9)


def test_a_resumed_run_has_the_same_values(tmp_path: Any) -> None:
    def make() -> Any:
        return evaluating(Logs)

    whole = run(make, "sequential", 5)
    checkpoint = run(make, "sequential", 2).save(tmp_path / "last.ckpt")
    assert run(make, "sequential", 5, checkpoint).metrics == whole.metrics
    assert "val_loss" in whole.metrics
