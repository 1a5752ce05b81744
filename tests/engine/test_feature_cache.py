"""The cache of a frozen backbone's features: the same numbers, used where it may be, off
elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.tree import Model, Tree, rows
from lightning_pfl.engine import feature_cache as prefix
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.engine.vectorized.survey import Survey
from lightning_pfl.methods import FedAvg, FedPer, FedRep
from lightning_pfl.methods.base import LocalStep, Method, Phase
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.conformance import small_clients, small_module
from lightning_pfl.testing.rounds import LocalRound, assert_trees_close, local_round
from tests.engine.nets import CLASSES, cnn, compare, image_clients

ENGINE = "vectorized"


@pytest.fixture(params=["vectorized", "sequential"], autouse=True)
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines have the cache."""
    monkeypatch.setitem(globals(), "ENGINE", request.param)


def run(
    make_module: Callable[[], Any],
    method: Method | None = None,
    cache: bool = True,
    data: Any = None,
    only: int | None = 0,
    engine: str | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> LocalRound:
    """A round of an engine: FedRep's head phase, unless the arguments say otherwise."""
    torch.manual_seed(2)
    module = make_module()
    return local_round(
        FedRep(head_epochs=2) if method is None else method,
        module,
        image_clients() if data is None else data,
        engine or ENGINE,  # type: ignore[arg-type]
        settings=EngineSettings(feature_cache=cache, chunk_size=chunk_size),
        only=only,
        **options,
    )


def used(outcome: LocalRound) -> bool:
    assert isinstance(outcome.engine, VectorizedEngine | SequentialEngine)
    return outcome.engine.prefix.used


def is_right(
    make: Callable[[], Any], cached: bool, transform: str = "forward", **options: Any
) -> None:
    """The engine has the numbers of the reference, with the cache or without it."""
    kind: dict[str, Any] = {"transform": transform} if ENGINE == "vectorized" else {}
    found = run(make, chunk_size=3, **options, **kind)
    expected = run(make, engine="reference", **options)
    assert used(found) == cached
    assert not used(expected)
    for got, want in (
        (found.result.uploads, expected.result.uploads),
        (found.result.client_state, expected.result.client_state),
        (found.result.logs, expected.result.logs),
    ):
        assert_trees_close(got, want)


class Custom(PersonalizedModule):
    """A module whose training step is its own, with layers of the test's choice before it."""

    def __init__(self, *layers: nn.Module) -> None:
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.Tanh(), *layers)
        super().__init__(backbone, nn.Linear(6, CLASSES), lr=0.1, momentum=0.9)
        self.double()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("norm", [True, False])
def test_on_equals_off(norm: bool) -> None:
    on, off = (run(lambda: cnn(norm), cache=cache, only=None) for cache in (True, False))
    assert_trees_close(on.models, off.models)
    assert_trees_close(on.result.logs, off.result.logs)


@pytest.mark.parametrize("make", [cnn, Custom], ids=["per sample", "own step"])
def test_it_is_used_in_the_head_phase_and_not_in_the_body_phase(make: Callable[[], Any]) -> None:
    assert used(run(make, only=0))
    assert not used(run(make, FedRep(body_epochs=3), only=1))
    assert not used(run(make, cache=False, only=0))


def test_the_backbone_runs_once_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    if ENGINE == "sequential":  # where unknown code would run as it is
        monkeypatch.setattr(SequentialEngine, "keeps_features", True)
    rows: list[int] = []

    class Counting(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(x.shape[0] if x.ndim > 4 else len(x))
            return super().forward(x)

    def make() -> Custom:
        module = Custom()
        module.backbone.register_module("0", Counting())
        return module

    data = image_clients()
    run(make, FedRep(head_epochs=5), data=data)
    cached = len(rows)
    rows.clear()
    run(make, FedRep(head_epochs=5), cache=False, data=data)
    trained = int((data.num_samples > 0).sum())
    # One pass of a chunk or of each client, and the checks before the first use.
    assert cached == 6 + (1 if ENGINE == "vectorized" else trained)
    assert len(rows) >= 5 * 4  # five epochs of up to four minibatches


@pytest.mark.parametrize("_engine", ["vectorized"], indirect=True)
def test_chunk_sizes() -> None:
    """Of whole rounds, whose second phase trains the backbone."""
    compare(cnn, image_clients(), lambda: FedRep(head_epochs=2), (None, 1, 2, 3, 5))


def test_large_data_is_passed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "BATCH", 4)
    monkeypatch.setattr(prefix, "samples_of_one_model", lambda _: 4)
    outcome = run(cnn)
    assert used(outcome)
    assert_trees_close(outcome.models, run(cnn, cache=False).models)


def test_features_that_would_fill_the_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MAX_BYTES", 10)
    assert not used(run(cnn))


# --- where it must be off ---


def test_a_trained_backbone() -> None:
    assert not used(run(cnn, FedAvg(local_epochs=3)))
    assert not used(run(cnn, FedPer(local_epochs=3)))


def test_a_personal_backbone() -> None:
    """Frozen, but every client's own, which is no obstacle for one after another."""

    method = FedRep(personal="backbone", head_epochs=1, body_epochs=3)
    is_right(cnn, cached=ENGINE == "sequential", method=method, only=1)


def test_one_epoch_uses_each_feature_once() -> None:
    assert not used(run(cnn, FedRep(head_epochs=1)))


def test_dropout_in_the_backbone() -> None:
    is_right(lambda: cnn(dropout=0.3), cached=False)


def test_dropout_in_eval_mode_is_no_obstacle() -> None:
    def make() -> Any:
        module = cnn(dropout=0.3)
        module.backbone.eval()
        return module

    is_right(make, cached=True)


def test_dropout_in_the_head_is_no_obstacle() -> None:
    def make() -> Any:
        module = cnn()
        module.head = nn.Sequential(nn.Dropout(0.5), module.head)
        return module

    is_right(make, cached=True)


@pytest.mark.parametrize("strength", [1.0, 1e-4])
def test_augmentation(strength: float) -> None:
    """However weak, so that a step with the features of the plain samples has nearly its loss."""

    def jitter(batch: Any) -> Any:
        return batch[0] + strength * torch.randn_like(batch[0]), batch[1]

    is_right(cnn, cached=False, data=image_clients(augment=jitter))


class SecondModel(Method):
    """Trains the heads of two models, of which the second has a backbone of its own."""

    personal = "head"

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (Phase("head", epochs=3),)

    def init_client_state(self, model: Model) -> Tree:
        second = {n: 1.5 * v if v.is_floating_point() else v for n, v in model.items()}
        return {**super().init_client_state(model), "second": second}

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        return {
            **super().client_init(received, client_state, info),
            "second": client_state["second"],
        }

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        state = super().client_step(state, minibatches, client)
        grads = client.grad(state["second"], minibatches)
        return {**state, "second": client.update(state["second"], grads, slot="second")}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        upload, kept = super().client_final(received, client_state, state, info)
        return upload, {**kept, "second": state["second"]}


def test_a_second_model_has_features_of_its_own() -> None:
    """One after another, a user's method keeps none, as it may write to weights."""
    is_right(cnn, cached=ENGINE == "vectorized", method=SecondModel())


@pytest.mark.parametrize("_engine", ["sequential"], indirect=True)
def test_a_second_model_of_a_known_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequentialEngine, "keeps_features", True)
    is_right(cnn, cached=True, method=SecondModel())


class Looking(Method):
    """Adds up the pixels, or the losses, that it sees in two epochs with a frozen backbone."""

    personal = "head"

    def __init__(self, losses: bool) -> None:
        super().__init__()
        self.losses = losses

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (Phase("head", epochs=2, evaluate_only=self.losses),)

    def client_init(self, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
        state = super().client_init(received, client_state, info)
        return {**state, "sum": torch.zeros(len(info), dtype=torch.float64)}

    def client_step(self, state: Tree, minibatches: Any, client: LocalStep) -> Tree:
        if self.losses:
            loss, count = client.loss(state["model"], minibatches)
            return {**state, "sum": state["sum"] + loss * count}
        (x, _), real = client.samples(minibatches)
        return {**state, "sum": state["sum"] + (x.flatten(2).sum(2) * real).sum(1)}

    def client_final(
        self, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
    ) -> tuple[Tree, Tree]:
        upload, kept = super().client_final(received, client_state, state, info)
        return {**upload, "sum": state["sum"]}, kept


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "groups"])
@pytest.mark.parametrize("measure", [True, False])
def test_samples_and_measured_losses_are_those_of_the_data(
    measure: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Survey, "pads", padded)
    data, module = image_clients(), cnn(norm=False)
    done = run(lambda: cnn(norm=False), Looking(measure), data=data)
    found = done.result.uploads["sum"]
    expected = []
    for owned in data.indices:
        x, y = data.gather(owned)
        total = F.cross_entropy(module(x), y, reduction="sum") if measure else x.sum()
        expected.append(2 * total.detach())
    torch.testing.assert_close(found, torch.stack(expected))


class Noise(nn.Module):
    """Stochastic without a dropout rate to tell by."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Centred(nn.Module):
    """A sample's features depend on the other samples of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_noise_in_the_backbone() -> None:
    is_right(lambda: Custom(Noise()), cached=False)


def test_noise_before_the_backbone() -> None:
    class NoisyInputs(Custom):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            return super().training_step((batch[0] + torch.randn_like(batch[0]), batch[1]))

    is_right(NoisyInputs, cached=False)


def test_features_that_depend_on_the_batch() -> None:
    is_right(lambda: Custom(Centred()), cached=False)


@pytest.mark.parametrize("broken", [[3], [0, 3], [0, 1, 2, 3, 4]])
def test_a_client_with_broken_data_is_no_obstacle(broken: list[int]) -> None:
    """Also not where it has the most samples; and it tells nothing, so others do."""
    data = small_clients()
    for client in broken:
        data.fields[0][data.indices[client]] = torch.nan
    on, off = (run(small_module, cache=cache, data=data) for cache in (True, False))
    assert used(on) == (len(broken) < data.num_clients)
    for client in set(range(data.num_clients)) - set(broken):
        got, want = (rows(o.result.client_state, slice(client, client + 1)) for o in (on, off))
        assert_trees_close(got, want)
    for client in broken:
        trained = int(data.num_samples[client]) > 0
        assert bool(on.result.client_state["model"]["head.weight"][client].isnan().any()) == trained


def test_broken_data_hide_no_dependence_on_the_batch() -> None:
    """The largest client's features are NaN however they are computed."""
    data = image_clients()
    largest = int(data.num_samples.argmax())
    data.fields[0][data.indices[largest]] = torch.nan
    assert not used(run(lambda: Custom(Centred()), data=data))


class Signed(nn.Module):
    """A sample's features depend on the others where the sign of a sum does, hardly ever."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > -1e9 else -x


@pytest.mark.parametrize("_engine", ["sequential"], indirect=True)
def test_a_layer_that_branches_on_numbers() -> None:
    is_right(lambda: Custom(Signed()), cached=False)


@pytest.mark.parametrize("_engine", ["sequential"], indirect=True)
def test_a_hook() -> None:
    def make() -> PersonalizedModule:
        module = cnn()
        module.backbone.register_forward_hook(lambda *given: given[-1] * 1.5)
        return module

    is_right(make, cached=False)


def test_a_step_that_calls_the_backbone_twice() -> None:
    class Twice(Custom):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            x, y = batch
            return F.cross_entropy(self(x) + self(-x.flip(-1)), y)

    is_right(Twice, cached=False)


def test_a_step_that_does_not_call_the_backbone_as_a_module() -> None:
    class ByHand(Custom):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            x, y = batch
            for layer in self.backbone.children():
                x = layer(x)
            return F.cross_entropy(self.head(x), y)

    is_right(ByHand, cached=False)


def test_features_that_are_no_tensor_with_a_row_per_sample() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, x

    class OfPair(Custom):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            return F.cross_entropy(self.head(self.backbone(batch[0])[0]), batch[1])

    is_right(lambda: OfPair(Pair()), cached=False)


def test_a_recurrent_backbone() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(5, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.cells(x.squeeze(-3))[0][..., -1, :]
            return result

    def make() -> PersonalizedModule:
        return PersonalizedModule(Last(), nn.Linear(6, CLASSES), lr=0.1).double()

    is_right(make, cached=True, transform="grad")


def test_a_module_without_backbone() -> None:
    class Plain(Custom):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.backbone = self.backbone, None  # type: ignore[assignment]

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            return F.cross_entropy(self.head(self.body(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    is_right(Plain, cached=False)
