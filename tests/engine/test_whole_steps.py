"""Whole recorded steps: the same bits as the steps themselves, and only of steps that may be
recorded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from lightning_pfl.core.tree import Tree, expand, tmap
from lightning_pfl.engine import trace
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.in_place import Buffers, compile_in_place
from lightning_pfl.engine.recording import Recorder
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.whole_steps import WholeSteps
from lightning_pfl.methods import SCAFFOLD, Ditto, FedAvg, FedMAP, FedProx, FedRep, LpProj, PFedMe
from lightning_pfl.methods.base import LocalStep, Method, recordable
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_rounds_equal,
    assert_trees_equal,
    local_round,
)
from tests.engine.nets import CLASSES, Ran, cnn, image_clients

pytestmark = pytest.mark.usefixtures("at_once")


def run(method: Method, module: Any, limit: int = 99, **options: Any) -> LocalRound:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "LIMIT", limit)
        data = image_clients((9, 0, 8, 13))
        return local_round(method, module, data, "sequential", **options)


def replays(outcome: LocalRound) -> int:
    assert isinstance(outcome.engine, SequentialEngine)
    return outcome.engine.whole.used


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(local_epochs=2),
        FedRep(head_epochs=2),
        Ditto(0.5, local_epochs=2),
        Ditto(0.5, personal_epochs=2),
        SCAFFOLD("I", local_epochs=2),
        SCAFFOLD("II", local_epochs=2),
        FedMAP(local_epochs=2),
        FedMAP(data_term="sum", weighting="uniform", local_epochs=2),
        PFedMe(local_epochs=2),
        FedProx(0.5, local_epochs=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_replayed_steps_are_the_steps(method: Method) -> None:
    recorded, plain = (run(method, cnn(), limit) for limit in (99, 0))
    assert replays(recorded) > 5
    assert replays(plain) == 0
    assert_rounds_equal(recorded, plain)


class HalvesInputs(PersonalizedModule):
    """Writes to its minibatch."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


def test_a_step_that_writes_to_its_minibatch_is_replayed() -> None:
    def module() -> HalvesInputs:
        layers = cnn()
        return HalvesInputs(layers.backbone, layers.head, lr=0.1, num_classes=CLASSES)

    recorded, plain = (run(FedAvg(local_epochs=2), module(), limit) for limit in (99, 0))
    assert replays(recorded) > 5
    assert_rounds_equal(recorded, plain)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        pytest.param(None, EngineSettings(clip_value=0.1), id="SGD, clipped"),
        pytest.param(torch.optim.Adam, EngineSettings(), id="Adam"),
        pytest.param(
            torch.optim.RMSprop,
            EngineSettings(clip_value=0.01, clip_algorithm="value", accumulate=2),
            id="RMSprop, accumulated, clipped by value",
        ),
    ],
)
def test_optimizers_and_flags(optimizer: Any, settings: EngineSettings) -> None:
    def module() -> PersonalizedModule:
        return (
            cnn(momentum=0.0) if optimizer is None else cnn(optimizer=partial(optimizer, lr=0.01))
        )

    method = Ditto(0.5, local_epochs=2)
    recorded, plain = (run(method, module(), limit, settings=settings) for limit in (99, 0))
    assert replays(recorded) > 1
    assert_rounds_equal(recorded, plain)


class Halved(Ditto):
    """Another step than the one that may be recorded."""

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        state = super().client_step(state, minibatches, client)
        return {**state, "personal": tmap(lambda leaf: leaf / 2, state["personal"])}


def test_a_step_of_ones_own_is_not_recorded() -> None:
    assert replays(run(Halved(local_epochs=2), cnn())) == 0


class Shrinking(Method):
    """Subtracts a share of the model, and noise if asked for."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__(local_epochs=3)
        self.share, self.noise = 0.1, noise

    @recordable("share")
    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        model = client.train(state["model"], minibatches)
        drawn = client.noise(model) if self.noise else model
        return {"model": tmap(lambda leaf, e: leaf - self.share * e, model, drawn)}


class Forgetful(FedProx):
    """Doesn't name its weight, without which a round's first step is the same."""

    client_step = recordable()(lambda self, *given: FedProx.client_step(self, *given))

    def __init__(self) -> None:
        super().__init__(prox_weight=0.1, local_epochs=3)

    @property
    def share(self) -> float:
        """The weight."""
        return self.prox_weight

    @share.setter
    def share(self, value: float) -> None:
        self.prox_weight = value


@pytest.mark.parametrize("kind", [Shrinking, Forgetful])
def test_a_setting_that_changes_is_followed(kind: type[Shrinking | Forgetful]) -> None:
    method = kind()
    first = run(method, cnn(norm=False))
    engine = first.engine
    assert isinstance(engine, SequentialEngine)
    used = engine.whole.used
    method.share = 0.3
    work: dict[str, Any] = {"server": first.server, "round": 1}
    again = local_round(
        method, cnn(norm=False), image_clients((9, 0, 12, 13, 8)), "reference", **work
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pfl.testing.rounds.SequentialEngine", lambda *_, **__: engine)
        same = local_round(
            method, engine.module, image_clients((9, 0, 12, 13, 8)), "reference", **work
        )
    assert engine.whole.used > used
    assert_trees_equal(same.result.uploads, again.result.uploads)


def test_noise_is_not_recorded() -> None:
    method = Shrinking(noise=True)
    recorded, plain = (run(method, cnn(norm=False), limit) for limit in (99, 0))
    assert replays(recorded) == 0
    assert_rounds_equal(recorded, plain)


SCALE = [1.0]


class Scaled(nn.Module):
    """Reads a number from outside of the module."""

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE[0]


def test_a_step_that_reads_something_else_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """The first round is recorded; in the next ones the number is another one."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), Scaled())
    module = PersonalizedModule(backbone, nn.Linear(4, CLASSES), lr=0.1).double()
    SCALE[0] = 1.0
    method, data = FedAvg(local_epochs=3), image_clients((9, 12, 13, 8))
    first = local_round(method, module, data, "sequential")
    engine = first.engine
    assert isinstance(engine, SequentialEngine)
    assert engine.whole.used > 3
    SCALE[0] = 2.0
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr("lightning_pfl.testing.rounds.SequentialEngine", lambda *_, **__: engine)
        found = local_round(method, module, data, "reference")
    assert "a step differs from its recording" in caplog.text
    plain = local_round(method, module, data, "reference")
    assert_trees_equal(found.models, plain.models)


class Object:
    """What a layer may hold."""

    scale = 1.0


class Annealed(nn.Module):
    """Reads a number from an object."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"inner": Object()}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held["inner"].scale


class Remembering(nn.Module):
    """Keeps its last inputs, and adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls = torch.zeros(0), 0

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.calls = x.detach().clone(), self.calls + 1
        return x


def small(layer: nn.Module) -> PersonalizedModule:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), layer)
    return PersonalizedModule(backbone, nn.Linear(4, CLASSES), lr=0.1).double()


@pytest.mark.parametrize("method", [FedAvg(local_epochs=3), LpProj(0.5, local_epochs=3)])
def test_a_number_in_an_object_is_followed_however_little_it_changes(method: Method) -> None:
    """A difference below the tolerance of a comparison with the recording."""
    data, module = image_clients((9, 12, 13, 8)), small(Annealed())
    engine = local_round(method, module, data, "sequential").engine
    assert isinstance(engine, SequentialEngine)
    assert engine.whole.used + engine.traces.used > 3
    layer: Any = module.backbone.get_submodule("2")
    layer.held["inner"].scale = 1 + 1e-6
    plain = local_round(method, module, data, "reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pfl.testing.rounds.SequentialEngine", lambda *_, **__: engine)
        found = local_round(method, module, data, "reference")
    assert_trees_equal(found.models, plain.models)


@pytest.mark.parametrize("method", [FedAvg(local_epochs=3), LpProj(0.5, local_epochs=3)])
def test_steps_that_write_to_attributes_are_not_replayed(method: Method) -> None:
    data = image_clients((9, 12, 13, 8))
    recorded, plain = small(Remembering()), small(Remembering())
    first = local_round(method, recorded, data, "sequential")
    assert isinstance(first.engine, SequentialEngine)
    assert first.engine.whole.used + first.engine.traces.used == 0
    local_round(method, plain, data, "reference")
    one, other = (
        cast("Remembering", module.backbone.get_submodule("2")) for module in (recorded, plain)
    )
    assert one.calls == other.calls > 0
    assert torch.equal(one.last, other.last)


# --- states in registers --------------------------------------------------------------------------


def swapped(state: Tree) -> Tree:
    """Two entries change places, and one of them changes in place before."""
    state["a"].mul_(2)
    return {"a": state["b"], "b": state["a"], "kept": state["kept"]}


def shifted(state: Tree) -> Tree:
    """Results are views of other entries, and one is a constant."""
    both = torch.stack([state["a"], state["b"]])
    return {"a": both[1], "b": state["a"].flip(0) + torch.ones(3), "kept": state["kept"]}


def grown(state: Tree) -> Tree:
    """An entry gets another shape, another one is new in the second step."""
    return {**state, "a": torch.cat([state["a"], state["b"]]), "new": state["b"] * 2}


def with_log(
    function: Callable[[Tree], Tree], state: Tree, given: list[Tensor]
) -> tuple[Tree, list[Any]]:
    return function(state), [given[0] * 2]


@pytest.mark.parametrize("function", [swapped, shifted, grown])
def test_results_of_all_kinds(function: Callable[[Tree], Tree]) -> None:
    steps = WholeSteps()
    context = steps.context("any")
    assert context is not None
    for _ in range(4):
        kept = torch.tensor([7.0])
        given = {"a": torch.arange(3.0), "b": torch.arange(3.0) + 10, "kept": kept}
        before = tmap(Tensor.clone, given)
        expected = tmap(Tensor.clone, given)
        steps.load(context, given)
        for _ in range(3):
            x = torch.rand(2)
            expected = function(tmap(Tensor.clone, expected))
            logged: Any = steps.step(partial(with_log, function), [x])
            assert torch.equal(logged[0], x * 2)
        found = steps.unload()
        assert_trees_equal(found, expected)
        assert_trees_equal(given, before)
        assert found["kept"] is kept
    assert steps.used >= 6


def test_what_is_logged_stays() -> None:
    """It isn't the entry itself, which the next step changes."""
    steps = WholeSteps()
    steps.load(steps.context("any") or 0, {"a": torch.zeros(2)})

    def step(state: Tree, given: Any) -> tuple[Tree, list[Any]]:
        new = state["a"] + 1
        return {"a": new}, [new, state["a"]]

    def run_step() -> list[Any]:
        return list(steps.step(step, []))

    found = [[leaf.tolist() for leaf in run_step()] for _ in range(6)]
    late = [run_step() for _ in range(2)]
    assert steps.used >= 4
    assert found == [[[n + 1.0] * 2, [float(n)] * 2] for n in range(6)]
    assert [[leaf.tolist() for leaf in logged] for logged in late] == [
        [[n + 1.0] * 2, [float(n)] * 2] for n in (6, 7)
    ]


def test_minibatches_that_hold_a_tensor_twice_have_programs_of_their_own() -> None:
    """Two views of samples may be the samples themselves in some minibatches."""
    steps = WholeSteps()
    steps.begin_round(check=False, at_once=True)
    steps.load(steps.context("any") or 0, {"w": torch.zeros(1)})

    def step(state: Tree, given: list[Tensor]) -> tuple[Tree, list[Any]]:
        return {"w": state["w"] + given[0] + 10 * given[1]}, []

    x, y, sum_of_all = torch.tensor([2.0]), torch.tensor([3.0]), 0.0
    for given in ([x, x], [x, y], [y, x]):
        for _ in range(3):
            sum_of_all += float(given[0]) + 10 * float(given[1])
            steps.step(step, given)
            assert float(steps.state()["w"]) == sum_of_all
    assert steps.used >= 6


def test_a_step_is_taken_whose_minibatch_asks_for_gradients() -> None:
    """As one has that a collate function has made so; w_1 = w_0 + d(w_0 x)^2 / dx, and x = 1."""
    steps = WholeSteps()
    steps.load(steps.context("any") or 0, {"w": torch.ones(1)})

    def step(state: Tree, given: list[Tensor]) -> tuple[Tree, list[Any]]:
        w, x = state["w"], given[0]
        if not x.requires_grad:
            return {"w": w * 0}, []
        (gradient,) = torch.autograd.grad((w * x).square().sum(), x)
        return {"w": w + gradient}, []

    for number in range(4):
        steps.step(step, [torch.ones(1, requires_grad=True)])
        assert steps.state()["w"].tolist() == [[3.0], [21.0], [903.0], [1631721.0]][number]
    steps.step(step, [torch.ones(1)])
    assert steps.state()["w"].tolist() == [0.0]


def test_settings_that_are_new_in_a_round_are_recorded_if_a_step_comes_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first round, and with settings of an earlier one, at once."""
    monkeypatch.setattr(trace, "WARM_UP", 2)
    steps, replays = WholeSteps(), []

    def step(state: Tree, given: list[Tensor]) -> tuple[Tree, list[Any]]:
        return {"a": state["a"] + given[0]}, []

    for rate in (1.0, 2.0, 2.0, 3.0, 1.0):
        steps.begin_round(at_once=True)
        context, before = steps.context(rate), steps.used
        assert context is not None
        for _ in range(2):
            steps.load(context, {"a": torch.zeros(2)})
            for _ in range(2):
                steps.step(step, [torch.tensor(rate)])
            assert steps.unload()["a"].tolist() == [2 * rate] * 2
        replays.append(steps.used - before)
    # All but the first of four; all but two and the third; all; and again.
    assert replays == [3, 1, 4, 1, 4]


class Attending(nn.Module):
    """Attention among the rows of a picture, of which the last one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return cast(Tensor, self.attention(rows, rows, rows)[0][:, -1])


@pytest.mark.parametrize("method", [FedAvg(local_epochs=2), SCAFFOLD("II", local_epochs=2)])
def test_gradients_of_slices_are_those_of_the_steps(method: Method) -> None:
    torch.manual_seed(0)
    module = PersonalizedModule(Attending(), nn.Linear(5, CLASSES), lr=0.1).double()
    recorded, plain = (run(method, module, limit) for limit in (99, 0))
    assert replays(recorded) > 5
    assert_rounds_equal(recorded, plain)


# --- programs -------------------------------------------------------------------------------------


def row(gradient: Tensor, at: int) -> Tensor:
    """The gradient of a row."""
    found = torch.ops.aten.select_backward.default(gradient, [4, len(gradient)], 0, at)
    return cast(Tensor, found)


def rows(gradient: Tensor, begin: int, end: int) -> Tensor:
    """The gradient of some rows."""
    found = torch.ops.aten.slice_backward.default(gradient, [4, 4], 0, begin, end, 1)
    return cast(Tensor, found)


def draw_program(seed: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """Draw a function of four matrices that makes four, by operators of all kinds."""
    draws = random.Random(seed)
    kinds = [draws.randrange(19) for _ in range(12)]
    picks = [(draws.randrange(99), draws.randrange(99)) for _ in kinds]
    ends = [draws.randrange(99) for _ in range(4)]

    def function(given: list[Tensor]) -> list[Tensor]:
        held = list(given)
        for kind, (first, second) in zip(kinds, picks, strict=True):
            a, b = held[first % len(held)], held[second % len(held)]
            operators: list[Callable[[Tensor, Tensor], Tensor]] = [
                lambda a, b: a + b,
                lambda a, b: torch.sub(a, b, alpha=0.5),
                lambda a, b: a @ b / 4,
                lambda a, b: torch.relu(a),
                lambda a, b: a.t(),
                lambda a, b: a * torch.full((4, 4), 0.5),
                lambda a, b: torch.cat([a[:2], b[2:]]),
                lambda a, b: a[1:3].repeat(2, 1),
                lambda a, b: (a * 2).add_(b),
                lambda a, b: torch.zeros_like(a).addcmul_(a, b.sigmoid()),
                lambda a, b: a.add_(torch.tanh(b)) if a.is_contiguous() else a,
                lambda a, b: b.sum(0, keepdim=True).expand(4, 4) * a.clone(),
                lambda a, b: torch.empty_like(a).copy_(b).mul_(a),
                lambda a, b: row(a[0], 2),
                lambda a, b: row(a[0], 2) + row(b[1], -1) + row(a[1], 1),
                lambda a, b: rows(a[:3], 0, 3) + row(b[1], -1),
                lambda a, b: (row(a[0], 2) + row(b[1], -2)).add_(rows(b[:2], 1, 3)),
                lambda a, b: (a + b).transpose_(0, 1),
                lambda a, b: a[:].t_(),
            ]
            held.append(operators[kind](a, b))
        return [held[end % len(held)] for end in ends]

    return function


@pytest.mark.sweep(100)
@pytest.mark.parametrize("seed", range(200))
def test_programs_of_all_kinds(seed: int) -> None:
    """Three tensors are in place, of which the results are copied; one is an argument."""
    function, generator = draw_program(seed), torch.Generator().manual_seed(seed)
    buffers = Buffers(8 if seed % 3 == 0 else None)
    placed = [torch.empty(4, 4) for _ in range(3)]

    def fill() -> list[Tensor]:
        for leaf in placed:
            leaf.copy_(torch.randn(4, 4, generator=generator))
        return [*placed, torch.randn(4, 4, generator=generator)]

    arguments = fill()
    with (recorder := Recorder(arguments)):
        results = function(arguments)
    names = [recorder.name(leaf) for leaf in results]
    given = dict(zip(recorder.arguments, placed, strict=False))
    targets = list(zip(names, placed, strict=False))
    replay = compile_in_place(recorder, given, targets, results[3:], buffers)
    for _ in range(3):
        arguments = fill()
        expected = [leaf.clone() for leaf in function([leaf.clone() for leaf in arguments])]
        (found,) = replay(arguments[3].clone())
        for leaf, want in zip([*placed, found], expected, strict=True):
            assert torch.equal(leaf, want)


def test_a_program_returns_a_tree_of_its_own() -> None:
    """With other tensors, and new dicts and lists, which a caller may change."""
    with (recorder := Recorder([x := torch.randn(3)])):
        result = [({"a": x + 1, 2: x * 2}, math.inf, "b"), (x - 1,), None, True, 0.1]
    replay = compile_in_place(recorder, {}, [], result, Buffers())
    for _ in range(2):
        x = torch.randn(3)
        (values, *others), (last,), *rest = found = replay(x)
        assert type(found) is list
        assert others == [math.inf, "b"]
        assert rest == [None, True, 0.1]
        assert values.keys() == {"a", 2}
        want = x + 1, x * 2, x - 1
        assert all(map(torch.equal, (values.pop("a"), values.pop(2), last), want))


@pytest.mark.parametrize("changes", [False, True])
def test_a_copy_that_is_logged_is_made_only_if_its_source_changes(changes: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sum(1)
        kept = total.detach().clone()
        return kept, total.add_(1) if changes else total.exp()

    state = torch.zeros(2)
    with (recorder := Recorder([x := torch.randn(2, 3)])):
        kept, new = function(x)
    replay = compile_in_place(recorder, {}, [(recorder.name(new), state)], kept, Buffers(0))
    x = torch.randn(2, 3)
    with profile() as seen:
        found = replay(x)
    assert all(map(torch.equal, (found, state), function(x)))
    assert ("aten::clone" in {one.name for one in seen.events()}) == changes


def test_a_program_uses_its_memory_again() -> None:
    """Ten sums after another need one buffer, and views and constants none."""
    x = torch.zeros(8, 8)

    def function(a: Tensor, b: Tensor) -> Tensor:
        for _ in range(10):
            a = (a.t() @ b).view(64).view(8, 8) + torch.ones(8, 8)
        return a

    b = torch.randn(8, 8)
    with (recorder := Recorder([x, b])):
        result = function(x, b)
    buffers = Buffers()
    replay = compile_in_place(recorder, {"a0": x}, [(recorder.name(result), x)], [], buffers)
    assert replay(b) == []
    assert torch.equal(x, result)
    assert buffers.count() == 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.mse_loss,
        nn.functional.smooth_l1_loss,
        nn.functional.huber_loss,
        nn.functional.soft_margin_loss,
        nn.functional.binary_cross_entropy,
    ],
)
def test_losses_that_are_read_again(
    loss: Callable[..., Tensor], reduction: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch's variants that write to a given scalar make it larger, or keep one sample's loss."""
    x, y = torch.rand(5), torch.rand(5)
    with (recorder := Recorder([x, y])):
        expected = loss(x, y, reduction=reduction) * 2
    replay = compile_in_place(recorder, {}, [], [expected], Buffers())
    for _ in range(2):
        assert torch.equal(replay(x, y)[0], expected)
    assert "resized" not in capfd.readouterr().err


def test_large_tensors_that_do_not_fit_are_new_in_each_replay() -> None:
    def function(x: Tensor) -> Tensor:
        made = torch.empty_like(x).copy_(x @ x)
        return made.sum(0) + (x * 2).clone().t().sum(0) + (row(x[0], 1) + row(x[1], 2)).sum(0)

    with (recorder := Recorder([x := torch.randn(4, 4)])):
        result = function(x)
    for largest in (15, 16):
        buffers = Buffers(largest)
        replay = compile_in_place(recorder, {}, [], [result], buffers)
        assert torch.equal(replay(x)[0], result)
        sizes = [key[-1] for key in buffers._free]
        assert (16 in sizes) == (largest == 16)


def test_memory_that_a_program_fills_is_where_its_result_is_to_be() -> None:
    """As an optimizer makes its states: then nothing is copied, and no buffer is taken."""
    x, new = torch.randn(4, 4), torch.empty(4, 4)
    with (recorder := Recorder([x])):
        result = torch.empty_like(x).copy_(x)
    buffers, targets = Buffers(), [(recorder.name(result), new)]
    with (ran := Ran()):
        compile_in_place(recorder, {"a0": x}, targets, [], buffers)()
    assert torch.equal(new, x)
    assert buffers.count() == 0
    assert ran.operators == ["aten.copy_.default"]


def test_a_leaf_that_clients_share_and_a_step_changes() -> None:
    """Each client begins with it as it was, also where the one before has changed it."""
    steps, shared = WholeSteps(), torch.tensor([1.0, 2.0])
    context = steps.context("any")
    assert context is not None
    given = expand({"a": shared, "anchor": shared}, 1)

    def step(state: Tree, given: Any) -> tuple[Tree, list[Any]]:
        return {"a": state["a"].add_(1), "anchor": state["anchor"]}, []

    for _ in range(6):
        steps.load(context, given)
        for _ in range(2):
            steps.step(step, [])
        found = steps.unload()
        assert found["a"].tolist() == [[3.0, 4.0]]
        assert found["anchor"] is given["anchor"]
    assert steps.used >= 8
    assert shared.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("method", [FedAvg(local_epochs=2), SCAFFOLD("I", local_epochs=2)])
def test_pooling_of_large_pictures_is_replayed_with_the_same_bits(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    module = PersonalizedModule(nn.Sequential(*layers), nn.Linear(12, CLASSES)).double()
    plain = run(method, module, limit=0)
    monkeypatch.setattr("lightning_pfl.engine.large_operators.POOLED", 1)
    recorded = run(method, module)
    assert replays(recorded) > 3
    assert_rounds_equal(recorded, plain)
