"""Whole local steps, of one client or of many, recorded and replayed.

A gradient alone leaves the rest of a step in Python: the method's arithmetic on whole models, the
optimizer, the dicts between them. Where a method says that its step computes from its arguments and
its settings (:func:`~lightning_pfl.methods.base.recordable`), all of it is recorded as one program.

The state is in *registers* meanwhile: tensors that all clients, or all chunks of them, use one
after another, so that a program finds everything at the same place (``in_place.py``). A state is
copied there when its phase begins, and what has changed is copied out when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.randomness import seed_torch
from lightning_pfl.core.tree import Path, Tree, is_expanded
from lightning_pfl.engine.agreement import copy, put_back
from lightning_pfl.engine.checks import is_ours
from lightning_pfl.engine.epoch import Epoch
from lightning_pfl.engine.in_place import Buffers, compile_in_place
from lightning_pfl.engine.recording import BY_VALUE, Recorder, rebuild
from lightning_pfl.engine.registers import Layout, Step, StepsInPlace, fill, tensors_of
from lightning_pfl.methods.base import Method

Logged = list[tuple[Any, ...]]
"""What a step logs: arguments of :meth:`~lightning_pfl.engine.client_logs.ClientLogs.add`."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    """A recorded step.

    Attributes:
        replay: Runs it on the leaves of the minibatches, and returns what it logs.
        after: The layout of the state after it.
        changes: Paths of the registers that it changes.
    """

    replay: Callable[..., Logged]
    after: Layout
    changes: frozenset[Path]


def recorded_settings(method: Method) -> dict[str, Any]:
    """Return the settings that a method's recordable step reads.

    Of a user's method all numbers and strings count, also those that ``recordable`` doesn't name.
    """
    names = getattr(type(method).client_step, "recorded_settings", ())
    found = {name: getattr(method, name) for name in names}
    if is_ours(method):
        return found
    return {name: one for name, one in vars(method).items() if isinstance(one, BY_VALUE)} | found


class WholeSteps(StepsInPlace[Program]):
    """Runs the steps of one client after another, and replays those that are known.

    Or of one chunk of clients after another: then a client stands for a chunk below.
    """

    def __init__(
        self,
        expanded: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        epoch: Epoch | None = None,
    ) -> None:
        super().__init__(expanded, around, epoch)
        self._buffers = Buffers()
        self._recorder: Recorder | None = None
        # By register what clients of a round share and no step has changed there.
        self._shared: dict[int, Tensor] = {}

    def begin_round(self, check: bool = True, at_once: bool = False) -> None:
        """Begin a round; see :class:`~lightning_pfl.engine.trace.Repeated`."""
        super().begin_round(check, at_once)
        self._shared.clear()

    # --- a client's phase ---

    def load(self, context: int, state: Tree) -> None:
        """Begin a phase: copy a client's state to the registers."""
        self._context, self._given = context, state
        self._written, self._python = set[Path](), False
        self._layout = layout = self._registers.layout_of(state)
        pairs = [
            (register, leaf)
            for register, (_, leaf) in zip(layout.registers, tensors_of(state), strict=True)
            if not _is_same(self._shared.get(id(register)), leaf)
        ]
        fill(pairs, layout)
        self._shared |= {id(register): leaf for register, leaf in pairs if is_expanded(leaf)}

    def unload(self) -> Tree:
        """End a phase: return the state, of which what hasn't changed is as it was given.

        What has changed is in registers, until the next client's phase begins.
        """
        given = dict(tensors_of(self._given))

        def end(path: Path, register: Tensor) -> Tensor:
            old = given.get(path)
            # A step in Python may write to any of them.
            same = path not in self._written and (not self._python or _equal(register, old))
            if old is not None and same:
                return old
            self._shared.pop(id(register), None)
            return register

        leaves = map(end, self._layout.paths, self._layout.registers)
        new: Tree = rebuild(self._layout.tree, leaves)
        return new

    def seed(self, key: Tensor, number: int) -> None:
        """Seed torch's generators for what a step draws next without keys, as replays do then.

        Args:
            key: The key of the step's random numbers, int64 scalar: one of the step's arguments.
            number: The same on the host.
        """
        seed_torch(number & (2**63 - 1))
        if self._recorder is not None:
            self._recorder.seeds(key)

    # --- how a step is taken ---

    def _replayed(self, recorded: Program, leaves: list[Tensor]) -> Logged:
        logged = recorded.replay(*leaves)
        self._layout = recorded.after
        self._written |= recorded.changes
        return logged

    def _end(self, new: Tree, logged: Any) -> Any:
        self._python = True
        return super()._end(new, logged)

    def _record(self, function: Step, given: Any, leaves: list[Tensor]) -> tuple[Program, Logged]:
        registers = self._layout.registers
        before = [copy(register) for register in registers]
        try:
            return self._recorded_step(function, given, leaves)
        except Exception:
            put_back(registers, before)
            raise

    def _recorded_step(
        self, function: Step, given: Any, leaves: list[Tensor]
    ) -> tuple[Program, Logged]:
        """Take a step, and write the program that repeats it."""
        before = self._layout
        self._recorder = recorder = Recorder([*before.registers, *leaves])
        try:
            with recorder.recording():
                new, logged = function(self.state(), given)
        finally:
            self._recorder = None
        after = self._registers.layout_of(new)
        placed = dict(zip(recorder.arguments, before.registers, strict=False))
        targets = [
            (recorder.name(leaf), register)
            for (_, leaf), register in zip(tensors_of(new), after.registers, strict=True)
        ]
        if any(
            self._registers.is_shared(one) and placed.get(name) is not one for name, one in targets
        ):
            raise TypeError("it makes a leaf that clients share")
        replay = compile_in_place(recorder, placed, targets, logged, self._buffers)
        written = recorder.written()
        changes = {p for name, p in zip(placed, before.paths, strict=True) if name in written}
        ends = zip(targets, after.paths, strict=True)
        changes |= {path for (name, one), path in ends if placed.get(name) is not one}
        return Program(replay, after, frozenset(changes)), self._end(new, logged)

    def leave_out(self, why: str) -> None:
        """Say why steps aren't recorded."""
        log.info("Whole steps are no longer recorded: %s.", why)


def _equal(register: Tensor, old: Tensor | None) -> bool:
    if old is None or old is register:
        return old is register
    return old.shape == register.shape and torch.equal(register, old)


def _is_same(known: Tensor | None, leaf: Tensor) -> bool:
    """Whether a leaf that clients share is one that is known."""
    return known is not None and is_expanded(leaf) and known.data_ptr() == leaf.data_ptr()
