"""The user's torch optimizer on the stacked parameters of many clients.

``SGD``, ``Adam`` and others are elementwise: a step on tensors ``(clients, *shape)`` is the step of
each client. So the user's optimizer class runs unmodified, with its parameters and state replaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.records import OptimizerState, SlotStates, one_rate
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, is_expanded, per_client, sqnorm, tmap
from lightning_pfl.engine.in_place import Buffers
from lightning_pfl.engine.optimizer_options import (
    learning_rates,
    stepping_options,
    why_not_elementwise,
)
from lightning_pfl.engine.recording import BY_VALUE, KEPT, NotRecordableError
from lightning_pfl.engine.replay import Recording, record
from lightning_pfl.engine.trace import LIMIT

Recordings = dict[Any, Recording | None]
"""Recorded steps by what they depend on; None where a step can't be recorded."""


def clip(grads: Model, value: float, algorithm: str) -> Model:
    """Clip each client's gradients by ``gradient_clip_val``: by the total norm, or by value."""
    if not grads:
        return grads
    if algorithm == "value":
        return tmap(lambda g: g.clamp(-value, value), grads)
    # The constant of torch.nn.utils.clip_grad_norm_, so that one client has the same bits.
    factor = (value / (sqnorm(grads).sqrt() + 1e-6)).clamp(max=1.0)
    return tmap(lambda g: g * per_client(factor, g), grads)


class ClientOptimizer:
    """A fresh optimizer for every client of a chunk, for one phase.

    Args:
        template: The optimizer that ``configure_optimizers`` returned, with the options of each
            parameter.
        parameter_split: Names of the module's parameters.
        clients: Number of clients in the chunk.
        lr: Learning rate for all groups; None keeps the template's.
        stacked: Whether the optimizer gets ``(clients, *shape)``; otherwise it gets one client's
            ``(*shape)``, as any optimizer can handle.
        schedule: The options of each group of the template at each step; None if they stay.
        recordings: Recorded steps of optimizers with the same options, which are replayed and added
            to; None to record none.
        capturable: Whether all of the state is to be on the device, as in a CUDA graph.

    Attributes:
        names: The parameters that it steps.
    """

    def __init__(
        self,
        template: Optimizer,
        parameter_split: ParameterSplit,
        clients: int,
        lr: float | None = None,
        stacked: bool = True,
        schedule: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        recordings: Recordings | None = None,
        capturable: bool = False,
    ) -> None:
        self.clients, self._schedule = clients, schedule
        self.stacked = stacked
        names = {id(p): name for name, p in parameter_split.module.named_parameters()}
        self._groups: list[list[str]] = []
        self._initial: dict[str, dict[str, Any]] = {}
        # Not the constructor, whose arguments differ between classes (AdamW's defaults don't fit
        # its signature).
        self._optimizer: Optimizer = object.__new__(type(template))
        self._optimizer.__dict__.update(template.__dict__)
        # A learning rate scheduler wraps `step` on the instance, bound to the template.
        self._optimizer.__dict__.pop("step", None)
        self._optimizer.param_groups = []
        merges = why_not_elementwise(template) is None and schedule is None
        # By group the number of the template's whose rate it has.
        self._rated: list[int] = []
        for number, group in enumerate(template.param_groups):
            options = stepping_options(template, group, lr, capturable) | {"params": []}
            if merges:
                # Groups that differ by name alone are stepped as one.
                options.pop("name", None)
            members = [names[id(p)] for p in group["params"] if id(p) in names]
            if merges and options in self._optimizer.param_groups:
                self._groups[self._optimizer.param_groups.index(options)] += members
            else:
                self._optimizer.param_groups.append(options)
                self._groups.append(members)
                self._rated.append(number)
            for p in group["params"]:
                if template.state.get(p):  # Adagrad creates its state at construction
                    self._initial[names[id(p)]] = {
                        k: self._spread(v, p) for k, v in template.state[p].items()
                    }
        self._in_order = tuple(name for group in self._groups for name in group)
        self.names = frozenset(self._in_order)
        self._state: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self._before: dict[tuple[str, int, str], dict[str, Any] | None] = {}
        self._params: dict[str, Tensor] = {}
        self._bound: tuple[Any, ...] = ()
        self._recordings = recordings if merges else None
        self._replay: Callable[..., Any] | None = None

    def _spread(self, value: Any, like: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape != like.shape or not self.stacked:
            return value.clone()
        return value.expand(self.clients, *value.shape).clone()

    @property
    def lr(self) -> float:
        """Return the single learning rate of all groups."""
        return one_rate(learning_rates(self._optimizer))

    def load(self, states: Sequence[SlotStates]) -> None:
        """Begin with the states of the clients, which have taken equally many steps."""
        first = states[0]
        for slot, names in first.items():
            for name, entries in names.items():
                self._state[slot][name] = {
                    key: torch.stack([state[slot][name][key] for state in states])
                    if self.stacked and isinstance(value, Tensor) and value.ndim
                    else _copy(value)
                    for key, value in entries.items()
                }

    def states(self) -> list[SlotStates]:
        """Copy the states of the clients."""
        return [
            {
                slot: {
                    name: {
                        key: value[row].clone()
                        if self.stacked and isinstance(value, Tensor) and value.ndim
                        else _copy(value)
                        for key, value in entries.items()
                    }
                    for name, entries in names.items()
                }
                for slot, names in self._state.items()
            }
            for row in range(self.clients)
        ]

    def place(self, states: SlotStates, rates: Mapping[str, Tensor]) -> None:
        """Take these states for the clients' own, without a copy.

        Args:
            states: The states.
            rates: Learning rates that stay where they are, as of
                :func:`~lightning_pfl.engine.optimizer_options.rates_of`.
        """
        for group, number in zip(self._optimizer.param_groups, self._rated, strict=True):
            group["lr"] = rates.get(str(number), group["lr"])
        self._state = defaultdict(dict)
        for slot, names in states.items():
            self._state[slot] = {name: dict(entries) for name, entries in names.items()}
        self._bound = ()

    def placed(self) -> SlotStates:
        """Return the clients' own states.

        Raises:
            TypeError: If one holds a number, which an operator wouldn't change.
        """
        for names in self._state.values():
            for entries in names.values():
                if not all(isinstance(v, (Tensor, type(None))) for v in entries.values()):
                    raise TypeError("the optimizer's state holds a number")
        return {slot: dict(names) for slot, names in self._state.items()}

    def at(self, step: int) -> None:
        """Take the schedule's options of a step."""
        if self._schedule is not None:
            for group, options in zip(
                self._optimizer.param_groups, self._schedule[step], strict=True
            ):
                group.update({k: v for k, v in options.items() if k not in ("fused", "foreach")})

    def new_tick(self) -> None:
        """Clear the step counters from which the groups of the last tick started."""
        self._before.clear()

    def update(
        self,
        model: Model,
        grads: Model,
        slot: str = "model",
        rows: slice | Tensor | None = None,
        call: int = 0,
    ) -> Model:
        """Take one step.

        Trained leaves are changed in place, or copied first if they are views.

        Args:
            model: Models of the chunk, or of its clients ``rows``.
            grads: Gradients; names without gradient are skipped, as torch skips ``grad=None``.
            slot: Name of the optimizer state, one per model of the method.
            rows: Positions of these clients in the chunk; None for all.
            call: Number of updates of this slot in the tick so far; clients of several groups share
                step counters.
        """
        leaves = {name: model[name] for name in self._in_order if name in grads}
        if rows is None and self._bound == (slot, *map(id, leaves.values())):
            self._step_again(leaves, grads)
            return dict(model)
        leaves = {name: _own(leaf) for name, leaf in leaves.items()}
        self._params = {name: p if self.stacked else p[0] for name, p in leaves.items()}
        self._optimizer.state = defaultdict(dict)
        slow: list[dict[str, Any]] = []
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            here = {name: self._params[name] for name in names if name in leaves}
            states = [self._gather(slot, name, leaves[name], rows, call) for name in here]
            self._optimizer.state.update(zip(here.values(), states, strict=True))
            group["params"] = list(here.values())
            if group.get("fused") and "momentum" in group:
                # torch's fused SGD needs all momentum buffers or none, but a parameter may have its
                # first gradient later than others.
                group["fused"] = sum(map(bool, states)) in (0, len(here))
                slow += [] if group["fused"] else [group]
        self._step(leaves, grads)
        for group in slow:
            group["fused"] = True
        for name, param in self._params.items():
            self._scatter(slot, name, param, rows)
        # The next step of the same tensors finds everything in place.
        self._bound = (slot, *map(id, leaves.values())) if rows is None else ()
        self._kept, self._replay = leaves, None
        return {**model, **leaves}

    def _step(self, leaves: Model, grads: Model) -> None:
        self._plain_step(self._ready(leaves, grads))

    def _step_again(self, leaves: Model, grads: Model) -> None:
        """Step the parameters of the last step, whose operators may be recorded."""
        ready = self._ready(leaves, grads)
        if self._replay is not None:
            self._replay(*ready, *self._held)
        elif self._recordings is None:
            self._plain_step(ready)
        else:
            self._record(ready, self._recordings)

    def _ready(self, leaves: Model, grads: Model) -> list[Tensor]:
        """Return the gradients in the order of the parameters, and in their memory layout."""
        ready = []
        for name in self._params:
            grad = grads[name]
            if grad.is_sparse:
                raise ValueError(
                    f"Expected dense gradients, but that of {name!r} is sparse. Use sparse=False, "
                    "in torch.nn.functional.embedding too."
                )
            # torch's fused CPU kernels need it.
            grad = grad if grad.stride() == leaves[name].stride() else grad.contiguous()
            ready.append(grad if self.stacked else grad[0])
        return ready

    def _plain_step(self, ready: Sequence[Tensor]) -> None:
        for param, grad in zip(self._params.values(), ready, strict=True):
            param.grad = grad
        self._optimizer.step()
        for param in self._params.values():
            param.grad = None

    def _record(self, ready: list[Tensor], recordings: Recordings) -> None:
        """Step, and take the operators of such a step from its recording, or record them."""
        key, held = self._signature(ready)
        if key is None or (key not in recordings and len(recordings) >= LIMIT):
            self._plain_step(ready)
            return
        if key not in recordings:
            recordings[key] = None
            before = [leaf.clone() for leaf in held]
            try:
                _, recordings[key] = record(
                    lambda: self._plain_step(ready), (), [*ready, *held], Buffers(KEPT)
                )
            except (TypeError, NotRecordableError):  # it reads a number out of its state
                for leaf, old in zip(held, before, strict=True):
                    leaf.copy_(old)
                self._plain_step(ready)
            if any(a is not b for a, b in zip(held, self._signature(ready)[1], strict=True)):
                recordings[key] = None
        elif (recorded := recordings[key]) is None:
            self._plain_step(ready)
        else:
            self._replay, self._held = recorded.replay, held
            self._replay(*ready, *held)

    def _signature(self, ready: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return all that the operators of a step depend on, or None, and what they write to."""
        groups: list[Any] = self._optimizer.param_groups
        members = tuple(len(group["params"]) for group in groups)
        options = [item for group in groups for item in group.items() if item[0] != "params"]
        states = [self._optimizer.state[param] for param in self._params.values()]
        entries = [value for state in states for value in state.values()]
        held = [*self._params.values(), *(v for v in entries if isinstance(v, Tensor))]
        numbers = [value for value in entries if not isinstance(value, Tensor)]
        plain = all(_is_plain(option) for _, option in options)
        if not plain or any(value is not None for value in numbers):
            return None, held
        shapes = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in (*ready, *held))
        kind = type(self._optimizer), members, *options
        return (kind, tuple(map(tuple, states)), shapes), held

    def _gather(
        self, slot: str, name: str, leaf: Tensor, rows: slice | Tensor | None, call: int
    ) -> dict[str, Any]:
        """Return the state of some clients: views or copies, and the shared counters."""
        state = self._state[slot]
        if name not in state:
            state[name] = {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in self._initial.get(name, {}).items()
            }
        entries = state[name]
        if rows is None:
            return dict(entries)
        key = (slot, call, name)
        if key not in self._before:
            counters = {k: _copy(v) for k, v in entries.items() if not _is_stacked(v, leaf)}
            self._before[key] = counters if entries else None
        before = self._before[key]
        if before is None:  # the first step: torch creates the state
            return {}
        counters = {k: _copy(v) for k, v in before.items()}
        return {k: v[rows] for k, v in entries.items() if _is_stacked(v, leaf)} | counters

    def _scatter(self, slot: str, name: str, param: Tensor, rows: slice | Tensor | None) -> None:
        new = self._optimizer.state[param]
        if rows is None:
            self._state[slot][name] = new
            return
        entries = self._state[slot][name]
        for key, value in new.items():
            if not (isinstance(value, Tensor) and value.shape == param.shape and param.ndim > 0):
                entries[key] = value
                continue
            if key not in entries:
                entries[key] = value.new_zeros(self.clients, *value.shape[1:])
            # The first clients' state is a view, which the step has written to.
            if entries[key].data_ptr() != value.data_ptr():
                entries[key][rows] = value


def _is_plain(option: Any) -> bool:
    parts = option if isinstance(option, tuple) else (option,)
    return all(isinstance(part, BY_VALUE) for part in parts)


def _own(leaf: Tensor) -> Tensor:
    """Copy a leaf that all clients share, or whose layout torch's fused kernels don't expect."""
    if not is_expanded(leaf) and leaf.is_contiguous():
        return leaf
    return leaf.clone(memory_format=torch.contiguous_format)


def _is_stacked(value: Any, leaf: Tensor) -> bool:
    return (
        isinstance(value, Tensor) and value.ndim == leaf.ndim and value.shape[1:] == leaf.shape[1:]
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def counters(state: OptimizerState) -> tuple[Any, ...]:
    """Return what clients must have in common to be stepped as one: counts of steps, and names."""
    return tuple(
        (phase, slot, name, key, None if isinstance(value, Tensor) and value.ndim else float(value))
        for phase, slots in state.items()
        for slot, names in slots.items()
        for name, entries in names.items()
        for key, value in entries.items()
    )
