"""Recordings are compared in every round, but for those of torch's layers alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_pfl.engine.checks import RARELY, Checks
from lightning_pfl.methods import FedAvg, FedMAP
from lightning_pfl.models import MLP, DigitsCNN, LeNet
from lightning_pfl.models.base import PersonalizedModule
from lightning_pfl.testing.rounds import local_round
from tests.engine.nets import CLASSES, image_clients

GAINS = [1.0]


class OwnLayer(nn.Module):
    """A user's layer that reads a list."""

    def forward(self, x: Tensor) -> Tensor:
        return x * GAINS[-1]


class OwnLinear(nn.Linear):
    """A user's layer that overrides torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnModule(MLP):
    """A module of a user's, whose step reads a list."""

    def forward(self, inputs: Any) -> Tensor:
        output: Tensor = super().forward(inputs) * GAINS[-1]
        return output


def known_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="none")


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return known_loss(output, target) * GAINS[-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: MLP([4, 3, 2]),
        LeNet,
        DigitsCNN,
        lambda: PersonalizedModule(nn.Sequential(nn.LSTM(3, 2), nn.BatchNorm1d(2)), nn.Identity()),
        lambda: PersonalizedModule(OwnLinear(25, 4), nn.Identity()),
        lambda: PersonalizedModule(nn.Linear(25, 4), nn.Identity(), loss=known_loss),
        lambda: PersonalizedModule(parametrizations.weight_norm(nn.Linear(25, 4)), nn.Identity()),
    ],
)
def test_layers_of_torch_and_of_the_package(make: Callable[[], nn.Module]) -> None:
    assert is_known(make())


def is_known(module: nn.Module, step: str = "training_step") -> bool:
    checks = Checks(module, step)
    checks.due()
    assert checks.recordable  # as a PersonalizedModule promises
    return checks.known


def module(layer: nn.Module, **options: Any) -> PersonalizedModule:
    return PersonalizedModule(nn.Sequential(nn.Flatten(), layer), nn.Linear(4, CLASSES), **options)


def replaced(name: str) -> Any:
    made: Any = module(nn.Linear(25, 4))
    owner = made if name != "forward" else made.head
    owner.__dict__[name] = getattr(owner, name)
    return made


def hooked(register: str) -> Any:
    made: Any = module(nn.Linear(25, 4))
    getattr(made.head, register)(lambda *_: None)
    return made


def with_loss() -> PersonalizedModule:
    made = module(nn.Linear(25, 4))
    made.loss = own_loss
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: module(OwnLayer()),
        lambda: module(nn.Linear(25, 4), loss=own_loss),
        with_loss,
        lambda: replaced("forward"),
        lambda: replaced("per_sample"),
        lambda: hooked("register_forward_hook"),
        lambda: hooked("register_forward_pre_hook"),
        lambda: hooked("register_full_backward_hook"),
        lambda: hooked("register_full_backward_pre_hook"),
    ],
)
def test_what_a_user_has_written_is_compared_in_every_round(make: Callable[[], nn.Module]) -> None:
    assert not is_known(make())
    checks = Checks(make())
    assert all(checks.due() for _ in range(RARELY + 1))


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_each_step_is_read_alone(step: str) -> None:
    for other in ("training_step", "validation_step"):
        assert is_known(replaced(other), step) is (other != step)


def test_a_module_that_overrides_a_function_is_recorded_where_it_is_known() -> None:
    checks = Checks(OwnModule([25, 4, 3]))
    assert checks.due()
    assert not checks.recordable


class OwnMethod(FedAvg):
    """A method of a user's, whose step may read anything."""


@pytest.mark.parametrize("others", [(OwnMethod(),), (FedAvg(), OwnMethod()), (1.0, OwnLayer())])
def test_methods_and_what_they_hold_may_be_a_users(others: tuple[Any, ...]) -> None:
    checks = Checks(MLP([4, 3, 2]))
    assert [checks.due(others) for _ in range(3)] == [True] * 3


def test_methods_of_the_package_are_compared_rarely() -> None:
    checks, method = Checks(MLP([4, 3, 2])), FedMAP()
    due = [checks.due((method, method.prior, 0.1, "mean", None)) for _ in range(RARELY + 2)]
    assert due == [True] + [False] * (RARELY - 1) + [True, False]


@pytest.mark.parametrize(
    "kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
)
def test_hooks_of_all_layers_are_a_users(kind: str) -> None:
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        assert not is_known(MLP([4, 3, 2]))
    finally:
        handle.remove()
    assert is_known(MLP([4, 3, 2]))


def test_a_patched_layer_of_torch_is_a_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", OwnLinear.forward)
    assert not is_known(module(nn.Linear(25, 4)))


class OfList(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GAINS[-1]


@pytest.mark.parametrize("layer", [nn.Linear, OfList])
def test_steps_that_run_in_rounds_without_a_comparison(
    layer: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in Python computes a gradient, a replay doesn't."""
    method, data = FedAvg(local_epochs=3), image_clients((9,) * 5)
    torch.manual_seed(0)
    engine = local_round(method, module(layer(25, 4)).double(), data, "sequential").engine
    monkeypatch.setattr("lightning_pfl.testing.rounds.SequentialEngine", lambda *_, **__: engine)
    assert engine._program is not None
    compared = []
    for round in range(1, RARELY + 1):
        before = engine._program.gradients
        local_round(method, engine.module, data, "reference", round=round)
        compared.append(engine._program.gradients > before)
    rarely = layer is nn.Linear
    assert compared == [not rarely or round == RARELY for round in range(1, RARELY + 1)]
