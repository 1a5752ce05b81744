"""Functions that call operators of torch with little of Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pfl.engine.keyed.mode import KeyedRandomness
from lightning_pfl.engine.large_operators import LargePooling
from lightning_pfl.engine.operators import OperatorMode, fastest_call
from lightning_pfl.engine.recording import Recorder
from lightning_pfl.engine.vectorized.kernels import FastKernels

aten = torch.ops.aten
MANY = 2, 3


class Noting(OperatorMode):
    """Notes operators and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def noted(call: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    with Noting() as mode:
        call(*args, **kwargs)
    return [(func, list(map(id, args))[:1], sorted(kwargs)) for func, args, kwargs in mode.found]


def sgd(**options: Any) -> tuple[Any, Any, Any]:
    numbers = {"weight_decay": 0.0, "momentum": 0.5, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    lists = [[torch.ones(MANY)] for _ in range(3)]
    return aten._fused_sgd_.default, lists, {**numbers, **flags, **options}


CALLED: list[tuple[Any, Any, Any]] = [
    (aten.as_strided.default, (torch.ones(MANY), [3, 2], [1, 3]), {}),
    (aten.add_.Tensor, (torch.ones(MANY), torch.ones(MANY)), {"alpha": 2}),
    (aten.add.out, (torch.ones(MANY), torch.ones(MANY)), {"out": torch.ones(MANY)}),
    (aten.mean.default, (torch.ones(MANY),), {}),
    (aten.sum.IntList_out, (torch.ones(MANY), [0], True), {"out": torch.ones(1, 3)}),
    sgd(),
]


@pytest.mark.quick
@pytest.mark.parametrize(("operator", "args", "kwargs"), CALLED, ids=lambda one: str(one)[5:12])
def test_a_function_of_torchs_own_calls_the_operator_alone(
    operator: Any, args: Any, kwargs: Any
) -> None:
    found = fastest_call(operator, args, kwargs)
    assert found is not operator._op
    assert noted(found, args, kwargs) == noted(operator, args, kwargs)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        # `torch.add` takes a number for a tensor without dimensions.
        (aten.add.Scalar, (torch.ones(MANY), 2.0)),
        # `torch.split` is written in Python.
        (aten.split.Tensor, (torch.ones(MANY), 1)),
        # torch has no function of this name.
        (aten._to_copy.default, (torch.ones(MANY),)),
    ],
    ids=["add", "split", "_to_copy"],
)
def test_an_operator_that_no_function_calls_alone_is_called_itself(
    operator: Any, args: Any
) -> None:
    assert fastest_call(operator, args, {}) is operator._op


@pytest.mark.parametrize(("first", "dtype"), [(0, torch.float32), (1, torch.float64)])
def test_each_kind_of_arguments_is_asked_for(first: int, dtype: torch.dtype) -> None:
    # `torch.eq` calls another operator for a tensor than for a number.
    x, operator = torch.ones(MANY, dtype=dtype), aten.eq.Scalar
    number, tensor = (x, 2.0), (x, torch.tensor(2.0))
    for args in (number, tensor)[:: 1 - 2 * first]:
        found = fastest_call(operator, args, {})
        assert (found is operator._op) == (args is tensor)


def test_an_operator_is_only_asked_for() -> None:
    # Its argument keeps its numbers, and no random number is drawn.
    x, state = torch.ones(MANY), torch.get_rng_state()
    fastest_call(aten.add_.Tensor, (x, x), {})
    fastest_call(aten.bernoulli_.float, (x, 0.5), {})
    assert torch.equal(x, torch.ones(MANY))
    assert torch.equal(torch.get_rng_state(), state)


# --- functions of torch that a user has replaced --------------------------------------------------


def drawn() -> KeyedRandomness:
    return KeyedRandomness(torch.tensor(5))


@pytest.mark.parametrize(
    "mode", [FastKernels, LargePooling, drawn, lambda: Recorder([]).recording()]
)
def test_a_function_around_one_of_torchs_does_its_part_once(
    mode: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which calls itself by its name, that is the user's, where there is a mode."""
    own = F.cross_entropy

    @wraps(own)
    def doubled(logits: Tensor, labels: Tensor) -> Tensor:
        return own(2 * logits, labels)

    monkeypatch.setattr(F, "cross_entropy", doubled)
    logits, labels = torch.tensor([[1.0, 3.0, -2.0]]), torch.tensor([0])
    with mode(), LargePooling():
        found = F.cross_entropy(logits, labels)
    expected = (2 * logits).logsumexp(1) - 2.0
    torch.testing.assert_close(found, expected.squeeze())


def test_dropout_within_a_function_around_it_is_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    own, ones = F.dropout, torch.ones(20)
    with drawn():
        kept = F.dropout(ones, 0.5)
    monkeypatch.setattr(F, "dropout", lambda x, p: own(3 * x, p))
    with drawn():
        assert torch.equal(F.dropout(ones, 0.5), 3 * kept)


def test_a_function_of_torchs_in_the_place_of_another_is_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.tensor([-1.0])
    expected = 1.0507009873554805 * 1.6732632423543772 * (x.exp() - 1)  # SELU
    monkeypatch.setattr(F, "elu", F.selu)
    with LargePooling():
        torch.testing.assert_close(F.selu(x), expected)
        torch.testing.assert_close(F.elu(x), expected)
