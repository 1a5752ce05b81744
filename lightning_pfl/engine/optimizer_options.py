"""Options of the optimizer that ``configure_optimizers`` returned, as engines need them.

Whether it can step many clients as one and by which kernel, its learning rates, and what recorded
steps of it depend on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.local import Phase
from lightning_pfl.engine.fingerprint import of_object
from lightning_pfl.engine.operators import global_step_hooks

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)
"""Optimizers that update each entry by its own history alone; exact types, without subclasses."""
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Optimizers with a fused kernel, used unless the user chose otherwise."""
FUSED_ON_GPU = FUSED[:3]
"""The same on a GPU: Adagrad's counts of steps, made with the optimizer, are on the host."""
WAITING = (torch.optim.ASGD,)
"""Optimizers that read numbers of their state in each step, for which the host waits for a GPU,
unless they are ``capturable``."""


def check_optimizer(template: Optimizer) -> None:
    """Raise TypeError for LBFGS, and for an optimizer whose ``step`` is replaced on the object."""
    step = vars(template).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise TypeError(
            f"Expected `configure_optimizers` to return an optimizer with the `step` of its class, "
            f"but got {type(template).__name__} with `step` replaced on the object. Write a "
            "subclass instead."
        )
    if isinstance(template, torch.optim.LBFGS):
        raise TypeError(
            "Expected `configure_optimizers` to return an optimizer that steps on given gradients, "
            "but got LBFGS. Use SGD or Adam."
        )


def why_not_elementwise(template: Optimizer) -> str | None:
    """Describe why the optimizer can't run on stacked parameters, or return None."""
    name = type(template).__name__
    if type(template) not in ELEMENTWISE:
        return f"{name} is not known to be elementwise"
    # Hooks get the parameters of many clients as one, of which they may take a norm.
    own = (template._optimizer_step_pre_hooks, template._optimizer_step_post_hooks)
    return f"{name} has step hooks" if any(own) or global_step_hooks() else None


def learning_rates(optimizer: Optimizer | None) -> tuple[float, ...]:
    """Return the distinct learning rates of an optimizer's parameter groups, ascending."""
    groups = optimizer.param_groups if optimizer is not None else ()
    return tuple(sorted({float(group["lr"]) for group in groups}))


def scheduled(phases: tuple[Phase, ...], template: Optimizer) -> tuple[Phase, ...]:
    """Scale the phases' own learning rates as the schedule has scaled the optimizer's.

    Raises:
        ValueError: If the schedule scales parameter groups differently.
    """
    factors = {_factor(group) for group in template.param_groups}
    if factors == {1.0} or all(phase.lr is None for phase in phases):
        return phases
    if len(factors) > 1:
        raise ValueError(
            "Expected a schedule that scales all parameter groups alike, as a phase has one "
            f"learning rate of its own, but got the factors {sorted(factors)}. Leave out the "
            "method's `head_lr` and the like, or use one schedule."
        )
    factor = factors.pop()
    return tuple(
        phase if phase.lr is None else replace(phase, lr=phase.lr * factor) for phase in phases
    )


def _factor(group: Mapping[str, Any]) -> float:
    initial = float(group.get("initial_lr", group["lr"]))
    return float(group["lr"]) / initial if initial else 1.0


def options_of(
    optimizer: Optimizer, lr: float | None, rates: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    """Return all that steps of an optimizer depend on, besides parameters, states and rates.

    Args:
        optimizer: The optimizer that ``configure_optimizers`` returned.
        lr: Learning rate for all groups; None keeps the optimizer's.
        rates: Learning rates that steps read out of tensors; those of other groups count.
    """
    found: list[Any] = [type(optimizer), lr if len(rates) < len(optimizer.param_groups) else None]
    # Groups with one rate may be stepped as one.
    distinct = list(dict.fromkeys(group["lr"] for group in optimizer.param_groups))
    for number, group in enumerate(optimizer.param_groups):
        read = ("params", "lr") if str(number) in rates else ("params",)
        options = ((key, of_object(value)) for key, value in group.items() if key not in read)
        same = distinct.index(group["lr"]) if lr is None else 0
        found.append((same, *options, *map(id, group["params"])))
    return tuple(found)


def changes_rates_alone(schedule: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether a schedule changes no options of an optimizer but its learning rates.

    Args:
        schedule: The options of each group at each step.
    """
    others = [
        [{key: value for key, value in group.items() if key != "lr"} for group in step]
        for step in schedule
    ]
    rates = (group["lr"] for step in schedule for group in step)
    return all(one == others[0] for one in others) and all(type(rate) is float for rate in rates)


def rates_of(optimizer: Optimizer, lr: float | None) -> dict[str, Tensor]:
    """Return learning rates as tensors, by the number of their group, where steps may read them so.

    Fused kernels on a CPU do, with the bits of a number: a schedule then leaves recordings as they
    are.
    """
    return {
        str(number): torch.tensor(group["lr"] if lr is None else lr, dtype=torch.float64)
        for number, group in enumerate(optimizer.param_groups)
        if _fuses(optimizer, group)
        and isinstance(group["lr"], (int, float))
        and all(p.device.type == "cpu" for p in group["params"])
    }


def stepping_options(
    optimizer: Optimizer, group: Mapping[str, Any], lr: float | None, capturable: bool
) -> dict[str, Any]:
    """Return the options with which clients' copies of a group are stepped.

    Args:
        optimizer: The optimizer that ``configure_optimizers`` returned.
        group: One of its groups.
        lr: The learning rate; None keeps the group's.
        capturable: Whether all of the state is to be on the device.
    """
    options = {key: value for key, value in group.items() if key != "params"}
    if lr is not None:
        options["lr"] = lr
    if (fused := _fuses(optimizer, group)) is not None:
        options["fused"] = fused
    elsewhere = any(p.device.type != "cpu" for p in group["params"])
    waits = elsewhere and type(optimizer) in WAITING
    if (capturable or waits) and "capturable" in options:
        options["capturable"] = not options["differentiable"]
    return options


def _fuses(optimizer: Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Whether a fused kernel steps a group, as it does unless the user chose; None without one."""
    elsewhere = any(p.device.type != "cpu" for p in group["params"])
    if type(optimizer) not in (FUSED_ON_GPU if elsewhere else FUSED):
        return None
    if group["fused"] or group["foreach"]:
        return bool(group["fused"])
    return group["fused"] is None and not group["differentiable"]
