"""Layers whose code shows that it reads inputs and attributes alone."""

import copy
import functools
import math
import sys
import time
from argparse import Namespace
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.nn.functional as F
from torch import Tensor, load, nn, tanh
from torchmetrics import MeanMetric

from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.known_code import UnknownCodeError, calls_metrics, read_by_step
from lightning_pfl.models.base import PersonalizedModule

SCALE, TABLE = 2.0, [2.0]


def module(*layers: nn.Module) -> PersonalizedModule:
    return PersonalizedModule(nn.Sequential(*layers), nn.Linear(4, 2))


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
        held = [2.0]
        self.function = lambda x: x * held[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-untyped-call, no-any-return]


@dataclass
class Settings:
    gain: float = 2.0
    gains: list[float] = field(default_factory=lambda: [2.0])


@dataclass(frozen=True, order=True)
class Fixed:
    gain: float = 2.0

    def __post_init__(self) -> None:
        assert TABLE


class Computes(Settings):
    def more(self) -> float:
        return TABLE[0]


@dataclass
class Compares(Settings):
    def __eq__(self, other: object) -> bool:
        return bool(TABLE)


def around(value: Any) -> Any:
    return lambda x: x * value


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return 2 * function(*args)

    return wrapped


def counting() -> Any:
    count = 0

    def function(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    return function


def counting_inside() -> Any:
    count = 0

    def function(x: Tensor) -> Tensor:
        def more() -> int:
            nonlocal count
            count += 1
            return count

        return x * more()

    return function


def with_attribute() -> Any:
    function = around(2.0)
    function.gain = 2.0
    return function


def ends_late() -> Any:
    def function(x: Tensor) -> Tensor:
        return x * late

    if TABLE:
        return function
    late = 2.0
    return late


class CallsIts(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


class DecoratedByKnown(nn.Module):
    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return x


class Holds(nn.Module):
    """Reads a dict in a dict, and an attribute of an object."""

    def __init__(self, held: Any, settings: Any) -> None:
        super().__init__()
        self.held, self.settings = held, settings

    def forward(self, x: Tensor) -> Tensor:
        gain: float = self.held["a"]["gain"] * self.settings.gain
        return x * gain


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


class PropertyOfNumber(nn.Module):
    @property
    def gain(self) -> float:
        return SCALE

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Static(nn.Module):
    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x)


class WithNoGrad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.std()
        return x / scale


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 99:
            raise ValueError(f"{x.shape[1]} is too wide")
        return x


class HelperOfForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x * TABLE[0]


class Dynamic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(getattr(self, f"gain{x.dim()}", 1.0))


class Default(nn.Module):
    def forward(self, x: Tensor, held: Any = TABLE) -> Tensor:
        return x * float(held[0])


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x


class Super(Clean):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


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


class OwnClass(nn.Module):
    def __len__(self) -> int:
        return len(TABLE)

    def forward(self, x: Tensor) -> Tensor:
        return x * len(self)


class Catches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x.view(-1, 3)
        except RuntimeError:
            return x


class CatchesAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x.view(-1, 3)
        except:  # noqa: E722
            return x


class ReadsNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().tolist()[0][0]  # type: ignore[no-any-return]


class OfFunction(nn.Module):
    """Reads an attribute of a function, whose name no layer and no tensor has."""

    def forward(self, x: Tensor) -> Tensor:
        return counted(x) * counted.calls  # type: ignore[attr-defined, no-any-return]


def counted(x: Tensor) -> Tensor:
    return x


class OfCountedFunction(nn.Module):
    """Reads an attribute of a function, whose name dicts have, too."""

    def forward(self, x: Tensor) -> Tensor:
        return helped(x) * helped.values[0]  # type: ignore[attr-defined, no-any-return]


def helped(x: Tensor) -> Tensor:
    return x


helped.values = [1.0]  # type: ignore[attr-defined]


class ReadsScale(nn.Module):
    """Reads an attribute of its own and, of one name, of what it is given."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.scale, self._scale = held, 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held.scale * self.scale  # type: ignore[no-any-return]


class ReadsPrivate(ReadsScale):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.held._scale * self._scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(1)), lambda: torch.ones(1)])
def test_what_a_user_has_set_on_a_tensor(make: Any) -> None:
    """Recordings don't compare it. A buffer is held elsewhere than an attribute."""
    tensor = make()
    layer, other = ReadsScale(tensor), ReadsScale(None)
    other.register_buffer("one", tensor)
    read_by_step(module(layer))
    tensor.scale = 2.0
    for one in (module(layer), module(other)):
        with pytest.raises(UnknownCodeError, match="scale"):
            read_by_step(one)


def test_what_a_user_has_set_on_a_layer_of_torch() -> None:
    """Recordings compare what isn't private."""
    tanh = nn.Tanh()
    tanh.scale, tanh._scale = 2.0, 2.0  # type: ignore[assignment]
    read_by_step(module(ReadsScale(tanh)))
    with pytest.raises(UnknownCodeError, match="_scale"):
        read_by_step(module(ReadsPrivate(tanh)))


def test_copies_of_objects_leave_them_known() -> None:
    """Python notes something in the class of what it copies."""
    settings = Copied()
    one = module(ReadsScale(settings))
    read_by_step(one)
    copy.deepcopy(settings)
    assert "__slotnames__" in vars(Copied)
    read_by_step(one)


@dataclass
class Copied:
    scale: float = 2.0


def test_layers_of_inputs_and_attributes() -> None:
    inner = Clean()
    for layer in (Sum(), Outer(inner), nn.Linear(4, 4)):
        read_by_step(module(layer))


@pytest.mark.parametrize(
    "kind",
    [ReadsGlobal, ClassAttribute, Super, Dirty, PropertyOfNumber, Static, WithNoGrad, Raises],
)
def test_layers_that_read_numbers_and_inherit(kind: type[nn.Module]) -> None:
    read_by_step(module(kind()))


@pytest.mark.parametrize(
    "kind",
    [ReadsTime, Imports, Sets, Closure, Property, Dynamic, Default, Decorated, Attributes,
     Loads, LoadsByName, ReadsModule, GlobalTensor, GlobalLayer, ClassTensor, HelperOfForward,
     OwnClass, Catches, CatchesAll, ReadsNumbers, OfFunction, OfCountedFunction],
)  # fmt: skip
def test_layers_that_may_read_more(kind: type[nn.Module]) -> None:
    with pytest.raises(UnknownCodeError):
        read_by_step(module(Sum(), kind()))


class Own:
    """Has numbers alone."""

    other = 3

    def __init__(self) -> None:
        self.gain = 2.0


class OfClass(Own):
    gain = 2.0

    def __init__(self) -> None:
        pass


class Gives(Own):
    def __getattr__(self, name: str) -> Any:
        return TABLE[0]


class Doubles(Own):
    @property
    def double(self) -> float:
        return 2 * self.gain


FUNCTIONS = {
    "number": around(2.0),
    "function": doubled(torch.relu),
    "function of a function": doubled(doubled(around(2.0))),
    "partial": functools.partial(F.leaky_relu, negative_slope=0.1),
    "partial of a function": functools.partial(around(2.0)),
}
MORE: dict[str, tuple[Any, str]] = {
    "list": (around([2.0]), "'value'"),
    "tensor": (around(TENSOR), "'value'"),
    "layer": (doubled(LAYER), "has attributes"),
    "named as torch's": (functools.wraps(F.silu)(lambda x: x * TABLE[0]), "TABLE"),
    "reads more": (doubled(lambda x: x * TABLE[0]), "TABLE"),
    "counts": (counting(), "changes 'count'"),
    "counts inside": (counting_inside(), "changes 'count'"),
    "attribute": (with_attribute(), "has attributes"),
    "no value": (ends_late(), "'late'"),
    "partial of a list": (functools.partial(torch.add, [2.0]), "partial"),
    "partial of a tensor": (functools.partial(torch.add, TENSOR), "partial"),
    "partial that reads more": (functools.partial(lambda x: x * TABLE[0]), "TABLE"),
    "partial of a layer": (functools.partial(LAYER), "'function'"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_variables_around_them(name: str) -> None:
    read_by_step(module(CallsIts(FUNCTIONS[name])))


def test_a_known_decorator() -> None:
    read_by_step(module(DecoratedByKnown()))


@pytest.mark.parametrize("name", MORE)
def test_functions_with_more_around_them(name: str) -> None:
    function, what = MORE[name]
    with pytest.raises(UnknownCodeError, match=what):
        read_by_step(module(CallsIts(function)))


PLAIN = {"a": {"gain": 2.0}}


@pytest.mark.parametrize(
    "settings",
    [Settings(), Fixed(), Own(), SimpleNamespace(gain=2.0), Namespace(gain=2.0)],
)
def test_layers_that_read_lists_dicts_and_objects(settings: Any) -> None:
    read_by_step(module(Holds(PLAIN, settings)))
    vars(settings)["gain"] = [{"b": 2.0}]
    read_by_step(module(Holds(PLAIN, settings)))


@pytest.mark.parametrize(
    ("held", "settings", "what"),
    [
        ({"a": {"gain": TABLE.append}}, Settings(), "held"),
        ({"a": {"gain": torch.ones(())}}, Settings(), "held"),
        ({"a": {"gain": [[[2.0]]]}}, Settings(), "held"),
        ({"a": {"gain": 2.0} | dict.fromkeys(range(1000))}, Settings(), "held"),
        (OrderedDict(PLAIN), Settings(), "held"),
        (defaultdict(dict), Settings(), "held"),
        (PLAIN, Computes(), "settings"),
        (PLAIN, Compares(), "settings"),
        (PLAIN, Settings(gains=[object()]), "settings"),  # type: ignore[list-item]
        (PLAIN, SimpleNamespace(gain=object()), "settings"),
        (PLAIN, SimpleNamespace(other=2.0), "gain"),
        (PLAIN, OfClass(), "gain"),
        (PLAIN, Gives(), "settings"),
        (PLAIN, Doubles(), "settings"),
    ],
)
def test_layers_that_read_what_may_hold_more(held: Any, settings: Any, what: str) -> None:
    with pytest.raises(UnknownCodeError, match=f"'{what}'"):
        read_by_step(module(Holds(held, settings)))


def test_what_a_layer_calls_is_read() -> None:
    inner = HelperReadsGlobal()
    read_by_step(module(inner))
    with pytest.raises(UnknownCodeError, match="TABLE"):
        read_by_step(module(Outer(inner)))


def test_functions_that_are_replaced_on_an_object() -> None:
    second = Sum()
    second.__dict__["scaled"] = torch.relu
    read_by_step(module(second))
    second.__dict__["scaled"] = lambda x: x * TABLE[0]
    with pytest.raises(UnknownCodeError, match="TABLE"):
        read_by_step(module(second))
    second.__dict__["scaled"] = Sum().scaled  # of another object
    with pytest.raises(UnknownCodeError, match="method"):
        read_by_step(module(second))


def test_functions_that_layers_of_torch_call_and_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b: x @ w.t() * SCALE + b)
    read_by_step(module(Sum()))
    monkeypatch.setattr(F, "linear", lambda x, w, b: x @ w.t() * TABLE[0] + b)
    with pytest.raises(UnknownCodeError, match="TABLE"):
        read_by_step(module(Sum()))
    monkeypatch.setattr(F, "linear", functools.wraps(F.gelu)(lambda x, w, b: own(x, w, b)))
    read_by_step(module(Sum()))
    table = [2.0]
    monkeypatch.setattr(F, "linear", functools.wraps(F.gelu)(lambda x, w, b: x * table[0]))
    with pytest.raises(UnknownCodeError, match="table"):
        read_by_step(module(Sum()))


class TwoNames(nn.Module):
    """Calls a torchmetrics object by the second of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MeanMetric()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        self.second.update(x.mean())
        return x


def test_torchmetrics_objects_are_known_by_each_name() -> None:
    with pytest.raises(UnknownCodeError, match="second"):
        read_by_step(TwoNames(), "forward")
    assert calls_metrics(read_by_step(TwoNames(), "forward", metrics=True))


def test_activations_that_layers_of_torch_hold() -> None:
    def layer(activation: Any) -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8, activation=activation)

    read_by_step(module(layer(F.gelu)))
    read_by_step(module(layer(lambda x: F.gelu(x) * SCALE)))
    with pytest.raises(UnknownCodeError, match="TABLE"):
        read_by_step(module(layer(lambda x: x * TABLE[0])))
    with pytest.raises(UnknownCodeError, match="activation"):
        read_by_step(module(layer(Scaling())))


class Scaling:
    def __call__(self, x: Tensor) -> Tensor:
        return x * TABLE[0]


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
