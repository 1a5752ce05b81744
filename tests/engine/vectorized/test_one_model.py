"""One model on the samples of many clients: each client's mean, in minibatches of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, expand
from lightning_pfl.engine import trace
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.program import NotVectorizableError
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.engine.vectorized import one_model
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.models.base import PersonalizedModule
from tests.engine.nets import CLASSES, SIZES, Recurrent, cnn, image_clients

KEY = "validation_step with one model"


def shared(module: Any, factor: float = 1.0) -> Model:
    """The module's own model for all clients."""
    model = ParameterSplit(module).model()
    scaled = {k: v * factor if v.is_floating_point() else v for k, v in model.items()}
    return expand(scaled, len(SIZES))


def work_on(models: Model, data: Any = None, limit: float | int = 1.0) -> EvaluationWork:
    data = image_clients() if data is None else data
    return EvaluationWork(models, torch.arange(len(SIZES)), data, "validation_step", limit)


def vectorized(module: Any) -> VectorizedEngine:
    return VectorizedEngine(module, ParameterSplit(module), EngineSettings())


def selected(module: Any) -> SelectedEngine:
    return SelectedEngine("auto", module, ParameterSplit(module), EngineSettings())


def by_hand(module: Any, counts: list[int], data: Any = None) -> Tensor:
    """The mean loss over each client's first samples, NaN for the empty client."""
    data, losses = image_clients() if data is None else data, []
    for client, count in enumerate(counts):
        x, y = data.gather(data.indices[client][:count])
        losses.append(F.cross_entropy(module(x), y) if count else torch.tensor(torch.nan))
    return torch.stack(losses).detach().double()


@pytest.mark.quick
@pytest.mark.parametrize("together", [1, 4, 6, 100])
@pytest.mark.parametrize(
    ("limit", "drop_last", "counts"),
    [
        (1.0, False, SIZES),
        (1, False, (1, 0, 4, 4, 2)),
        (2, False, (1, 0, 5, 8, 2)),
        (0.5, False, (0, 0, 4, 8, 0)),
        (1.0, True, (0, 0, 4, 12, 0)),
        (1.0, "single", (0, 0, 4, 12, 2)),
    ],
)
def test_each_client_has_the_mean_of_its_own_samples(
    limit: float | int,
    drop_last: Any,
    counts: tuple[int, ...],
    together: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However minibatches cut the samples; limits are of the user's minibatches of four."""
    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: together)
    module = cnn().eval()
    data = image_clients(drop_last=drop_last)
    found = vectorized(module).evaluate(work_on(shared(module), data, limit))
    assert found.counts.tolist() == list(counts)
    expected = by_hand(module, list(counts))
    torch.testing.assert_close(found.values["val_loss"], expected, equal_nan=True)
    assert found.options["val_acc"].prog_bar
    assert not found.options["val_loss"].prog_bar


class Shapes(TorchDispatchMode):
    """Records the shapes of what LSTMs read and products multiply."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket.__name__ == "addmm":
            self.found.append(tuple(args[1].shape))
        return function(*args, **(kwargs or {}))


def test_a_layer_sees_samples_of_many_clients_as_one_minibatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """21 samples are minibatches of 8, 8 and 5; the client of 13 is in all of them."""
    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: 8)
    monkeypatch.setattr(trace, "LIMIT", 0)
    module = cnn().eval()
    with Shapes() as shapes:
        vectorized(module).evaluate(work_on(shared(module)))
    assert shapes.found == [(rows, width) for rows in (8, 8, 5) for width in (27, 4)]


def test_models_of_their_own_are_evaluated_client_by_client() -> None:
    """A leaf that isn't shared by all, here the first one, makes models of their own."""
    module = cnn().eval()
    models = shared(module)
    name, leaf = next(iter(models.items()))
    models[name] = leaf * torch.arange(1.0, len(SIZES) + 1).view(-1, *[1] * (leaf.ndim - 1))
    found = vectorized(module).evaluate(work_on(models)).values["val_loss"]
    for client in (0, 2, 3):
        one = {key: each[client] for key, each in models.items()}
        x, y = image_clients().gather(image_clients().indices[client])
        expected = F.cross_entropy(torch.func.functional_call(module, one, (x,)), y)
        torch.testing.assert_close(found[client], expected.detach())


def test_a_broken_sample_is_its_clients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: 100)
    data = image_clients()
    data.fields[0][data.indices[3][2]] = torch.nan
    module = cnn().eval()
    found = vectorized(module).evaluate(work_on(shared(module), data)).values["val_loss"]
    assert found.isfinite().tolist() == [True, False, True, False, True]


def test_clients_are_done_once_each_when_their_last_sample_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes 1, 0, 5, 13 and 2 in minibatches of six end in the first, fourth and fourth one."""
    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: 6)
    module, done = cnn().eval(), list[list[int]]()
    vectorized(module).evaluate(work_on(shared(module)), lambda at, _=None: done.append(at))
    assert [at for at in done if at] == [[0, 1, 2], [3, 4]]


def test_an_error_names_the_clients_of_the_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(PersonalizedModule):
        def forward(self, inputs: Tensor) -> Tensor:
            if inputs.isnan().any():
                raise ValueError("NaN.")
            return super().forward(inputs)

    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: 6)
    plain, data = cnn(), image_clients()
    module = Strict(plain.backbone, plain.head).double().eval()
    data.fields[0][data.indices[4][1]] = torch.nan
    with pytest.raises(ClientError, match=r"validation_step failed for clients '3', '4': NaN"):
        vectorized(module).evaluate(work_on(shared(module), data))


# --- steps that are replayed ---


def repeated(engine: VectorizedEngine, work: EvaluationWork, times: int = 5) -> list[Evaluation]:
    return [engine.evaluate(work) for _ in range(times)]


def test_a_replayed_evaluation_has_the_bits_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: 8)
    module = cnn(dtype=torch.float32).eval()
    engine = vectorized(module)
    found = repeated(engine, work_on(shared(module), image_clients(dtype=torch.float32)))
    assert engine._of_one_model._traces.used > 0
    for one in found[1:]:
        for name, value in found[0].values.items():
            torch.testing.assert_close(one.values[name], value, rtol=0, atol=0, equal_nan=True)


def test_the_first_minibatch_is_recorded_where_the_code_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 8, 8 and 5 samples: the second is compared with the first one's recording."""
    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: 8)
    module = cnn().eval()
    engine = vectorized(module)
    repeated(engine, work_on(shared(module)), 1)
    assert engine._of_one_model._traces.used == 1


@pytest.mark.parametrize("what", ["model", "samples", "slope", "layer", "loss"])
def test_nothing_of_a_replay_is_stale(what: str) -> None:
    """What changes between two rounds: the model, samples in place, a setting, a layer."""
    plain = cnn()
    backbone = nn.Sequential(plain.backbone, nn.LeakyReLU(0.5))
    module: Any = PersonalizedModule(backbone, plain.head).double().eval()
    engine, data = vectorized(module), image_clients()
    repeated(engine, work_on(shared(module), data))
    factor = 1.0
    if what == "model":
        factor = 2.0
    elif what == "samples":
        data.fields[0].mul_(-3.0)
    elif what == "slope":
        module.backbone[-1].negative_slope = 0.01
    elif what == "layer":
        module.backbone[-1] = nn.ReLU()
    else:
        module.loss = lambda output, target: 3 * F.cross_entropy(output, target, reduction="none")
    found = engine.evaluate(work_on(shared(module, factor), data)).values["val_loss"]
    for parameter in module.parameters():
        parameter.data.mul_(factor)
    for buffer in module.buffers():
        buffer.mul_(factor) if buffer.is_floating_point() else None
    expected = by_hand(module, list(SIZES), data) * (3 if what == "loss" else 1)
    torch.testing.assert_close(found, expected, equal_nan=True)


class Bent(nn.LeakyReLU):
    """Reads what no recording knows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.negative_slope * BENT["by"])


BENT = {"by": 1.0}


@pytest.mark.parametrize("layer", [nn.LeakyReLU, Bent])
def test_what_a_hook_of_a_client_changes_counts_from_the_next_minibatch_on(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth client's samples end at 19 of 21: two minibatches of 19 are before and after."""
    monkeypatch.setattr(one_model, "samples_of_one_model", lambda _: 19)
    plain = cnn()
    slope = layer(0.5)
    module: Any = PersonalizedModule(nn.Sequential(plain.backbone, slope), plain.head)
    engine, work = vectorized(module.double().eval()), work_on(shared(module))
    repeated(engine, work)
    before = engine.evaluate(work).values["val_loss"]

    def hook(positions: list[int], losses: Any = None) -> None:
        if layer is Bent:
            monkeypatch.setitem(BENT, "by", 40.0)
        else:
            slope.negative_slope = 20.0

    found = engine.evaluate(work, hook).values["val_loss"]
    assert torch.equal(found[[0, 2, 3]], before[[0, 2, 3]])
    after = by_hand(module, list(SIZES))
    assert (after - before)[4].abs() > 1e-3
    torch.testing.assert_close(found[4], after[4])


# --- the choice ---


NOISY = {"now": True}


class Draws(nn.Module):
    """Adds noise where a global name says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if NOISY["now"] else x


class Coupled(nn.Module):
    """Reads the other samples of its minibatch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def with_layer(make: Callable[[], nn.Module]) -> PersonalizedModule:
    torch.manual_seed(1)
    backbone = nn.Sequential(make(), nn.Flatten())
    with torch.no_grad():
        width = backbone(torch.zeros(2, 1, 5, 5)).shape[1]
    return PersonalizedModule(backbone, nn.Linear(width, CLASSES)).double().eval()


@pytest.mark.usefixtures("clients_at_once")
def test_a_recurrent_layer_has_samples_of_all_clients_at_once_if_they_have_one_model() -> None:
    module = with_layer(Recurrent)
    engine = selected(module)
    found = engine.evaluate(work_on(shared(module))).values["val_loss"]
    torch.testing.assert_close(found, by_hand(module, list(SIZES)), equal_nan=True)
    assert engine.choices[KEY].startswith("vectorized (samples of many clients as one batch")
    own = {name: leaf.clone() for name, leaf in shared(module).items()}
    engine.evaluate(work_on(own))
    assert engine.choices["validation_step"].startswith("vectorized (vmap")
    assert engine.found[f"cpu {KEY}"] == "forward"


def test_the_readable_engine_stays_with_one_client_after_another() -> None:
    module = cnn().eval()
    engine = SelectedEngine("sequential", module, ParameterSplit(module), EngineSettings())
    with Shapes() as shapes:
        engine.evaluate(work_on(shared(module)))
    assert [rows for rows, width in shapes.found if width == 27] == [1, 4, 1, 4, 4, 4, 1, 2]


def test_a_layer_that_mixes_samples_keeps_the_users_minibatches() -> None:
    module = with_layer(Coupled)
    engine = selected(module)
    engine.evaluate(work_on(shared(module), image_clients((4,) * len(SIZES))))
    assert KEY not in engine.choices


def test_random_numbers_are_a_clients_own() -> None:
    module = with_layer(Draws)
    auto = selected(module)
    sequential = SelectedEngine("sequential", module, ParameterSplit(module), EngineSettings())
    found, expected = (
        one.evaluate(work_on(shared(module))).values["val_loss"] for one in (auto, sequential)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert auto.choices["validation_step"].startswith("sequential")


def test_a_layer_that_begins_to_draw_later_ends_that_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the readable engine evaluates, with numbers for each client."""
    monkeypatch.setitem(NOISY, "now", False)
    module = with_layer(Draws)
    engine, auto, work = vectorized(module), selected(module), work_on(shared(module))
    repeated(engine, work)
    auto.evaluate(work)
    assert auto.choices[KEY].startswith("vectorized")
    monkeypatch.setitem(NOISY, "now", True)
    with pytest.raises(NotVectorizableError, match="draws random numbers"):
        engine.evaluate(work)
    sequential = SelectedEngine("sequential", module, ParameterSplit(module), EngineSettings())
    found, expected = (one.evaluate(work).values["val_loss"] for one in (auto, sequential))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
