"""Hidden units: another order changes no output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl.models import LeNet, LowRank
from lightning_pfl.models.units import hidden_layers
from lightning_pfl.testing.conformance import small_module


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2)
    )


NETWORKS: dict[str, tuple[Any, tuple[int, ...], list[int]]] = {
    "perceptron": (perceptron, (5,), [4, 3]),
    "convolution with BatchNorm": (small_module, (1, 5, 5), [2]),
    "LeNet": (LeNet, (1, 28, 28), [6, 16, 120, 100]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_another_order_computes_the_same(name: str) -> None:
    make, shape, sizes = NETWORKS[name]
    torch.manual_seed(0)
    module: Any = make().double().eval()
    for leaf in module.state_dict().values():
        if leaf.is_floating_point():
            leaf.uniform_(0.1, 1.0)
    layers = hidden_layers(module)
    assert [layer.units for layer in layers] == sizes
    x = torch.randn(4, *shape, dtype=torch.float64)
    model = {n: leaf.unsqueeze(0) for n, leaf in module.state_dict().items()}
    for layer in layers:
        order = torch.arange(layer.units).roll(1)
        moved = layer.permuted(model, order.unsqueeze(0))
        found = torch.func.functional_call(module, {n: leaf[0] for n, leaf in moved.items()}, (x,))
        torch.testing.assert_close(found, module(x), rtol=1e-12, atol=1e-12)
        changed = {n for n in model if not torch.equal(model[n], moved[n])}
        assert changed == {*layer.rows, layer.columns}
        vectors = layer.vectors(model, frozenset(model))
        assert torch.equal(layer.vectors(moved, frozenset(model)), vectors[:, order])
        own = sum(model[n].numel() for n in (*layer.rows, layer.columns))
        assert vectors.numel() == own


def test_each_client_has_an_order_of_its_own() -> None:
    [first, _] = hidden_layers(perceptron())
    model = {n: torch.stack([leaf, leaf]) for n, leaf in perceptron().state_dict().items()}
    moved = first.permuted(model, torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]))
    assert torch.equal(moved["0.bias"][0], model["0.bias"][0])
    assert torch.equal(moved["0.bias"][1], model["0.bias"][1].flip(0))


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.Sequential(nn.Linear(4, 3), LowRank(nn.Linear(3, 2), 1)), "but got 1 of type LowRank"),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)), "1 of type LayerNorm"),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), "but got 0 of type BatchNorm1d"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 2)),
            "but got 2 of type BatchNorm1d",
        ),
        (nn.Sequential(nn.Conv1d(2, 2, 1, groups=2), nn.Linear(2, 2)), "but got 0 of type Conv1d"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2)), "got 4 inputs and 3 units"),
        (nn.Sequential(nn.Linear(4, 3)), "a network with a hidden layer, but got Sequential"),
        (nn.TransformerEncoderLayer(4, 2), "but got TransformerEncoderLayer of type Transformer"),
    ],
)
def test_what_is_no_chain_is_refused(module: nn.Module, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hidden_layers(module)


def test_a_layer_beside_backbone_and_head_is_refused() -> None:
    module: Any = small_module()
    module.extra = nn.Embedding(3, 3)
    with pytest.raises(ValueError, match="but got extra of type Embedding"):
        hidden_layers(module)
