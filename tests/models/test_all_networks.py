"""The papers' networks: sizes as published, shapes, round trips, guards."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.func import functional_call, vmap

from lightning_pfl import models
from lightning_pfl.models import (
    FEMNISTMLP,
    MLP,
    CIFARBackbone,
    FedMAPMLP,
    LeNet,
    LinearRepresentation,
)
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.models.layers import convolution_blocks, dense


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


#: name: (arguments, parameters, parameters of the head, input shape, outputs). Plain numbers of
#: parameters follow from the papers; the others are sums over layers (inputs + 1) * outputs.
NETWORKS: dict[str, tuple[dict[str, Any], int, int, tuple[int, ...], int]] = {
    "MLP": ({"sizes": [7, 5, 3]}, 8 * 5 + 6 * 3, 6 * 3, (7,), 3),
    "DigitsMLP": ({}, 65 * 64 + 650, 65 * 10, (1, 8, 8), 10),
    "DigitsCNN": ({}, 10 * 16 + 145 * 32 + 129 * 64 + 650, 65 * 10, (64,), 10),
    "LeNet": (
        {},
        26 * 6 + 151 * 16 + 257 * 120 + 121 * 100 + 101 * 10,
        101 * 10,
        (1, 28, 28),
        10,
    ),
    "CIFAR10CNN": ({}, 307_842, 650, (3, 32, 32), 10),
    "CIFAR100CNN": ({}, 1_075_044, 12_900, (3, 32, 32), 100),
    "FEMNISTMLP": ({}, 550_346, 650, (1, 28, 28), 10),
    "Sent140LSTM": ({}, 4 * 128 * (300 + 128 + 2) + 1290 + 22, 22, (25, 300), 2),
    "FEMNISTCNN": ({}, 3_374_782, 513 * 62, (1, 28, 28), 62),
    "FedMAPMLP": ({}, 1_537, 17, (30,), 1),
    "AlexNetBN": ({}, 57_149_535, 4097 * 31, (3, 224, 224), 31),
    "SquaredHingeClassifier": ({"num_inputs": 5}, 6, 6, (5,), 1),
    "LinearRepresentation": ({"num_inputs": 20, "num_features": 2}, 42, 2, (20,), 1),
}


def build(name: str) -> PersonalizedModule:
    constructor: Callable[..., PersonalizedModule] = getattr(models, name)
    return constructor(**NETWORKS[name][0])


def test_every_network_is_listed() -> None:
    exported = [getattr(models, name) for name in models.__all__]
    networks = {cls.__name__ for cls in exported if issubclass(cls, PersonalizedModule)}
    assert networks == set(NETWORKS)


with torch.device("meta"):
    SLICED = [name for name in NETWORKS if isinstance(build(name).backbone, nn.Sequential)]


@pytest.mark.parametrize("name", SLICED)
def test_a_slice_of_a_backbone_has_its_layers(name: str) -> None:
    with torch.device("meta"):
        backbone: Any = build(name).backbone
    part = backbone[1:3]
    assert type(part) is nn.Sequential
    assert list(part) == list(backbone)[1:3]
    assert backbone[-1] is list(backbone)[-1]


@pytest.mark.parametrize("name", NETWORKS)
class TestNetwork:
    def test_number_of_parameters(self, name: str) -> None:
        with torch.device("meta"):
            module = build(name)
        _, total, head, _, _ = NETWORKS[name]
        assert (count(module), count(module.head)) == (total, head)

    def test_output_shape(self, name: str) -> None:
        _, _, _, inputs, outputs = NETWORKS[name]
        with torch.device("meta"):
            module = build(name)
            assert module(torch.empty(2, *inputs)).shape == (2, outputs)

    def test_arguments_saved_in_a_checkpoint_rebuild_it(self, name: str) -> None:
        """`load_from_checkpoint` passes all saved hyperparameters to the constructor."""
        with torch.device("meta"):
            module = build(name)
            twin = type(module)(**module.hparams)
        shapes, twin_shapes = (
            {key: value.shape for key, value in m.state_dict().items()} for m in (module, twin)
        )
        assert shapes == twin_shapes
        assert dict(module.hparams) == dict(twin.hparams)

    def test_recipe_sets_arguments_of_network_and_base(self, name: str) -> None:
        """A recipe's init_args reach PersonalizedModule through `**settings`."""
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(PersonalizedModule, "model")
        init_args = {**NETWORKS[name][0], "lr": 0.3, "head_lr": 0.4, "optimizer": "adam"}
        class_path = f"lightning_pfl.models.{name}"
        with torch.device("meta"):
            config = {"model": {"class_path": class_path, "init_args": init_args}}
            module = parser.instantiate(parser.parse_object(config)).model
        assert type(module).__name__ == name
        optimizer = module.configure_optimizers()
        assert isinstance(optimizer, torch.optim.Adam)
        assert {group["name"].split("/")[0]: group["lr"] for group in optimizer.param_groups} == {
            **({"backbone": 0.3} if count(module.backbone) else {}),
            "head": 0.4,
        }


def test_published_sizes_of_variants() -> None:
    with torch.device("meta"):
        assert count(FedMAPMLP(num_inputs=31)) == 1_569
        assert count(FedMAPMLP(batch_norm=True)) == 1_537 + 2 * (32 + 16)
        layers = build("AlexNetBN").modules()
        norms = [layer for layer in layers if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))]
        assert sum(count(norm) for norm in norms) == 18_688


def test_double_softmax_ends_in_probabilities() -> None:
    module = FEMNISTMLP(double_softmax=True)
    plain = FEMNISTMLP()
    plain.backbone.load_state_dict(module.backbone.state_dict())
    plain.head.load_state_dict(module.head.get_submodule("0").state_dict())
    inputs = torch.randn(4, 784)
    torch.testing.assert_close(module(inputs), plain(inputs).softmax(1))
    assert count(module) == count(plain)


def test_pooled_images_are_averages() -> None:
    module = MLP([4, 3], pool=2)
    images = torch.randn(5, 1, 4, 4)
    rows = images.unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean((3, 5)).flatten(1)
    torch.testing.assert_close(module(images), module.head(rows))
    with pytest.raises(
        ValueError, match=r"Expected `pool` to be a whole number >= 1, but got pool=0"
    ):
        MLP([4, 3], pool=0)


def test_linear_representation_is_its_equation() -> None:
    torch.manual_seed(0)
    module = LinearRepresentation(5, 2).double()
    inputs, target = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    w = module.head.get_parameter("weight")[0]
    expected = torch.stack([w @ module.representation.T @ x for x in inputs])
    torch.testing.assert_close(module(inputs)[:, 0], expected)
    loss = module.per_sample((inputs, target))["loss"]
    torch.testing.assert_close(loss, (expected - target) ** 2 / 2)
    # Plain gradient steps, as the theory has them.
    assert {
        (group["momentum"], group["weight_decay"])
        for group in module.configure_optimizers().param_groups
    } == {(0.0, 0.0)}


def test_pooling_before_relu_equals_the_papers_order() -> None:
    torch.manual_seed(0)
    convolution, pool, relu = convolution_blocks([2, 3], kernel_size=3)
    inputs = torch.randn(4, 2, 8, 8)
    ours, theirs = relu(pool(convolution(inputs))), pool(relu(convolution(inputs)))
    assert torch.equal(ours, theirs)
    weight = convolution.get_parameter("weight")
    gradients = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (ours, theirs)]
    assert torch.equal(gradients[0], gradients[1])


def test_default_initial_loss_is_that_of_a_uniform_guess() -> None:
    """An untrained network is about as good as a guess: cross-entropy near log 10."""
    torch.manual_seed(0)
    batch = torch.randn(64, 1, 28, 28), torch.arange(64) % 10
    loss = LeNet().per_sample(batch)["loss"].mean().item()
    assert loss == pytest.approx(math.log(10), rel=0.05)


@pytest.mark.parametrize("name", ["MLP", "DigitsCNN", "LeNet", "FedMAPMLP"])
def test_runs_with_one_model_per_client(name: str) -> None:
    torch.manual_seed(0)
    clients = [build(name), build(name)]
    stacked = {
        key: torch.stack([client.state_dict()[key] for client in clients])
        for key in clients[0].state_dict()
    }
    inputs = torch.randn(2, 3, *NETWORKS[name][3])
    got = vmap(lambda model, x: functional_call(clients[0], model, x))(stacked, inputs)
    want = torch.stack([client(x) for client, x in zip(clients, inputs, strict=True)])
    torch.testing.assert_close(got, want)


class TestGuards:
    def test_mlp_of_one_size(self) -> None:
        message = r"Expected `sizes` to have at least .* but got sizes=\[5\]"
        with pytest.raises(ValueError, match=message):
            MLP([5])

    def test_layer_without_units(self) -> None:
        with pytest.raises(ValueError, match=r"Expected `sizes` to be positive .* sizes=\[5, 0\]"):
            dense([5, 0])

    def test_three_convolutions(self) -> None:
        with pytest.raises(ValueError, match=r"Expected `channels` to have two entries, but got"):
            CIFARBackbone(channels=(1, 2, 3))

    @pytest.mark.parametrize("num_features", [0, 6])
    def test_representation_of_wrong_dimension(self, num_features: int) -> None:
        message = rf"Expected `num_features` .*\[1, 5\], but got num_features={num_features}"
        with pytest.raises(ValueError, match=message):
            LinearRepresentation(5, num_features)
