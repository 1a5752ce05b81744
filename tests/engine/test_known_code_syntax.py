"""Code of each kind of syntax: whether the numbers that it reads are found in every Python.

Python's instructions differ from version to version, and so does which of them a line becomes.
"""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import AttributeDict
from torch import Tensor, nn

from lightning_pfl.engine import instructions, known_code
from lightning_pfl.engine.fingerprint import fingerprint
from lightning_pfl.engine.known_code import UnknownCodeError, read_by_step
from lightning_pfl.models.base import PersonalizedModule

# Each reads NUMBER, which stands for a global name or an attribute, in a place of its own.
READS = [
    "return x * NUMBER",
    "return (-x + NUMBER) @ x.T - x / 2 // 3 % 4 ** 1",
    "x *= NUMBER; x += 1; x @= x; x -= 1; x /= 2; return x",
    "return x if x.shape[0] > NUMBER else -x",
    "return x if 0 < NUMBER < 2 and not x.dim() or x is None else x",
    "return x if NUMBER in (1.0, 2.0) and x.dim() not in (3, 4) else x",
    "return x[:, : int(NUMBER)]",
    "found = [x, x]; found[0:1] = [x * NUMBER]; del found[1:]; return found[0]",
    "found = {'a': x}; found['b'] = x * NUMBER; del found['a']; return found['b']",
    "return sum([x * NUMBER for _ in range(2)])",
    "return sum(x * NUMBER for _ in range(2))",
    "return sum({i: x * NUMBER for i in range(2)}.values())",
    "return x * len({i * NUMBER for i in range(2)})",
    "return sum(x * j for i in range(2) for j in range(i) if j < NUMBER)",
    "return torch.stack([*[x], x * NUMBER]).sum(0)",
    "first, *others = (x, x * NUMBER, x); return first + others[0]",
    "return sum({**{'a': x}, 'b': x * NUMBER}.values())",
    "return torch.add(*(x, x), **{'alpha': NUMBER})",
    "return torch.add(x, x, alpha=NUMBER)",
    "return F.leaky_relu(input=x, negative_slope=NUMBER)",
    "return (lambda y: y * NUMBER)(x)",
    "return (lambda y, by=NUMBER: y * by)(x)",
    "return x * float(f'{NUMBER:.3f}{2!r}')",
    "return x if (y := NUMBER) else x * y",
    "return super().forward(x) * NUMBER",
    "return super().forward(x * NUMBER)",
    """
    scale = NUMBER
    def inner(y, *, by=2):
        nonlocal scale
        scale = scale * by
        return y * scale
    return inner(x)
    """,
    """
    def inner():
        yield x
        yield from [x * NUMBER]
    return sum(inner())
    """,
    """
    def inner(y: Tensor) -> Tensor:
        return y * NUMBER
    return inner(x)
    """,
    """
    for i in range(3):
        if i == 1:
            continue
        x = x * NUMBER
        if i > 1:
            break
    else:
        return x
    return x
    """,
    """
    i = 0
    while i < NUMBER:
        i += 1
    return x * i
    """,
    """
    with torch.no_grad():
        scale = x.std() * NUMBER
    return x / scale
    """,
    """
    with torch.no_grad(), torch.enable_grad() as _:
        return x * NUMBER
    """,
    """
    if x.dim() > 99:
        raise ValueError(f"{NUMBER} is too much")
    return x
    """,
    """
    assert x.dim() < 99, NUMBER
    return x
    """,
    """
    y = x * NUMBER
    del x
    return y
    """,
    """
    match x.dim():
        case 1 | 2 if NUMBER > 0:
            return x
        case other:
            return x * other
    """,
    """
    match (1, {"a": x}):
        case [_, {"a": y, **rest}]:
            return y * NUMBER + len(rest)
    return x
    """,
]  # fmt: skip
READS_NEWER = [
    """
    def inner[T](y: T) -> T:
        return y * NUMBER
    return inner(x)
    """,
    "return x * float(f'{f'{NUMBER}'}')",
]
REFUSED = [
    "self.last = x; return x",
    "del self.last; return x",
    "global SCALE; SCALE = 3.0; return x",
    "global SCALE; del SCALE; return x",
    "import os; return x",
    "from os import path; return x",
    "import torch.nn as here; return x",
    "return self.hparams",
    "self.hparams['scale'] = 2; return x",
    "self.hparams['scale'] += 1; return x",
    "del self.hparams['scale']; return x",
    """
    class Inner:
        pass
    return x
    """,
    """
    match x:
        case int(y):
            return y
    return x
    """,
    """
    try:
        return x.sum(9)
    except IndexError:
        return x
    """,
    """
    try:
        return x.sum(9)
    finally:
        x = -x
    """,
    """
    with torch.no_grad():
        try:
            x = x.sum(9)
        except Exception as error:
            x = -x
    return x
    """,
    """
    try:
        with torch.no_grad():
            x = x.sum(9)
    except Exception:
        pass
    return x
    """,
    """
    async def inner():
        await x
        async with x:
            pass
    return x
    """,
]
newer = pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")


class Base(nn.Module):
    """Holds a number, a list and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.held, self.plain = 2.0, [object()], [2.0]

    def forward(self, x: Tensor) -> Tensor:
        return x


def network(body: str, kind: str = "class Net(Base)") -> PersonalizedModule:
    """A network with a layer whose `forward` is some source text."""
    body = textwrap.indent(textwrap.dedent(body).strip(), 8 * " ")
    names: dict[str, Any] = {
        "__name__": __name__, "torch": torch, "F": F, "Base": Base, "Tensor": Tensor,
        "SCALE": 2.0, "TABLE": [2.0],
    }  # fmt: skip
    exec(f"{kind}:\n    def forward(self, x):\n{body}", names)
    return PersonalizedModule(nn.Sequential(names["Net"]()), nn.Linear(4, 2))


@pytest.mark.parametrize("body", [*READS, *(pytest.param(one, marks=newer) for one in READS_NEWER)])
def test_what_code_reads_is_found_wherever_it_stands(body: str) -> None:
    read = read_by_step(network(body.replace("NUMBER", "SCALE")))
    assert 2.0 in [value for (_, name), value in read.items() if name == "SCALE"]
    read_by_step(network(body.replace("NUMBER", "self.gain")))
    with pytest.raises(UnknownCodeError, match="'TABLE'"):
        read_by_step(network(body.replace("NUMBER", "TABLE")))
    with pytest.raises(UnknownCodeError, match="'held'"):
        read_by_step(network(body.replace("NUMBER", "self.held")))


WRITES = [
    "self.plain[0] = 3.0; return x",
    "self.plain[:] = []; return x",
    "del self.plain[0]; return x",
    "self.plain[0] += 1; return x",
    "plain = self.plain; plain += [3.0]; return x",
    "plain = self.plain; plain *= 2; return x",
    "self.plain.append(3.0); return x",
    "self.plain.clear(); return x",
    "list.append(self.plain, 3.0); return x",
    "change = self.plain.extend; change([3.0]); return x",
    "[self.plain.insert(0, y) for y in (1, 2)]; return x",
    """
    def inner(y):
        y[0] = 3.0
    inner(self.plain)
    return x
    """,
]


@pytest.mark.parametrize("body", WRITES)
def test_code_that_may_write_to_a_list_is_refused(body: str) -> None:
    read_by_step(network("return x * self.plain[0] + len(self.plain)"))
    with pytest.raises(UnknownCodeError, match="may write to it"):
        read_by_step(network(body))


@pytest.mark.parametrize("body", REFUSED)
def test_code_that_may_change_import_or_catch_something_is_refused(body: str) -> None:
    with pytest.raises(UnknownCodeError, match=r"changes, imports or catches|hparams"):
        read_by_step(network(body))


# Each asks for NAME, which no layer has at first.
ASKS = [
    "return getattr(self, 'NAME')(x)",
    "return x if getattr(self, 'NAME', None) is None else self.NAME(x)",
    "return self.NAME(x) if hasattr(self, 'NAME') else x",
    "return getattr(self, 'NAME', self.gain) * x",
    "return getattr(self, 'NAME', x)",
    "return x * (getattr(self, 'NAME', 2) if hasattr(self, 'NAME') else 1)",
]
ASKS_BY_ANOTHER_NAME = [
    "return getattr(self, 'NAME' + str(x.dim()), x)",
    "return getattr(self, f'NAME{x.dim()}', x)",
    "return getattr(self, f'NAME{x.dim()}')(x)",
    "return getattr(self, 'NAME'.lower(), x)",
    "return getattr(self, 'NAME' if x.dim() else 'gain', x)",
    "return getattr(x if x.dim() else self, 'NAME', x)",
    "return getattr(F, 'NAME', x)",
    "return getattr(*(self, 'NAME', x))",
    "return [*map(getattr, [self], ['NAME'])]",
    "return self.other(getattr, self, 'NAME')",
    "ask = getattr; return ask(self, 'NAME')",
    "return getattr(self, 'NAME', [x])",
]
ASKS_FOR_MORE = [
    "return getattr(x, 'absent', x)",
    "self = x; return getattr(self, 'absent', x)",
    "return getattr(self, 'absent', x) + hasattr(x, 'absent')",
    "return x * len([y for y in x if hasattr(self, 'absent')])",
    "return x * getattr(x, 'item')()",
    "return getattr(self, 'held', x)",
    "return x * hasattr(self, 'trainer')",
    "return x * hasattr(self, '__dict__')",
    "return x if getattr(self, 'hparams', None) is None else -x",
]


@pytest.mark.parametrize("body", ASKS)
def test_attributes_that_are_asked_for_by_a_name_that_stands_there(body: str) -> None:
    """Recordings compare which ones a layer has."""
    one = network(body.replace("NAME", "absent"))
    layer: Any = one.get_submodule("backbone.0")
    for held in (2.0, [2.0], nn.Linear(4, 4)):
        read_by_step(one)
        layer.absent = held
        read_by_step(one)
        del layer.absent
    layer.absent = [object()]
    with pytest.raises(UnknownCodeError, match="'absent'"):
        read_by_step(one)


@pytest.mark.parametrize("body", ASKS)
def test_a_function_in_the_place_of_pythons_is_refused(body: str) -> None:
    one = network(body.replace("NAME", "gain"))
    read_by_step(one)
    names = vars(type(one.get_submodule("backbone.0")))["forward"].__globals__
    names["getattr"] = names["hasattr"] = lambda *_: 2.0
    with pytest.raises(UnknownCodeError, match=r"'getattr'|'hasattr'"):
        read_by_step(one)


@pytest.mark.parametrize("body", ASKS_BY_ANOTHER_NAME)
def test_attributes_whose_names_come_from_elsewhere_are_refused(body: str) -> None:
    with pytest.raises(UnknownCodeError, match="'getattr'"):
        read_by_step(network(body.replace("NAME", "gain")))


@pytest.mark.parametrize("body", ASKS_FOR_MORE)
def test_attributes_that_are_asked_for_and_not_known_are_refused(body: str) -> None:
    with pytest.raises(UnknownCodeError, match=r"absent|item|held|trainer|__dict__|hparams"):
        read_by_step(network(body))


OF_HPARAMS = [
    "return x * self.hparams.get('weight', 1.0)",
    "return x * (self.hparams.get('weight') or 2.0)",
    "return x * self.hparams.get('weight', self.gain)",
    "return x * self.hparams.weight",
    "return x * self.hparams['weight']",
]
MORE_OF_HPARAMS = [
    "return x * self.hparams.get('wei' + 'ght'.lower())",
    "return x * self.hparams.get(self.name, 1.0)",
    "return [*map(self.hparams.get, ['weight'])]",
    "return super().forward(self.hparams.get, 'weight')",
    "return x * len(self.hparams)",
    "self.hparams.update(weight=2.0); return x",
    "self.hparams.setdefault('weight', 2.0); return x",
    "return x * (self.hparams in [x])",
]


@pytest.mark.parametrize("body", OF_HPARAMS)
def test_hyperparameters_that_are_numbers(body: str) -> None:
    one = network(body)
    one.hparams["weight"] = 2.0
    read_by_step(one)
    one.hparams["weight"] = [2.0]
    with pytest.raises(UnknownCodeError, match="'weight' of hparams"):
        read_by_step(one)


def test_hyperparameters_that_may_be_missing() -> None:
    for body in OF_HPARAMS[:3]:
        read_by_step(network(body))
    for body in OF_HPARAMS[3:]:
        with pytest.raises(UnknownCodeError, match="'weight' of hparams"):
            read_by_step(network(body))
    read_by_step(network("return x if 'weight' in self.hparams else 2 * x"))


@pytest.mark.parametrize("body", MORE_OF_HPARAMS)
def test_what_else_code_does_with_hyperparameters_is_refused(body: str) -> None:
    with pytest.raises(UnknownCodeError, match="hparams"):
        read_by_step(network(body))


class Settings:
    """Has code of its own."""

    weight = property(lambda self: 2.0)


@pytest.mark.parametrize("name", ["hparams", "log"])
def test_layers_may_hold_what_lightning_has_by_the_same_name(name: str) -> None:
    """It is compared as other attributes are."""
    one = network(f"return x * self.{name}['weight']")
    one.hparams["weight"] = 2.0
    layer: Any = one.get_submodule("backbone.0")
    layer.__dict__[name] = AttributeDict(weight=2.0)
    before = fingerprint(one)
    read_by_step(one)
    layer.__dict__[name]["weight"] = 3.0
    assert fingerprint(one) != before
    layer.__dict__[name] = Settings()
    with pytest.raises(UnknownCodeError, match=name):
        read_by_step(one)


def test_a_list_of_a_layer_of_torch_is_not_written_to() -> None:
    def tanh(body: str) -> PersonalizedModule:
        one = network(body)
        layer: Any = one.get_submodule("backbone.0")
        layer.tanh = nn.Tanh()
        layer.tanh.calls = [0]
        return one

    read_by_step(tanh("return self.tanh(x) * self.tanh.calls[0]"))
    with pytest.raises(UnknownCodeError, match="may write to it"):
        read_by_step(tanh("self.tanh.calls[0] += 1; return self.tanh(x)"))


ABSENT = [
    "return self.absent(x) if self.gain > 5 else x",
    "y = x; return self.absent.weight * y if self.gain > 5 else x",
    "return self.absent @ x if self.gain > 5 else x @ self.absent",
    "return x if self.gain < 5 else F.relu(self.absent)",
    """
    if self.gain > 5:
        for layer in self.absent:
            x = layer(x)
    return super().forward(x)
    """,
]
OF_OTHERS = [
    "return x.absent if self.gain > 5 else x",
    "return (x if x.dim() > 5 else self).absent",
    "return (self if x.dim() > 5 else x).absent",
    "self = x; return self.absent",
    "for self in x:\n    x = self.absent\nreturn x",
    "with x as self:\n    return self.absent",
    "del self; return self.absent",
    "return [self.absent for self in x]",
    "return (lambda self: self.absent)(x)",
    "return self.absent * x.absent",
    "return __class__.read(x, self.absent)",
    "return Net.forward(x, self.absent)",
    "return super(Net, x).forward(self.absent)",
]


@pytest.mark.parametrize("body", ABSENT)
def test_attributes_that_no_layer_has_are_errors_where_code_comes_to_them(body: str) -> None:
    one = network(body)
    read_by_step(one)
    layer: Any = one.get_submodule("backbone.0")
    layer.absent = [object()]  # as a hook may set later
    with pytest.raises(UnknownCodeError, match="'absent'"):
        read_by_step(one)


@pytest.mark.parametrize("body", OF_OTHERS)
def test_attributes_of_what_may_be_no_layer_are_refused(body: str) -> None:
    with pytest.raises(UnknownCodeError, match=r"'absent'|'__class__'"):
        read_by_step(network(body))


def reads_absent(self: Any, x: Tensor) -> Tensor:
    return self.absent  # type: ignore[no-any-return]


class Mixed:
    """May be a base class of samples, too."""

    bent = reads_absent


class Layer(Base):
    bent = reads_absent


class WithProperty(Base):
    bent = property(reads_absent)  # type: ignore[arg-type]


class Static(Base):
    bent = staticmethod(reads_absent)


class OfClass(Base):
    bent = classmethod(reads_absent)


class Handed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return reads_absent(x, self.bent(x))


class MixedIn(Mixed, Base):
    pass


def calls_bent(self: Any, x: Tensor) -> Tensor:
    return self.bent(x) if self.gain > 5 else x


@pytest.mark.parametrize("kind", [Layer, WithProperty])
def test_functions_whose_first_argument_is_a_layer(
    kind: type[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "forward", calls_bent)
    read_by_step(PersonalizedModule(nn.Sequential(kind()), nn.Linear(4, 2)))


@pytest.mark.parametrize("kind", [Static, OfClass, Handed, MixedIn])
def test_functions_whose_first_argument_may_be_another(
    kind: type[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is not Handed:
        monkeypatch.setattr(kind, "forward", calls_bent)
    with pytest.raises(UnknownCodeError, match="'absent'"):
        read_by_step(PersonalizedModule(nn.Sequential(kind()), nn.Linear(4, 2)))


@newer
def test_generic_classes() -> None:
    read_by_step(network("return x * SCALE", "class Net[T](Base)"))
    with pytest.raises(UnknownCodeError, match="'TABLE'"):
        read_by_step(network("return x * TABLE[0]", "class Net[T](Base)"))


def test_an_instruction_that_no_version_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    match {"a": x}:
        case {"a": y}:
            return y
    """
    read_by_step(network(body))
    without = tuple(one for one in instructions.COMPUTING if one != "MATCH_MAPPING")
    monkeypatch.setattr(known_code, "COMPUTING", without)
    with pytest.raises(UnknownCodeError, match="MATCH_MAPPING"):
        read_by_step(network(body))
