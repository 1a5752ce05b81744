"""Layers whose code shows that it reads inputs and attributes alone."""

import math
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pfl.engine.checks import runs_torch_alone
from lightning_pfl.engine.known_code import are_known
from lightning_pfl.models.base import PersonalizedModule

SCALE, TABLE = 2.0, [2.0]


class Sum(nn.Module):
    """Adds two layers' results, with functions of its own, a comprehension and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.gain = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), 0.5
        self.shift = torch.zeros(4)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        found = torch.stack([layer(x) for layer in self.layers]).sum(0)
        return F.relu(self.scaled(found)) * factor + self.shift

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain * math.sqrt(len(self.layers)) if x.shape[0] else x


class Outer(nn.Module):
    """Calls a function of another layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.helper(x)  # type: ignore[operator, no-any-return]


class Clean(nn.Module):
    """Has a function that another layer calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def helper(self, x: Tensor) -> Tensor:
        return 2 * x


class Dirty(Clean):
    """Inherits from another layer."""


class ReadsGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE


class HelperReadsGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def helper(self, x: Tensor) -> Tensor:
        return x * TABLE[0]


class ReadsTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (time.time() > 0)


class Imports(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import os

        return x * len(os.environ)


class Sets(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-untyped-call, no-any-return]


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"gain": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held["gain"]


class ClassAttribute(nn.Module):
    gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Property(nn.Module):
    @property
    def gain(self) -> float:
        return TABLE[0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Dynamic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(getattr(self, "gain", 1.0))


class Default(nn.Module):
    def forward(self, x: Tensor, held: Any = TABLE) -> Tensor:
        return x * float(held[0])


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x


class Super(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(super().training)


class Attributes(nn.Module):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Loads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(torch.load("weights.pt"))


def test_layers_of_inputs_and_attributes() -> None:
    assert are_known([Sum()])
    inner = Clean()
    assert are_known([Outer(inner), inner])
    assert are_known([])


@pytest.mark.parametrize(
    "kind",
    [ReadsGlobal, ReadsTime, Imports, Sets, Closure, Holds, ClassAttribute, Property, Dynamic,
     Default, Decorated, Super, Attributes, Loads, Dirty],
)  # fmt: skip
def test_layers_that_may_read_more(kind: type[nn.Module]) -> None:
    assert not are_known([kind()])
    assert not are_known([Sum(), kind()])
    module = PersonalizedModule(nn.Sequential(Sum(), kind()), nn.Linear(4, 2))
    assert not runs_torch_alone(module)


def test_what_a_layer_calls_is_read() -> None:
    inner = HelperReadsGlobal()
    assert are_known([inner])
    assert not are_known([Outer(inner), inner])


def test_functions_that_are_replaced_on_an_object() -> None:
    first, second = Sum(), Sum()
    first.__dict__["forward"] = second.__dict__["scaled"] = torch.relu
    assert not are_known([first])
    assert not are_known([second])
    assert not are_known([Sum(), second])


def test_a_module_of_known_layers() -> None:
    assert runs_torch_alone(PersonalizedModule(Sum(), nn.Linear(4, 2)))
