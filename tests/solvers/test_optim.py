"""A torch optimizer as a pure function equals the same optimizer used as usual."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from lightning_pfl.core.tree import Tree
from lightning_pfl.solvers.optim import functional_step

FACTORIES: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.5),
    "momentum": lambda p: SGD(p, lr=1.0, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "adam": lambda p: Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3),
    "amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_steps_equal_those_of_the_optimizer_itself(
    make: Callable[[Iterable[Tensor]], Optimizer],
) -> None:
    start = {"w": torch.randn(2, 3, dtype=torch.float64), "b": torch.randn((), dtype=torch.float64)}
    usual = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    optimizer = make(usual.values())
    params: dict[str, Tensor] = dict(start)
    state: Tree = {}
    for _ in range(4):
        grads = {name: torch.randn_like(leaf) for name, leaf in start.items()}
        before: dict[str, Any] = {name: leaf.clone() for name, leaf in params.items()}
        new, state = functional_step(make, params, grads, state)
        assert all(torch.equal(params[name], before[name]) for name in params)
        params = new
        for name, leaf in usual.items():
            leaf.grad = grads[name]
        optimizer.step()
    assert all(torch.equal(params[name], usual[name]) for name in params)
    assert not any(leaf.requires_grad for leaf in params.values())
