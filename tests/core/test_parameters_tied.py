"""A tied parameter is one parameter, whichever of its names is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pfl import PersonalizedModule
from lightning_pfl.callbacks import HeadFineTuning
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.methods import FedAvg, FedPer, LocalOnly
from tests.trainer.setting import LR, SIZES, Quadratic, mean, points, steps_of, trained, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no.*")
ZERO = torch.zeros(2, dtype=torch.float64)


class Tied(Quadratic):
    """The point w, which `out` has too, and a second point that doesn't move."""

    def __init__(self, lr: float = LR) -> None:
        super().__init__(lr)
        self.out = nn.Module()
        self.out.weight = self.w
        self.out.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
        scale = torch.ones(2, dtype=torch.float64)
        self.register_buffer("scale", scale)
        self.out.register_buffer("scale", scale)


def test_the_layout_knows_all_names() -> None:
    parameter_split = ParameterSplit(Tied(), "out.weight")
    assert parameter_split.aliases == {"out.weight": "w", "out.scale": "scale"}
    assert parameter_split.personal == {"w"}
    assert parameter_split.match("out") == {"w", "out.bias", "scale"}
    assert parameter_split.match("*.scale") == {"scale"}
    assert parameter_split.notes() == [
        "out.weight is tied to w: both are personal.",
        "out.scale is tied to scale: both are shared.",
    ]
    assert ParameterSplit(Tied()).notes() == []


def test_a_type_picks_a_tied_parameter_under_its_second_name() -> None:
    module = Quadratic()
    net: Any = nn.Module()
    net.first, net.second = nn.Linear(2, 2), nn.Embedding(2, 2)
    net.second.weight = net.first.weight
    module.net = net
    assert ParameterSplit(module, nn.Embedding).personal == {"net.first.weight"}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_all_names_have_a_clients_value(engine: str) -> None:
    run = trainer(LocalOnly(), max_epochs=1, engine=engine)
    run.fit(Tied(), points())
    for client in range(len(SIZES)):
        state, copy = run.strategy.client_state_dict(client), run.strategy.client_module(client)
        assert copy.out.weight is copy.w
        for value in (state["w"], state["out.weight"], copy.w.detach()):
            torch.testing.assert_close(value, trained(ZERO, client), rtol=0, atol=1e-12)


def test_all_names_have_the_servers_value() -> None:
    run = trainer(FedAvg(), max_epochs=1)
    run.fit(Tied(), points())
    want = mean([trained(ZERO, client) for client in range(len(SIZES))], list(map(float, SIZES)))
    for state in (run.strategy.client_state_dict(1), run.strategy.global_state_dict()):
        for name in ("w", "out.weight"):
            torch.testing.assert_close(state[name], want, rtol=0, atol=1e-12)


def test_a_part_named_by_a_second_name_is_personal() -> None:
    run = trainer(FedPer(personal="out"), max_epochs=1)
    run.fit(Tied(), points())
    for client in range(len(SIZES)):
        state = run.strategy.client_state_dict(client)
        for name in ("w", "out.weight"):
            torch.testing.assert_close(state[name], trained(ZERO, client), rtol=0, atol=1e-12)


def test_fine_tuned_models_have_all_names() -> None:
    fine = HeadFineTuning(scope="out", epochs=1)
    run = trainer(FedAvg(), max_epochs=1, callbacks=[fine])
    run.fit(Tied(), points(), points())
    start = run.strategy.global_state_dict()["w"]
    want = trained(start, 2, steps_of(SIZES[2]))
    state = fine.client_state_dict(2)
    for name in ("w", "out.weight"):
        torch.testing.assert_close(state[name], want, rtol=0, atol=1e-12)


def test_halves_that_are_tied_are_refused_before_training() -> None:
    backbone, head = nn.Linear(3, 3), nn.Linear(3, 3)
    head.weight = backbone.weight
    module = PersonalizedModule(backbone, head)
    with pytest.raises(ValueError, match=r"no parameter in common, .* head\.weight is backbone\.w"):
        module.configure_optimizers()


def test_kinds_of_parameters_that_cannot_be_federated_are_refused_by_name() -> None:
    net: Any = nn.Module()
    net.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"real parameters .* 'phase' is of torch.complex64"):
        ParameterSplit(net)
    for layer in (nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True)):
        with pytest.raises(ValueError, match=rf"'0' is {type(layer).__name__}\(sparse=True\)"):
            ParameterSplit(nn.Sequential(layer))
        layer.requires_grad_(False)
        assert ParameterSplit(nn.Sequential(layer, nn.Linear(2, 1))).static == ("0.weight",)
