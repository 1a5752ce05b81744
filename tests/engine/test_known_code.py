"""Layers whose code shows that it reads inputs and attributes alone."""

import math
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.nn.functional as F
from torch import Tensor, load, nn, tanh

from lightning_pfl.engine.checks import Checks, read_by_step
from lightning_pfl.engine.known_code import read_by
from lightning_pfl.models.base import PersonalizedModule

SCALE, TABLE = 2.0, [2.0]
TENSOR, LAYER = torch.tensor(2.0), nn.LeakyReLU(0.1)  # of torch's classes, and may change


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


class LoadsByName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(load("weights.pt"))


class ReadsModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(distributed.is_initialized())


class GlobalTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * TENSOR


class GlobalLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return LAYER(x)  # type: ignore[no-any-return]


class ClassTensor(nn.Module):
    gain = TENSOR

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def test_layers_of_inputs_and_attributes() -> None:
    assert read_by([Sum()]) is not None
    inner = Clean()
    assert read_by([Outer(inner), inner]) is not None
    assert read_by([]) is not None


@pytest.mark.parametrize(
    "kind",
    [ReadsGlobal, ReadsTime, Imports, Sets, Closure, Holds, ClassAttribute, Property, Dynamic,
     Default, Decorated, Super, Attributes, Loads, LoadsByName, ReadsModule, GlobalTensor,
     GlobalLayer, ClassTensor, Dirty],
)  # fmt: skip
def test_layers_that_may_read_more(kind: type[nn.Module]) -> None:
    assert read_by([kind()]) is None
    assert read_by([Sum(), kind()]) is None
    module = PersonalizedModule(nn.Sequential(Sum(), kind()), nn.Linear(4, 2))
    assert read_by_step(module) is None


def test_what_a_layer_calls_is_read() -> None:
    inner = HelperReadsGlobal()
    assert read_by([inner]) is not None
    assert read_by([Outer(inner), inner]) is None


def test_functions_that_are_replaced_on_an_object() -> None:
    first, second = Sum(), Sum()
    first.__dict__["forward"] = second.__dict__["scaled"] = torch.relu
    assert read_by([first]) is None
    assert read_by([second]) is None
    assert read_by([Sum(), second]) is None


def test_a_module_of_known_layers() -> None:
    assert read_by_step(PersonalizedModule(Sum(), nn.Linear(4, 2))) is not None


class Calls(nn.Module):
    """Calls a function of its own, and one of torch's by a global name."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bent(x)

    def bent(self, x: Tensor) -> Tensor:
        return tanh(x)


def other(_: Any, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Calls, "forward", other),
        (Calls, "bent", other),
        (sys.modules[__name__], "tanh", torch.sigmoid),
    ],
)
def test_what_a_layer_reads_is_compared_when_it_was_replaced(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the round after, and then rarely again."""
    checks = Checks(PersonalizedModule(Calls(), nn.Linear(4, 2)))
    assert [checks.due() for _ in range(3)] == [True, False, False]
    monkeypatch.setattr(owner, name, value)
    assert [checks.due() for _ in range(3)] == [True, False, False]
