"""Users' modules as they are: recurrent layers, attention, tied and frozen weights, parameters
without gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.methods import FedAvg, FedPer
from lightning_pfl.testing.rounds import assert_trees_close, local_round
from tests.engine.nets import compare, moved

SIZES = (1, 0, 4, 7)


def sequence_clients(batch_size: int = 3) -> FederatedTensorDataset:
    """Sequences of four steps with two features and a number to predict."""
    generator = torch.Generator().manual_seed(5)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    total = sum(SIZES)
    fields = (torch.randn(total, 4, 2, **draw), torch.randn(total, **draw))
    return FederatedTensorDataset(
        fields, torch.arange(total).split(SIZES), batch_size=batch_size, shuffle=True
    )


class Sequence(L.LightningModule):
    """Regression on sequences; subclasses say what maps ``(batch, 4, 2)`` to ``(batch, 4, 3)``."""

    def __init__(self, layer: nn.Module, **optimizer: Any) -> None:
        super().__init__()
        self.layer: Any = layer
        self.out: Any = nn.Linear(3, 1)
        self.optimizer = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, **optimizer}
        self.double()

    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.features(x)[:, -1]).squeeze(-1)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), **self.optimizer)


class Recurrent(Sequence):
    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0]
        return result


class Bidirectional(Recurrent):
    """Two features per hidden unit."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(2, 2, num_layers=2, batch_first=True, bidirectional=True))
        self.out = nn.Linear(4, 1).double()


class Attention(Sequence):
    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(4, 2, batch_first=True))
        self.embed, self.project = nn.Linear(2, 4), nn.Linear(4, 3)
        self.double()

    def features(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        result: Tensor = self.project(
            self.layer(embedded, embedded, embedded, need_weights=False)[0]
        )
        return result


class ScaledDotProduct(Sequence):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 9))

    def features(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 3))


def grouped() -> nn.Module:
    layers = nn.Linear(8, 6), nn.GroupNorm(2, 6), nn.Unflatten(1, (2, 3))
    return nn.Sequential(nn.Flatten(), *layers)


NETWORKS: dict[str, tuple[Callable[[], Sequence], str]] = {
    "linear": (lambda: Sequence(nn.Linear(2, 3)), "forward"),
    "LSTM": (lambda: Recurrent(nn.LSTM(2, 3, batch_first=True)), "grad"),
    "two-layer bidirectional LSTM": (Bidirectional, "grad"),
    "GRU": (lambda: Recurrent(nn.GRU(2, 3, batch_first=True)), "grad"),
    "attention": (Attention, "forward"),
    "scaled dot product": (ScaledDotProduct, "forward"),
    "transformer layer": (lambda: Sequence(transformer()), "forward"),
    "group norm": (lambda: Sequence(grouped()), "forward"),
    "convolution": (lambda: Sequence(nn.Conv1d(4, 4, 2, padding=1)), "forward"),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("make", "transform"), NETWORKS.values(), ids=NETWORKS)
def test_networks(make: Callable[[], Sequence], transform: str) -> None:
    outcome = compare(make, sequence_clients(), transform=transform)
    assert moved(outcome, "out.weight") == [size > 0 for size in SIZES]


# --- parameters with a fate of their own ---


class Tied(Sequence):
    """The output layer uses the first layer's weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1))
        self.out = nn.Linear(2, 1).double()
        self.out.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x).squeeze(-1).mean(1) + self.out(x[:, 0]).squeeze(-1)
        return result.tanh()


class Scalar(Sequence):
    """A temperature without dimensions."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3))
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) * self.temperature
        return result


class ScalarWithAdam(Scalar):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Unreached(Sequence):
    """One layer is never used: weight decay must not move it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3), weight_decay=0.5)
        self.spare = nn.Linear(3, 3).double()


class TwoGroups(Sequence):
    """Different learning rates and weight decays for the two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": self.layer.parameters(), "lr": 0.3, "weight_decay": 0.1},
            {"params": self.out.parameters(), "momentum": 0.5},
        ]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


class Frozen(Sequence):
    """The first layer doesn't train."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3))
        self.layer.requires_grad_(False)


class LeftOut(Sequence):
    """The optimizer knows the output layer only."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.out.parameters(), lr=0.1)


def test_tied_weights_stay_one_parameter() -> None:
    outcome = compare(Tied, sequence_clients())
    assert "out.weight" not in outcome.models
    assert moved(outcome, "layer.weight") == [size > 0 for size in SIZES]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("settings", [{}, {"clip_value": 0.05}], ids=["plain", "clipped"])
@pytest.mark.parametrize("batch_size", [3, 100])
def test_scalar_parameters(batch_size: int, settings: dict[str, Any], adam: bool) -> None:
    data, make = sequence_clients(batch_size), ScalarWithAdam if adam else Scalar
    outcome = compare(make, data, chunk_sizes=(1, None), settings=settings)
    assert moved(outcome, "temperature") == [size > 0 for size in SIZES]
    assert outcome.server["model"]["temperature"].shape == ()


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_weight_decay_does_not_move_what_the_loss_does_not_reach(engine: Any) -> None:
    outcome = local_round(FedAvg(local_epochs=2), Unreached(), sequence_clients(), engine)
    assert not any(moved(outcome, "spare.weight"))
    assert moved(outcome, "layer.weight") == [size > 0 for size in SIZES]


def test_unreached_parameters_under_the_gradient_transform() -> None:
    outcome = compare(Unreached, sequence_clients(), transform="grad")
    assert not any(moved(outcome, "spare.weight"))


def test_two_parameter_groups() -> None:
    compare(TwoGroups, sequence_clients())


def test_each_group_has_its_own_learning_rate() -> None:
    """One full-batch step without momentum: the change is the group's rate times its gradient."""
    torch.manual_seed(0)
    module, data = TwoGroups(), sequence_clients(batch_size=100)
    x, y = data.gather(data.indices[3])
    F.mse_loss(module(x), y).backward()
    outcome = local_round(FedAvg(), module, data, "vectorized")
    for name, lr, decay in (("layer.weight", 0.3, 0.1), ("out.weight", 0.01, 0.0)):
        leaf = module.get_parameter(name)
        assert leaf.grad is not None
        expected = leaf.detach() - lr * (leaf.grad + decay * leaf.detach())
        torch.testing.assert_close(outcome.models[name][3], expected, rtol=1e-12, atol=1e-14)


def test_frozen_parameters_are_neither_trained_nor_sent() -> None:
    outcome = compare(Frozen, sequence_clients())
    assert not any(name.startswith("layer") for name in outcome.models)


def test_parameters_outside_the_optimizer_stay() -> None:
    outcome = compare(lambda: LeftOut(nn.Linear(2, 3)), sequence_clients())
    assert not any(moved(outcome, "layer.weight"))
    assert moved(outcome, "out.weight") == [size > 0 for size in SIZES]


def test_a_layer_that_the_user_put_in_eval_mode_stays_there() -> None:
    class EvalNorm(Sequence):
        def __init__(self) -> None:
            torch.manual_seed(4)
            super().__init__(
                nn.Sequential(
                    nn.Linear(2, 3), nn.Flatten(0, 1), nn.BatchNorm1d(3), nn.Unflatten(0, (-1, 4))
                )
            )
            self.layer[2].eval()

    outcome = compare(EvalNorm, sequence_clients())
    assert not any(moved(outcome, "layer.2.running_mean"))
    assert moved(outcome, "layer.2.weight") == [size > 0 for size in SIZES]


def test_modes_are_put_back_after_a_round() -> None:
    module = Sequence(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)))
    module.layer[1].eval()
    before = {name: part.training for name, part in module.named_modules()}
    for engine in ("vectorized", "sequential"):
        local_round(FedPer("out"), module, sequence_clients(), engine)
        assert {name: part.training for name, part in module.named_modules()} == before


def test_the_module_itself_is_not_changed_by_local_training() -> None:
    module = Sequence(nn.Linear(2, 3))
    before = {n: leaf.clone() for n, leaf in module.state_dict().items()}
    for engine in ("vectorized", "sequential"):
        local_round(FedAvg(), module, sequence_clients(), engine)
    assert_trees_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert "log" not in module.__dict__


def test_a_loss_in_a_dict_is_found() -> None:
    class AsDict(Sequence):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": F.mse_loss(self(batch[0]), batch[1]), "extra": batch[1]}

    torch.manual_seed(0)
    plain = local_round(FedAvg(), Sequence(nn.Linear(2, 3)), sequence_clients(), "vectorized")
    for engine in ("vectorized", "sequential"):
        torch.manual_seed(0)
        other = local_round(FedAvg(), AsDict(nn.Linear(2, 3)), sequence_clients(), engine)
        assert_trees_close(other.models, plain.models)
