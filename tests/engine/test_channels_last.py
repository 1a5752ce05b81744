"""Pictures of one client on channels-last memory: torch's numbers, and where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine import channels_last, trace
from lightning_pfl.engine.apart import evaluates_apart
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.known_code import asks_for_places, read_by_step
from lightning_pfl.engine.large_operators import LargeOperators
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.methods import SCAFFOLD, Ditto, FedAvg, FedRep
from lightning_pfl.methods.base import Method
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.fitting import Fit, fit
from lightning_pfl.testing.rounds import (
    LocalRound,
    assert_rounds_equal,
    assert_trees_equal,
    local_round,
)
from tests.engine.nets import CLASSES, image_clients


def lies_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def convolved(tensors: list[Tensor], fast: bool, **settings: Any) -> list[Tensor]:
    """A convolution, and the gradients of the sum of its squares."""
    leaves = [leaf.clone().requires_grad_() for leaf in tensors]
    with LargeOperators(last=fast):
        out: Tensor = F.conv2d(*leaves, **settings)  # type: ignore[call-overload]
        grads = torch.autograd.grad(out.square().sum(), leaves)
    return [out.detach(), *grads]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": (1, 2), "padding": (0, 2), "dilation": (2, 1)},
        {"padding": "same"},
    ],
    ids=str,
)
def test_convolutions_of_pictures_that_are_moved(settings: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in ((2, 3, 9, 8), (4, 3, 3, 3), (4,))[: 2 + bias]]
    found = convolved(tensors, True, **settings)
    exact = convolved([leaf.double() for leaf in tensors], False, **settings)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    assert lies_last(found[0])
    assert found[2].is_contiguous()  # as the weights, which optimizers want


@pytest.mark.parametrize(
    ("shapes", "dtype", "groups"),
    [
        pytest.param(((2, 1, 9, 9), (4, 1, 3, 3)), torch.float32, 1, id="one channel"),
        pytest.param(((2, 3, 9, 9), (4, 3, 3, 3)), torch.float64, 1, id="double precision"),
        pytest.param(((2, 3, 9, 9), (4, 3, 3, 3)), torch.bfloat16, 1, id="16 bits"),
        pytest.param(((2, 4, 9, 9), (4, 2, 3, 3)), torch.float32, 2, id="groups"),
        pytest.param(((1, 4, 2, 2), (16, 4, 3, 3)), torch.float32, 1, id="larger weights"),
    ],
)
def test_other_pictures_stay(shapes: Any, dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    settings = {"padding": 1, "groups": groups}
    found, usual = (convolved(tensors, fast, **settings) for fast in (True, False))
    assert all(map(torch.equal, found, usual))
    assert [leaf.stride() for leaf in found] == [leaf.stride() for leaf in usual]


def test_pictures_smaller_than_half_of_the_weights_move_back() -> None:
    """4 x 2 x 2 numbers in and 16 x 2 x 2 out, of 576 weights, which would be moved as well."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 4, 2, 2), torch.randn(16, 4, 3, 3)
    with LargeOperators(last=True):
        out = F.conv2d(x.contiguous(memory_format=torch.channels_last), w, padding=1)
    assert out.is_contiguous()
    assert torch.equal(out, F.conv2d(x, w, padding=1))


@pytest.mark.parametrize(("pictures", "side", "moved"), [(2, 3, True), (1, 4, False)])
def test_pictures_of_half_as_many_numbers_as_the_weights_move(
    pictures: int, side: int, moved: bool
) -> None:
    """2 x 8 x 3 x 3 in and as many out are half of 576, 8 x 4 x 4 are fewer."""
    torch.manual_seed(0)
    x, w = torch.randn(pictures, 8, side, side), torch.randn(8, 8, 3, 3)
    with LargeOperators(last=True):
        out = F.conv2d(x, w, padding=1)
    assert lies_last(out) is moved


def test_transposed_convolutions_are_torchs() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 9, 9), torch.randn(3, 4, 3, 3)
    with LargeOperators(last=True):
        out = F.conv_transpose2d(x, w)
    assert torch.equal(out, F.conv_transpose2d(x, w))
    assert out.stride() == F.conv_transpose2d(x, w).stride()


# --- which modules ---


class Residual(nn.Module):
    """A layer of a user's, whose code doesn't ask where anything lies."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.block(x) + x)


class Viewed(nn.Module):
    """Makes vectors by ``view``, which wants neighbours in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1)


class Strided(nn.Module):
    """Reads numbers by their places."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided(x, (len(x), 100), (100, 1))


class Helped(nn.Module):
    """Has a function that asks for places."""

    def forward(self, x: Tensor) -> Tensor:
        return self.vectors(x)

    def vectors(self, x: Tensor) -> Tensor:
        return torch.stack([one.view(-1) for one in x])


class Unknown(nn.Module):
    """Reads an object that may be anything."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(HELD.first)


HELD = SimpleNamespace(first=1)


def network(flat: Callable[[], nn.Module] = nn.Flatten, **settings: Any) -> PersonalizedModule:
    torch.manual_seed(1)
    convolutions = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), Residual(), Residual()
    backbone = nn.Sequential(*convolutions, flat(), nn.Linear(100, 8), nn.ReLU())
    return PersonalizedModule(backbone, nn.Linear(8, CLASSES), lr=0.05, momentum=0.9, **settings)


@pytest.mark.parametrize(
    ("flat", "placeless"),
    [(nn.Flatten, True), (Viewed, False), (Strided, False), (Helped, False), (Unknown, False)],
)
def test_code_that_asks_for_places(flat: Callable[[], nn.Module], placeless: bool) -> None:
    checks = Checks(network(flat))
    checks.due()
    assert checks.placeless is placeless


def test_a_method_of_a_users_may_ask_for_places() -> None:
    class Own(FedAvg):
        """May do anything with outputs."""

    checks = Checks(network())
    checks.due((FedAvg(),))
    assert checks.placeless
    checks.due((Own(),))
    assert not checks.placeless


class Inner(nn.Module):
    """Asks for places inside of a comprehension, and in a function that it holds."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.function(one) for one in x])


def viewed(x: Tensor) -> Tensor:
    return x.view(-1)


def reshaped(x: Tensor) -> Tensor:
    return x.reshape(-1)


@pytest.mark.parametrize(("function", "asks"), [(viewed, True), (reshaped, False)])
def test_functions_that_layers_hold_are_read(
    function: Callable[[Tensor], Tensor], asks: bool
) -> None:
    assert asks_for_places(read_by_step(network(lambda: Inner(function)))) is asks


# --- rounds ---


def run(method: Method, module: Any, limit: int = 99, record: bool = True) -> LocalRound:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "LIMIT", limit)
        patch.setattr(trace, "WARM_UP", 1)
        data = image_clients((9, 0, 8, 13), dtype=torch.float32)
        return local_round(method, module, data, "sequential", record=record)


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(local_epochs=2),
        FedRep(head_epochs=2),
        Ditto(0.5, local_epochs=2),
        SCAFFOLD("I", local_epochs=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_replayed_steps_are_the_steps(method: Method) -> None:
    recorded, plain = (run(method, network(), limit) for limit in (99, 0))
    assert isinstance(recorded.engine, SequentialEngine)
    assert recorded.engine.whole.used > 5
    assert_rounds_equal(recorded, plain)


def test_steps_of_known_modules_have_pictures_last(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[bool] = []

    def placed(pictures: Tensor, *_: Any) -> Tensor:
        noted.append(True)
        return pictures

    monkeypatch.setattr(channels_last, "_placed", placed)
    run(FedAvg(), network())
    assert noted
    noted.clear()
    run(FedAvg(), network(Viewed))
    run(FedAvg(), network(), record=False)
    assert not noted


def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[bool] = []

    def placed(pictures: Tensor, *args: Any) -> Tensor:
        noted.append(lies_last(found := really(pictures, *args)))
        return found

    really = channels_last._placed
    monkeypatch.setattr(channels_last, "_placed", placed)

    def end(rounds: int, **settings: Any) -> Fit:
        data = image_clients((9, 4, 13), dtype=torch.float32)
        return fit(SCAFFOLD("II"), data, network(), rounds, engine="sequential", **settings)

    whole = end(3, val_data=image_clients((9, 4, 13), dtype=torch.float32))
    assert any(noted)
    resumed = end(3, ckpt_path=end(1).save(tmp_path / "begun.ckpt"))
    for got, want in (
        (resumed.server, whole.server),
        (resumed.client_state, whole.client_state),
        (resumed.models, whole.models),
    ):
        assert_trees_equal(got, want)


def test_a_view_of_a_convolution_has_the_bits_of_the_readable_engine() -> None:
    found, readable = (
        run(FedAvg(local_epochs=2), network(Viewed), record=r) for r in (True, False)
    )
    assert isinstance(found.engine, SequentialEngine)
    assert found.engine.whole.used > 5
    assert_rounds_equal(found, readable)


def test_a_hook_that_is_registered_later_finds_pictures_where_they_always_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recordings of the rounds before it aren't replayed."""
    noted: list[bool] = []

    def look(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        noted.append(output.is_contiguous())

    module = network()
    before = run(FedAvg(local_epochs=2), module)
    module.get_submodule("backbone.0").register_forward_hook(look)
    fresh = run(FedAvg(local_epochs=2), module)
    assert all(noted)
    noted.clear()
    monkeypatch.setattr(
        "lightning_pfl.testing.rounds.SequentialEngine", lambda *_, **__: before.engine
    )
    assert_rounds_equal(run(FedAvg(local_epochs=2), module), fresh)
    assert noted
    assert all(noted)


def test_predictions_lie_where_they_always_do() -> None:
    pictures = PersonalizedModule(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), loss="mse")
    split = ParameterSplit(pictures)
    engine = SequentialEngine(pictures, split, EngineSettings(), record=True)
    models = {name: leaf.unsqueeze(0) for name, leaf in split.model().items()}
    x = torch.randn(5, 2, 6, 6)
    data = FederatedTensorDataset((x, torch.zeros(5, 4, 4, 4)), [torch.arange(5)], batch_size=5)
    work = EvaluationWork(models, torch.tensor([0]), data, "predict_step")
    assert engine.evaluate(work).predictions[0][0].is_contiguous()


@pytest.mark.parametrize(("flat", "last"), [(nn.Flatten, True), (Viewed, False)])
def test_evaluations_of_one_model_have_pictures_last(
    flat: Callable[[], nn.Module], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, data = network(flat).eval(), image_clients((5, 3), dtype=torch.float32)
    split = ParameterSplit(module)
    models = {name: leaf.expand(2, *leaf.shape) for name, leaf in split.model().items()}
    work = EvaluationWork(models, torch.arange(2), data, "validation_step")
    engine = VectorizedEngine(module, split, EngineSettings(), "forward")
    # Found now, so that the samples by which it is found aren't noted.
    assert evaluates_apart(module, EngineSettings(), data, work.round)
    noted: list[bool] = []
    really = torch.batch_norm

    def batch_norm(x: Tensor, *args: Any) -> Tensor:
        noted.append(lies_last(x))
        return really(x, *args)

    monkeypatch.setattr(torch, "batch_norm", batch_norm)
    found = engine.evaluate(work).values["val_loss"]
    assert noted
    assert set(noted) == {last}
    for client in range(2):
        images, labels = data.gather(data.indices[client])
        with torch.no_grad():
            loss = F.cross_entropy(module.double()(images.double()), labels)
        torch.testing.assert_close(found[client], loss, rtol=1e-5, atol=1e-6)
