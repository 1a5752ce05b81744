"""Which optimizers of a user's are refused, and which can't step many clients as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_pfl.engine.optimizer_options import check_optimizer, why_not_elementwise


def test_lbfgs_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Expected `configure_optimizers` to return an optimizer that .* got LBFGS"
    ):
        check_optimizer(torch.optim.LBFGS(nn.Linear(1, 1).parameters()))


def test_a_subclass_may_do_anything() -> None:
    class Mine(torch.optim.SGD):
        pass

    parameters = list(nn.Linear(1, 1).parameters())
    assert why_not_elementwise(torch.optim.SGD(parameters, lr=0.1)) is None
    reason = why_not_elementwise(Mine(parameters, lr=0.1))
    assert reason == "Mine is not known to be elementwise"


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_may_do_anything(hook: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    getattr(optimizer, hook)(lambda *_: None)
    assert why_not_elementwise(optimizer) == "SGD has step hooks"


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_step_hooks_of_all_optimizers_may_do_anything(register: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    handle = register(lambda *_: None)
    try:
        assert why_not_elementwise(optimizer) == "SGD has step hooks"
    finally:
        handle.remove()
    assert why_not_elementwise(optimizer) is None


def test_a_step_of_its_own_is_refused() -> None:
    """Clients' optimizers are made of the class, which would do something else."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # torch's own wrapper is no obstacle
    check_optimizer(optimizer)
    client_state: Any = optimizer
    client_state.step = lambda closure=None: None
    with pytest.raises(TypeError, match=r"got SGD with `step` replaced on the object. Write a sub"):
        check_optimizer(optimizer)
