"""Recorded gradients: the same bits as the step itself, and only of steps that read nothing
else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_pfl.contract.known import Known
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.engine import replay, trace
from lightning_pfl.engine.base import EngineSettings, EvaluationWork, LocalWork
from lightning_pfl.engine.in_place import Buffers
from lightning_pfl.engine.recording import KEPT, NotRecordableError
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import FedAvg, FedRep, LpProj
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_trees_close,
    assert_trees_equal,
    local_round,
)
from tests.engine.nets import CLASSES, Ran, cnn, image_clients

pytestmark = pytest.mark.usefixtures("at_once")


def run(
    module: Any, method: Method, engine: Any = "vectorized", most: int = 9, **options: Any
) -> LocalRound:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "LIMIT", most)
        return local_round(method, module, image_clients(), engine, **options)


def replays(outcome: LocalRound) -> int:
    assert isinstance(outcome.engine, (SequentialEngine, VectorizedEngine))
    return outcome.engine.traces.used + outcome.engine.whole.used


@pytest.mark.parametrize(
    ("method", "norm", "dropout"),
    [
        pytest.param(FedAvg(local_epochs=2), True, 0.0, marks=pytest.mark.slow),
        pytest.param(FedAvg(local_epochs=2), False, 0.4, marks=pytest.mark.slow),
        (LpProj(0.5, local_epochs=2), True, 0.4),
        pytest.param(FedRep(head_epochs=2), False, 0.0, marks=pytest.mark.slow),
        (FedRep(head_epochs=2), True, 0.4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else str(value),
)
@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_replayed_steps_are_the_steps(
    engine: str, method: Method, norm: bool, dropout: float
) -> None:
    recorded = run(cnn(norm, dropout), method, engine)
    plain = run(cnn(norm, dropout), method, engine, 0)
    assert replays(recorded) > 0
    assert replays(plain) == 0
    assert_trees_equal(recorded.models, plain.models)
    assert_trees_equal(recorded.result.logs, plain.result.logs)
    assert_trees_close(recorded.models, run(cnn(norm, dropout), method, "reference").models)


def test_the_reference_records_nothing() -> None:
    assert replays(run(cnn(), FedAvg(local_epochs=2), "reference")) == 0


class Thresholded(nn.Module):
    """Its operators depend on a number in a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x * 3


class Counting(nn.Module):
    """Its running count is written before an operator that can't be recorded."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * 2 if self.count.item() > 2 else x


@pytest.mark.parametrize("layer", [Thresholded, Counting])
def test_a_step_that_reads_numbers_is_not_recorded(layer: type[nn.Module]) -> None:
    def module() -> PersonalizedModule:
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), layer())
        return PersonalizedModule(backbone, nn.Linear(4, CLASSES), lr=0.1).double()

    method = LpProj(0.5, local_epochs=2)  # reads the rate: only gradients are recorded
    tried = run(module(), method, "sequential")
    assert replays(tried) == 0
    assert isinstance(tried.engine, SequentialEngine)
    assert not tried.engine.traces.enabled
    plain = run(module(), method, "reference")
    assert_trees_equal(tried.models, plain.models)


def make(kind: type[PersonalizedModule]) -> PersonalizedModule:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.Tanh())
    return kind(backbone, nn.Linear(4, CLASSES), lr=0.1).double()


class OwnSample(PersonalizedModule):
    """Reads a collection that changes between rounds."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.scales: Any = deque([1.0])

    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        values = super().per_sample(batch)
        return {**values, "loss": values["loss"] * self.scales[-1]}


class OwnForward(OwnSample):
    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        return PersonalizedModule.per_sample(self, batch)

    def forward(self, inputs: Any) -> Tensor:
        output: Tensor = super().forward(inputs) * self.scales[-1]
        return output


class UsesInputs(PersonalizedModule):
    """The inputs are used beside the backbone, so cached features don't replace them."""

    def per_sample(self, batch: Any) -> dict[str, Tensor]:
        values = super().per_sample(batch)
        return {**values, "loss": values["loss"] * batch[0].flatten(1).square().mean(1)}


@pytest.mark.parametrize("kind", [OwnSample, OwnForward])
@pytest.mark.parametrize("known", [False, True])
def test_what_a_user_overrides_is_recorded_if_it_is_known(
    kind: type[OwnSample], known: bool
) -> None:
    """A scale of zero from the second round on must stop the training, also where round 0 was
    long."""
    module: Any = make(kind)
    module.scales = list(module.scales) if known else module.scales
    first = run(module, FedAvg(local_epochs=3))
    assert (replays(first) > 0) == known
    module.scales.append(0.0)
    engine, method = first.engine, FedAvg()
    method.bind(Known.of(engine.parameter_split, 5))
    work = LocalWork(
        method,
        first.received,
        {"model": {}},
        first.info,
        image_clients(),
        method.phases(1),
        module.configure_optimizers(),
    )
    again = engine.train(work)
    # Nothing moves the first layer: no gradient, and biases have no weight decay.
    assert torch.equal(
        again.uploads["model"]["backbone.1.bias"], first.received["model"]["backbone.1.bias"]
    )


@pytest.mark.parametrize("kind", [UsesInputs, OwnSample, OwnForward])
@pytest.mark.parametrize(
    "method", [FedAvg(local_epochs=3), FedRep(head_epochs=3)], ids=["FedAvg", "FedRep"]
)
def test_overridden_steps_agree_with_the_sequential_engine(
    kind: type[PersonalizedModule], method: Method
) -> None:
    a, b = (run(make(kind), method, engine) for engine in ("vectorized", "reference"))
    assert_trees_close(a.models, b.models)
    assert_trees_close(a.result.logs, b.result.logs)


def record(
    function: Callable[..., Any], args: Sequence[Tensor], leaves: list[Tensor]
) -> tuple[Any, replay.Recording]:
    return replay.record(function, args, leaves, Buffers())


def test_what_does_nothing_is_left_out_and_what_writes_is_kept() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        (x.exp() + 1).sum()  # read by nobody
        same = x.view(2, 3).detach()
        row = same.view(3, 2)[0]
        row.mul_(10.0)  # into the argument, through three views, which become one
        return same, row + 1

    x = torch.ones(2, 3)
    (same, row), found = record(function, (x,), [x])
    assert torch.equal(same, x)
    assert row.tolist() == [11.0, 11.0]
    x = torch.ones(2, 3)
    with (ran := Ran()):
        found([x])
    names = sorted(name.split(".")[1] for name in ran.operators)
    assert names == ["add", "as_strided", "clone", "mul_"]
    x = torch.arange(6.0).view(2, 3)
    same, row = found([x])
    assert x.tolist() == [[0.0, 10.0, 2.0], [3.0, 4.0, 5.0]]
    assert torch.equal(same, x)
    assert row.tolist() == [1.0, 11.0]


X = torch.arange(12.0).view(3, 4)


def adds_to_what_stays() -> Tensor:
    stays = X
    stays += 1.0
    return stays.sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i],
        lambda x, i: x[: int(i)],
        lambda x, i: x * float(x.mean()),
        lambda x, i: x * x.mean().tolist(),
        lambda x, i: x * torch.from_numpy(x.detach().numpy()),
        lambda x, i: torch.tensor([x.sum(), 1.0]),
        lambda x, i: torch.as_tensor([[1.0, x.sum()]]),
        lambda x, i: x.new_tensor((x.sum(),)),
        lambda x, i: x.new([x.sum(), 1.0]),
        lambda x, i: torch.Tensor([x.sum(), 1.0]),
        lambda x, i: torch.LongTensor([i]),
        lambda x, i: torch.BoolTensor([i]),
        lambda x, i: x[[i] * 40],
        lambda x, i: x[:, [i] * 40],
        lambda x, i: x.clone().__setitem__([[i, 0]], 0.0),
        lambda x, i: torch.tensor_split(x, i.view(1))[0],
        lambda x, i: nn.functional.one_hot(i),
        lambda x, i: x.tensor_split(i.view(1))[1],
        lambda x, i: x.clone().apply_(lambda number: number + 1),
        lambda x, i: x.clone().map_(x, lambda one, other: one * other),
        lambda x, i: {str(x.sum()): x},
        lambda x, i: {f"{x.sum():.1f}": x},
        lambda x, i: max(x.sum(), x.mean()),
        lambda x, i: torch.add(x, x, alpha=i),
        lambda x, i: x[x > 3],
        lambda x, i: x[(x > 3).nonzero()[:, 0]],
        lambda x, i: x.unique().sum(),
        lambda x, i: torch.tensor([0.0] * 4).add_(x.sum(0)),
        lambda x, i: X.mul_(2.0).sum() * x,
        lambda x, i: adds_to_what_stays() * x,
    ],
)
def test_numbers_that_reach_python_are_refused(function: Any) -> None:
    """Also those that no operator shows, and what stays is as it was."""
    args = [torch.arange(12.0).view(3, 4), torch.tensor(1)]
    with pytest.raises(NotRecordableError):
        record(function, args, args)
    assert torch.equal(X, torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i.view(1)],
        lambda x, i: nn.functional.one_hot(x.abs().long() % 5, 5) * x.unsqueeze(2),
        lambda x, i: nn.functional.one_hot(i, num_classes=3),
        lambda x, i: x[i.view(1), torch.arange(2)],
        lambda x, i: x[[0, 2]] * torch.Tensor([1.0, 2.0, 3.0, 4.0]) + x.tensor_split([1])[0],
        lambda x, i: torch.where(x > 3, x, 0) * i,
        lambda x, i: x.masked_fill(x > 3, 0.5) + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda x, i: sum(row * x for row in x),
        lambda x, i: x.quantile(0.5) + x.clamp(min=i) + x.norm(),
        lambda x, i: torch.zeros(4).add_(x.sum(0)),
    ],
)
def test_numbers_that_stay_in_tensors_are_replayed(function: Any) -> None:
    args = [torch.arange(12.0).view(3, 4), torch.tensor(1)]
    _, found = record(function, args, args)
    for factor, index in ((3.0, 2), (-1.0, 0)):
        args = [factor * torch.arange(12.0).view(3, 4) + 1, torch.tensor(index)]
        assert torch.equal(found(args), function(*args))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_replay_refuses_labels_that_are_no_classes(label: int) -> None:
    labels = torch.tensor([0, 2])
    _, found = record(lambda y: nn.functional.one_hot(y, 3), [labels], [labels])
    with pytest.raises(RuntimeError, match="index"):
        found([torch.tensor([label, 0])])


def test_minibatches_of_other_types_have_recordings_of_their_own() -> None:
    """Also those that Python holds for equal, and those that hold the same tensors elsewhere."""
    traces = trace.Traces(enabled=True)
    traces.begin_round(check=False, at_once=True)
    traces.enter(())
    batches = [
        *((X, None), (None, X), [X, None], {0: X, 1: None}, ((0, X), (1, None))),
        *((X, 1), (X, True), (X, 1.0), (X, 0), (X, False), (X, 0.0), (X, -0.0)),
    ]
    for by, batch in enumerate(batches):
        for _ in range(3):  # the last one is neither recorded nor compared
            assert torch.equal(traces.run(lambda _, by=by: X * by, batch), X * by)
    assert traces.used == 2 * len(batches)


def test_a_tensor_that_a_minibatch_holds_twice_is_one() -> None:
    """Two tensors in its place have a recording of their own, and so has one in other places."""
    traces = trace.Traces(enabled=True)
    traces.begin_round(check=False, at_once=True)
    traces.enter(())
    x, y, z = (torch.full((2,), number) for number in (2.0, 3.0, 5.0))
    for batch in ((x, x, y), (x, y, y), (x, y, x), (y, y, y), (x, y, z)):
        for _ in range(3):
            found = traces.run(lambda one: one[0] + 10 * one[1] + 100 * one[2], batch)
            assert torch.equal(found, batch[0] + 10 * batch[1] + 100 * batch[2])
    assert traces.used == 10


def test_settings_that_change_in_each_round_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "CONTEXTS", 2)
    numbers = trace.Numbers()
    assert [numbers[key] for key in ("a", "b", "a")] == [0, 1, 0]
    assert numbers["c"] == 2  # in the place of b
    assert [numbers[key] for key in ("a", "c", "b", "a")] == [0, 2, 3, 4]


# --- evaluation -----------------------------------------------------------------------------------


class AlwaysDropping(nn.Module):
    """Draws also in an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class Recorder:
    """Counts what is recorded of a product with a number, which a minibatch holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
        self.recorded = 0
        monkeypatch.setattr(trace, "record", self.record)
        self.traces = trace.Traces(enabled=True)
        self.traces.begin_round(at_once=at_once)
        self.traces.enter(())

    def record(self, *given: Any) -> Any:
        self.recorded += 1
        return replay.record(*given)

    def step(self, number: float) -> bool:
        """Take a step, and return whether it was recorded."""
        before = self.recorded
        batch = {"x": torch.ones(3), "number": number}
        result = self.traces.run(lambda one: one["x"] * one["number"], batch)
        assert result.tolist() == [number] * 3
        return self.recorded > before


def test_numbers_that_never_come_again_are_not_recorded_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace, "WAITING", 3)
    steps = Recorder(monkeypatch, at_once=True)
    assert [steps.step(number) for number in (1.0, 2.0, 3.0, 4.0, 5.0)] == [True] * 3 + [False] * 2
    assert steps.step(5.0)  # at its second call
    assert not steps.step(1.0)  # is used
    assert not steps.step(2.0)
    assert steps.step(6.0)


def test_calls_of_steps_that_come_seldom_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "CONTEXTS", 2)
    steps = Recorder(monkeypatch, at_once=False)
    assert [steps.step(number) for number in (1.0, 2.0, 3.0, 1.0, 3.0)] == [False] * 4 + [True]


@pytest.mark.parametrize("layer", [nn.Tanh, AlwaysDropping])
def test_replayed_evaluations_are_the_evaluations(layer: type[nn.Module]) -> None:
    """With models of the clients' own, and numbers of samples from 0 to four minibatches."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), layer())
    module = PersonalizedModule(backbone, nn.Linear(4, CLASSES)).double().eval()
    data = image_clients()
    clients = torch.tensor([3, 0, 2, 4])
    generator = torch.Generator().manual_seed(1)
    models = {
        name: torch.randn(4, *leaf.shape, generator=generator, dtype=leaf.dtype)
        for name, leaf in ParameterSplit(module).model().items()
    }
    works = [EvaluationWork(models, clients, data, "validation_step", limit) for limit in (1.0, 1)]
    heard: list[int] = []
    fast, plain = (
        SequentialEngine(module, ParameterSplit(module), EngineSettings(), record=record)
        for record in (True, False)
    )
    for work in [*works, *works]:
        found = fast.evaluate(work, lambda at, _=None: heard.extend(at))
        expected = plain.evaluate(work)
        assert found.counts.tolist() == expected.counts.tolist()
        assert found.options == expected.options
        assert found.predictions == expected.predictions == []
        assert_trees_equal(found.values, expected.values)
    assert heard == [0, 1, 2, 3] * 4
    used, none = (one._evaluation._steps["validation_step"].traces.used for one in (fast, plain))
    assert used > 0
    assert none == 0


class Slowly(nn.Module):
    """Reads a number that changes by few roundings in each call, where no recording sees it."""

    calls: ClassVar = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return x * (1 + 4 * torch.finfo(x.dtype).eps * self.calls[0])


@pytest.mark.parametrize("method", [FedAvg(local_epochs=2), LpProj(0.5, local_epochs=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_that_changes_a_little_is_not_replayed(method: Method, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    Slowly.calls[0] = 0
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), Slowly())
    module = PersonalizedModule(backbone, nn.Linear(4, CLASSES), lr=0.1).to(dtype)
    found = local_round(method, module, image_clients(dtype=dtype), "sequential")
    engine: Any = found.engine
    assert not engine.traces.enabled or engine.whole._refused


# --- what is made once ----------------------------------------------------------------------------


def test_views_at_an_offset_of_what_a_step_made_and_of_its_arguments() -> None:
    """An argument may be anywhere in its memory, and a replay's elsewhere than the recorded one."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x * 2
        ones = torch.ones(2)
        return made.view(6)[2:].view(2, 2)[:, 1] + ones, x.view(6)[3:5] + ones.add_(1)

    base = torch.arange(20.0)
    x = base[:6].view(2, 3)
    _, found = record(function, (x,), [x])
    for start in (0, 7):
        x = base[start : start + 6].view(2, 3)
        for leaf, expected in zip(found([x]), function(x), strict=True):
            assert torch.equal(leaf, expected)


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_recording_runs_in_inference_mode_and_outside(first: bool, then: bool) -> None:
    def function(x: Tensor) -> Tensor:
        # Of which the product and the zeros stay in memory of the program.
        return (torch.zeros(3) + x * x).exp().sum() + torch.tanh(x).sum()

    with torch.inference_mode(first):
        leaves = [torch.tensor([0.25, 0.5, 1.0])]
        _, recording = replay.record(function, tuple(leaves), leaves, Buffers())
    with torch.inference_mode(then):
        for values in ([1.0, 2.0, -1.0], [0.5, 0.0, 3.0]):
            x = torch.tensor(values)
            assert recording([x]).equal(function(x))


def test_arguments_that_were_one_when_they_were_recorded() -> None:
    """A client's model is the received one before its first step, and another one after it."""

    def function(model: Tensor, received: Tensor) -> Tensor:
        return model.view(6)[:4].view(2, 2) - received.view(3, 2)[1:]

    base = torch.arange(6.0)
    model, received = base.view(2, 3), base.view(2, 3)
    _, found = record(function, (model, received), [model, received])
    model = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    assert found([model, received]).tolist() == [[-1.0, -1.0], [0.0, 3.0]]
    assert found([received, model]).tolist() == [[-4.0, -7.0], [-14.0, -29.0]]


def test_a_recording_is_checked_on_arguments_with_gaps() -> None:
    """Rows of a flat tensor lie further apart than they are long; an expanded one has one row."""
    flat = torch.arange(16.0).view(2, 8)
    traces = trace.Traces(enabled=True)

    def function(x: Tensor, row: Tensor) -> Tensor:
        return x.view(2, 2, 3)[:, 1].transpose(0, 1) * row

    traces.enter("phase")
    for scale in (1.0, 2.0, 3.0, 4.0):
        row = torch.full((1,), scale).expand(3, 2)
        found = traces.run(function, flat[:, 1:7], row)
        assert found.tolist() == [[4 * scale, 12 * scale], [5 * scale, 13 * scale],
                                  [6 * scale, 14 * scale]]  # fmt: skip
    assert traces.enabled
    assert traces.used == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_recording_rounds_numbers_in_16_bits_as_the_step_does(dtype: torch.dtype) -> None:
    """Label smoothing multiplies by numbers, which torch's operator in place rounds before."""

    def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1)

    def drawn() -> list[Tensor]:
        return [torch.randn(4, 3).to(dtype), torch.randint(3, (4,))]

    torch.manual_seed(0)
    given = drawn()
    _, recording = replay.record(smoothed, tuple(given), given, Buffers(KEPT))
    for _ in range(100):
        given = drawn()
        assert torch.equal(recording(given), smoothed(*given))
