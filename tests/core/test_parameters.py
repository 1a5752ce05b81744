"""The layout: names, globs and types pick what is personal; what matches nothing is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl.core.parameters import ParameterSpec, ParameterSplit

pytestmark = pytest.mark.quick


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        )
        self.bnb = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


BN1 = {
    f"backbone.1.{n}"
    for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
BN2 = {
    f"backbone.2.1.{n}"
    for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
BODY = (
    {"backbone.0.weight", "backbone.0.bias", "backbone.2.0.weight", "backbone.2.0.bias"} | BN1 | BN2
)
HEAD = {"head.weight", "head.bias"}
ALL = BODY | HEAD | {"bnb.weight", "bnb.bias"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, set()),
        ([], set()),
        ("all", ALL),
        ("head", HEAD),
        ("head.*", HEAD),
        ("head.weight", {"head.weight"}),
        ("backbone", BODY),
        ("backbone.2", BN2 | {"backbone.2.0.weight", "backbone.2.0.bias"}),
        ("backbone.?.weight", {"backbone.0.weight", "backbone.1.weight"}),
        ("*.bias", {name for name in ALL if name.endswith("bias")}),
        (["head", "bnb"], HEAD | {"bnb.weight", "bnb.bias"}),
        (nn.BatchNorm1d, BN1 | BN2),
        ((nn.BatchNorm1d, nn.BatchNorm2d), BN1 | BN2),
        ([nn.BatchNorm1d, "head.bias"], BN1 | BN2 | {"head.bias"}),
        (nn.Sequential, BODY),
        (nn.LSTM, set()),
        (nn.Module, ALL),
    ],
)
def test_specs(spec: ParameterSpec, expected: set[str]) -> None:
    parameter_split = ParameterSplit(Net(), spec)
    assert parameter_split.personal == expected
    assert parameter_split.shared == ALL - expected
    assert set(parameter_split.names) == ALL


def test_a_name_that_is_a_prefix_of_another_does_not_match_it() -> None:
    net = nn.Module()
    net.head, net.head2 = nn.Linear(1, 1), nn.Linear(1, 1)
    assert ParameterSplit(net, "head").personal == {"head.weight", "head.bias"}


def test_a_pattern_without_match_is_refused_with_the_names_there_are() -> None:
    text = (
        "Expected `personal` to match at least one parameter, but got personal='classifier' "
        "and the model has "
    )
    with pytest.raises(
        ValueError, match=re.escape(text) + r"backbone, backbone\.0, .*bnb.*head.*Use one of these"
    ):
        ParameterSplit(Net(), "classifier")
    with pytest.raises(ValueError, match=r"Expected `train` to match .* got train='haed'"):
        ParameterSplit(Net()).match(["head", "haed"])


class Plain(nn.Module):
    """The names of many networks: the head is called neither ``head`` nor first."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.classifier = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))


def test_a_default_that_matches_nothing_is_answered_with_the_last_layer() -> None:
    text = "(the last layer is 'classifier.1'), a glob such as '*.bias', or 'all'."
    with pytest.raises(ValueError, match=re.escape(text)):
        ParameterSplit(Plain(), "head")
    assert ParameterSplit(Plain(), "classifier.1").personal == {
        "classifier.1.weight",
        "classifier.1.bias",
    }
    bare = nn.Module()
    bare.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=re.escape("(the last layer is 'weight')")):
        ParameterSplit(bare, "head")


@pytest.mark.parametrize("spec", [2.5, True, [1], ["head", None], nn.Linear(1, 1)], ids=str)
def test_what_is_no_name_and_no_type_is_refused(spec: Any) -> None:
    text = "Expected `personal` to be names, globs or module types, but got personal="
    with pytest.raises(TypeError, match=re.escape(text + repr(spec))):
        ParameterSplit(Net(), spec)


def test_a_type_picks_its_layers_and_no_name_that_begins_alike() -> None:
    net = nn.Module()
    net.norm1, net.norm10 = nn.BatchNorm1d(2), nn.Linear(2, 2)
    kept = {"norm1.weight", "norm1.bias", "norm1.running_mean", "norm1.running_var"}
    assert ParameterSplit(net, nn.BatchNorm1d).personal == kept | {"norm1.num_batches_tracked"}


def test_a_module_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(
        ValueError, match="Expected a module with trainable parameters, but Linear has none"
    ):
        ParameterSplit(nn.Linear(2, 2).requires_grad_(False))


def test_frozen_parameters_are_static_and_scratch_buffers_belong_to_nobody() -> None:
    net = Net()
    net.bnb.requires_grad_(False)
    parameter_split = ParameterSplit(net, "head")
    assert set(parameter_split.static) == {"bnb.weight", "bnb.bias"}
    assert not {"bnb.weight", "scratch"} & set(parameter_split.names)
    with pytest.raises(ValueError, match="personal='scratch'"):
        ParameterSplit(net, "scratch")
    match = r"a parameter that trains, but got personal='bnb', of which all are frozen: bnb.weight"
    with pytest.raises(ValueError, match=match):
        ParameterSplit(net, "bnb")


def test_tied_weights_appear_once() -> None:
    net = nn.Module()
    net.encoder, net.decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    net.decoder.weight = net.encoder.weight
    assert ParameterSplit(net).trainable == ("encoder.weight", "encoder.bias", "decoder.bias")


def test_model_is_a_copy_and_load_writes_it_back() -> None:
    net = Net()
    parameter_split = ParameterSplit(net)
    model = parameter_split.model()
    assert tuple(model) == parameter_split.names
    model["head.weight"].fill_(7.0)
    assert not (net.head.weight == 7.0).any()
    parameter_split.load({"head.weight": model["head.weight"]})
    assert (net.head.weight == 7.0).all()
    assert not any(leaf.requires_grad for leaf in model.values())


def test_describe_and_table_tell_the_holders_apart() -> None:
    parameter_split = ParameterSplit(Net(), "head")
    assert parameter_split.describe()["head.weight"] == [[2, 4], "personal"]
    assert parameter_split.describe()["bnb.bias"] == [[4], "shared"]
    rows = [line.split() for line in parameter_split.table().splitlines()]
    sizes = {
        name: sum(p.numel() for p in Net().get_submodule(name).state_dict().values())
        for name in ("backbone", "bnb", "head")
    }
    expected = [
        ["shared", "backbone", str(sizes["backbone"])],
        ["shared", "bnb", str(sizes["bnb"])],
        ["personal", "head", str(sizes["head"])],
    ]
    assert rows == expected
