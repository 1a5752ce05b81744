"""Layers by which samples of a minibatch depend on each other, in minibatches of users alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.engine import apart
from lightning_pfl.engine.apart import evaluates_apart, stirred
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.methods import FedAvg, FedMAP, FedRep
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.priors import GaussianPrior
from lightning_pfl.testing.fitting import fit
from lightning_pfl.testing.rounds import assert_trees_equal, local_round
from tests.engine.nets import CLASSES, compare, image_clients
from tests.engine.test_active_phase_measuring import Measures

SIZES, BATCH = (7, 4, 10), 3


class Mixes(nn.Module):
    """Computes with all samples of a minibatch, by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TimeFirst(nn.Module):
    """Takes samples for steps in time, as it lacks ``batch_first``."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x.unsqueeze(1))[0].squeeze(1)
        return out


class CentresLater(nn.Module):
    """Centres samples by a factor that begins with zero."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.factor * x.mean(0)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "centred": lambda: Mixes(lambda x: x - x.mean(0)),
    "slightly centred": lambda: Mixes(lambda x: x - 1e-4 * x.mean(0)),
    "sums of those before": lambda: Mixes(lambda x: x.cumsum(0)),
    "the first of all": lambda: Mixes(lambda x: x + x[:1]),
    "their number": lambda: Mixes(lambda x: x / len(x)),
    "softmax over them": lambda: nn.Softmax(0),
    "time first": TimeFirst,
    "a factor that trains": CentresLater,
}


def make(layer: Callable[[], nn.Module]) -> PersonalizedModule:
    torch.manual_seed(1)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(25, 6), layer())
    return PersonalizedModule(backbone, nn.Linear(6, CLASSES), lr=0.1).double()


def clients(**settings: Any) -> Any:
    return image_clients(SIZES, **{"batch_size": BATCH, **settings})


def by_hand(net: nn.Module, k: int) -> float:
    """The mean loss of a client's samples in its own minibatches."""
    data, total = clients(), 0.0
    for some in data.indices[k].split(BATCH):
        x, y = (field[some] for field in data.fields)
        with torch.no_grad():
            total += float(F.cross_entropy(net.eval()(x), y, reduction="sum"))
    return total / SIZES[k]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("method", [FedAvg, FedRep], ids=["one model", "models of their own"])
@pytest.mark.parametrize("name", LAYERS)
def test_evaluations(name: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pfl.engine.probe.evaluating_pays", lambda *_: True)
    run = fit(method(), clients(), make(LAYERS[name]), 1, "auto", val_data=clients(shuffle=False))
    values = run.federation.client_results["val"].evaluations[""].values["val_loss"]
    for k in range(len(SIZES)):
        client = run.federation.client_module(k)
        assert float(values[k]) == pytest.approx(by_hand(client, k), rel=1e-9)
    assert "validation_step with one model" not in run.federation.engine.choices


@pytest.mark.sweep(6)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_features_of_a_frozen_backbone(name: str, batch_size: int) -> None:
    options: dict[str, Any] = {"transform": "grad"} if name == "time first" else {}
    data = clients(batch_size=batch_size)
    compare(lambda: make(LAYERS[name]), data, lambda: FedRep(head_epochs=3), (None,), **options)


def test_features_of_clients_with_a_sample_each() -> None:
    data = image_clients((1, 1, 1, 1))
    compare(lambda: make(LAYERS["centred"]), data, lambda: FedRep(head_epochs=3), (None,))


@pytest.mark.parametrize("name", LAYERS)
def test_measured_losses(name: str) -> None:
    uploads = local_round(
        Measures(), make(LAYERS[name]), clients(shuffle=False), "sequential"
    ).result.uploads
    for k, samples in enumerate(SIZES):
        net = make(LAYERS[name])
        net.load_state_dict({name: leaf[k] for name, leaf in uploads["model"].items()})
        assert float(uploads["total"][k]) == pytest.approx(samples * by_hand(net, k), rel=1e-9)


class Shares(nn.Module):
    """Subtracts a share of the mean; its code is known."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x - self.share * x.mean(0)


class Later(Shares):
    """Sets its share by itself, once it has trained on the first client's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.share = 0.5 if self.seen > SIZES[0] else 0.0
        return super().forward(x)


@pytest.mark.parametrize("kind", [Shares, Later], ids=["by a hook", "by a step"])
def test_a_layer_that_changes_between_clients_is_tried_again(
    kind: type[Shares], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of FedMAP's uploads without a pull are the negative losses."""
    module: Any = make(kind)
    layer, train = module.backbone[-1], SequentialEngine.train
    found: list[Any] = []

    def hook(positions: list[int], losses: Any = None) -> None:
        layer.share = 0.5

    def trained(engine: SequentialEngine, work: Any) -> Any:
        found.append(engine)
        return train(engine, work, hook if kind is Shares else None)

    monkeypatch.setattr(SequentialEngine, "train", trained)
    data = clients(shuffle=False)
    uploads = local_round(
        FedMAP(GaussianPrior(float("inf"))), module, data, "sequential"
    ).result.uploads
    assert found[0].checks.known == (kind is Shares)
    for k in range(len(SIZES)):
        net: Any = make(Shares)
        net.backbone[-1].share = 0.5 if k else 0.0
        net.load_state_dict({name: leaf[k] for name, leaf in uploads["model"].items()})
        assert float(uploads["log_weight"][k]) == pytest.approx(-by_hand(net, k), rel=1e-9)


def test_rows_of_zeros_are_changed_in_ways_of_their_own() -> None:
    for shape in ((64, 64), (4000, 3), (3, 1), (0, 2)):
        leaf = stirred(torch.zeros(shape))
        assert leaf.shape == shape
        assert len({tuple(row) for row in leaf.tolist()}) == shape[0]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Tanh,
        lambda: nn.LayerNorm(6),
        lambda: nn.Dropout(0.5),
        lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
        lambda: nn.BatchNorm1d(6),
    ],
)
def test_torchs_own_layers_are_not_tried(
    layer: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(layer).eval()
    monkeypatch.setattr("lightning_pfl.engine.apart._try", lambda *_: pytest.fail("tried"))
    assert evaluates_apart(module, EngineSettings(), clients(), 0)


class Centres(nn.Module):
    """Subtracts a share of the mean, and counts its calls where no fingerprint looks."""

    called = 0

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        Centres.called += 1
        return x - self.share * x.mean(0)


def test_a_layer_of_a_users_is_tried_once_in_a_round_with_each_setting() -> None:
    module: Any = make(Centres).eval()
    layer, found = module.backbone[-1], []
    for round, share in ((0, 0.0), (0, 0.0), (1, 0.0), (1, 0.5), (1, 0.0)):
        layer.share, before = share, Centres.called
        now = evaluates_apart(module, EngineSettings(), clients(), round)
        found.append((now, Centres.called > before))
    assert found == [(True, True), (True, False), (True, True), (False, True), (True, False)]


class Plain(nn.Module):
    """Computes with each sample alone; its code is known."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Branches(Plain):
    """Subtracts the mean where its weight is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.weight > 5 else x


class Buffered(Plain):
    """Subtracts a share of the mean, which is in a buffer."""

    share: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.share * x.mean(0)


class Held(Plain):
    """Subtracts a share of the mean, which is in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.share * x.mean(0)


class Always(Plain):
    """Subtracts the mean; its code is known."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("kind", [Plain, Always])
def test_known_code_is_tried_in_one_round(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = make(kind).eval()
    first = evaluates_apart(module, EngineSettings(), clients(), 0)
    assert first == (kind is Plain)
    monkeypatch.setattr(apart, "_try", lambda *_: pytest.fail("tried again"))
    module.backbone[1].weight.data.mul_(2)
    assert evaluates_apart(module, EngineSettings(), clients(), 1) == first


@pytest.mark.parametrize(
    ("kind", "name"), [(Branches, "weight"), (Buffered, "share"), (Held, "share")]
)
def test_known_code_that_depends_on_numbers_in_tensors_is_tried_again(
    kind: type[nn.Module], name: str
) -> None:
    module: Any = make(kind).eval()
    found = []
    for round, value in enumerate((0.0, 0.0, 9.0, 0.0)):
        getattr(module.backbone[-1], name).data.fill_(value)
        found.append(evaluates_apart(module, EngineSettings(), clients(), round))
    assert found == [True, True, False, True]


class Gated(Plain):
    """Subtracts a share of the mean, which a negative weight hides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(-torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.weight.relu() * x.mean(0)


def test_what_other_weights_would_couple_counts_from_the_first_round_on() -> None:
    module: Any = make(Gated).eval()
    assert not evaluates_apart(module, EngineSettings(), clients(), 0)
    module.backbone[-1].weight.data.fill_(1.0)
    assert not evaluates_apart(module, EngineSettings(), clients(), 1)


class Root(Plain):
    """Takes the root of a weight, which has no negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sqrt()


def test_weights_without_a_negative_are_tried_in_each_round() -> None:
    module: Any = make(Root).eval()
    assert evaluates_apart(module, EngineSettings(), clients(), 0)
    assert apart._FOUND[module].popitem()[1] == (True, 0)


def test_the_random_numbers_of_others_stay() -> None:
    module = make(lambda: Mixes(lambda x: x + torch.randn_like(x))).eval()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert not evaluates_apart(module, EngineSettings(), clients(), 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("layer", [LAYERS["centred"], nn.Tanh], ids=["mixes", "torch's"])
def test_samples_of_another_process_are_not_tried(layer: Callable[[], nn.Module]) -> None:
    data = clients().keep(torch.tensor([1]))
    assert evaluates_apart(make(layer).eval(), EngineSettings(), data, 0) == (layer is nn.Tanh)
    found, expected = (
        local_round(FedAvg(), make(layer), some, "vectorized", clients=[1])
        for some in (data, clients())
    )
    assert_trees_equal(found.result.uploads, expected.result.uploads)
