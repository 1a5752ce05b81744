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
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.tree import Path, Tree, is_expanded
from lightning_pfl.engine import trace
from lightning_pfl.engine.in_place import Buffers, compile_in_place
from lightning_pfl.engine.recording import Recorder, flatten, rebuild
from lightning_pfl.engine.registers import Layout, Registers, fill, memory_of, tensors_of
from lightning_pfl.engine.trace import Numbers, agree, copy, describe
from lightning_pfl.methods.base import Method

Logged = list[tuple[Any, ...]]
"""What a step logs: arguments of :meth:`~lightning_pfl.engine.logs.ClientLogs.add`."""
Step = Callable[[Tree], tuple[Tree, Logged]]
"""A step of a state on some minibatches; returns the new state and what it logs."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    """A recorded step.

    Attributes:
        replay: Runs it on the leaves of the minibatches.
        after: The layout of the state after it.
        changes: Paths of the registers that it changes.
        logged: What it logs, with tensors to be replaced.
    """

    replay: Callable[..., tuple[Tensor, ...]]
    after: Layout
    changes: frozenset[Path]
    logged: Any


def recorded_settings(method: Method) -> dict[str, Any]:
    """Return the settings that a method's recordable step reads."""
    names = getattr(type(method).client_step, "recorded_settings", ())
    return {name: getattr(method, name) for name in names}


class WholeSteps:
    """Runs the steps of one client after another, and replays those that are known.

    Or of one chunk of clients after another: then a client stands for a chunk below.

    Args:
        expanded: Whether a leaf that all clients of a chunk share has a register that they share.

    Attributes:
        used: Number of replays.
        recording: Whether a step is being recorded.
    """

    def __init__(self, expanded: bool = False) -> None:
        self.used, self.recording = 0, False
        self._checks = True
        self._registers = Registers(expanded)
        self._contexts = Numbers()
        self._calls: dict[Any, int] = {}
        self._programs: dict[Any, Program] = {}
        self._refused: set[int] = set()
        self._unchecked: set[Any] = set()
        self._checked: set[int] = set()
        self._buffers = Buffers()
        # By register what clients of a round share and no step has changed there.
        self._shared: dict[int, Tensor] = {}

    def begin_round(self, check: bool = True) -> None:
        """Begin a round.

        Args:
            check: Whether a program of each phase is compared with its step in this round.
        """
        self._checks = check
        self._checked.clear()
        self._shared.clear()

    def context(self, dependencies: Any) -> int | None:
        """Return a number for what steps depend on besides state and minibatches.

        None where steps can't be recorded.
        """
        known = self._contexts[dependencies]
        return None if known in self._refused else known

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

    def step(self, function: Step, minibatches: list[Any], kind: Any = ()) -> Logged:
        """Take a step, and return what it logs.

        Args:
            function: The step; may change leaves of the state in place.
            minibatches: Those that it takes.
            kind: What it depends on besides; None for a step that isn't recorded.
        """
        leaves: list[Tensor] = []
        if kind is None or self._context in self._refused:
            return self._really(function)
        try:
            key = self._context, kind, self._layout.number, describe(minibatches, leaves)
        except TypeError:  # a minibatch with an object of the user's
            return self._really(function)
        program = self._programs.get(key)
        if program is None:
            return self._first_calls(key, function, leaves)
        self.used += 1
        due = self._checks and self._context not in self._checked
        if due or key in self._unchecked:
            return self._check(key, program, function, leaves)
        return self._replayed(program, leaves)

    # --- how a step is taken ---

    def _replayed(self, program: Program, leaves: list[Tensor]) -> Logged:
        found = program.replay(*leaves)
        self._layout = program.after
        self._written |= program.changes
        logged: Logged = rebuild(program.logged, iter(found))
        return logged

    def _really(self, function: Step) -> Logged:
        """Run the step in Python, on the registers."""
        before = self._layout
        new, logged = function(rebuild(before.tree, iter(before.registers)))
        return self._end(new, self._registers.layout_of(new), logged)

    def _end(self, new: Tree, after: Layout, logged: Logged) -> Logged:
        """Copy to the registers what a step in Python has returned, and return what it logs."""
        memory = {memory_of(register) for register in self._layout.registers}
        values: list[Tensor] = []
        flatten(logged, values)
        # What is logged stays when registers change.
        kept = [value.clone() if memory_of(value) in memory else value for value in values]
        ends = zip(after.registers, (leaf for _, leaf in tensors_of(new)), strict=True)
        fill(ends, after)
        self._layout, self._python = after, True
        own: Logged = rebuild(logged, iter(kept))
        return own

    def _first_calls(self, key: Any, function: Step, leaves: list[Tensor]) -> Logged:
        """Run the step, and record it if it was taken often enough."""
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls <= trace.WARM_UP or not trace.LIMIT:
            return self._really(function)
        del self._calls[key]
        if len(self._programs) >= trace.LIMIT:  # an optimizer's rate that changes in each round
            self._programs.pop(next(iter(self._programs)))
        layout, before = self._layout, [copy(register) for register in self._layout.registers]
        try:
            program, logged = self._record(function, leaves)
        # Whatever a method or a user's layers raise under a dispatch mode; a true error recurs.
        except Exception as error:
            self._refuse(f"a step can't be recorded ({type(error).__name__}: {error})")
            for register, old in zip(layout.registers, before, strict=True):
                if old is not register:
                    register.copy_(old)
            return self._really(function)
        self._programs[key] = program
        # To be checked with other arguments, which a constant in their place doesn't fit.
        self._unchecked.add(key)
        return logged

    def _record(self, function: Step, leaves: list[Tensor]) -> tuple[Program, Logged]:
        """Take a step, and write the program that repeats it."""
        before = self._layout
        recorder = Recorder([*before.registers, *leaves])
        self.recording = True
        try:
            with recorder.recording():
                new, logged = function(rebuild(before.tree, iter(before.registers)))
        finally:
            self.recording = False
        values: list[Tensor] = []
        flatten(logged, values)
        after = self._registers.layout_of(new)
        given = dict(zip(recorder.arguments, before.registers, strict=False))
        targets = [
            (recorder.name(leaf), register)
            for (_, leaf), register in zip(tensors_of(new), after.registers, strict=True)
        ]
        results = [recorder.name(value) for value in values]
        if any(
            self._registers.is_shared(one) and given.get(name) is not one for name, one in targets
        ):
            raise TypeError("it makes a leaf that clients share")
        replay = compile_in_place(recorder, given, targets, results, self._buffers)
        written = recorder.written()
        changes = {p for name, p in zip(given, before.paths, strict=True) if name in written}
        ends = zip(targets, after.paths, strict=True)
        changes |= {path for (name, one), path in ends if given.get(name) is not one}
        logged = self._end(new, after, logged)
        hollow = rebuild(logged, repeat(torch.empty(0)))
        return Program(replay, after, frozenset(changes), hollow), logged

    def _check(self, key: Any, program: Program, function: Step, leaves: list[Tensor]) -> Logged:
        """Compare a program with the step, which counts.

        Each is checked when it is used first, and one of each phase in a round that checks.
        """
        before = self._layout
        given = [*before.registers, *leaves]
        # The step itself, on copies: where it agrees, the replay counts.
        new, logged = function(rebuild(before.tree, iter([copy(r) for r in before.registers])))
        real: list[Tensor] = []
        flatten(logged, real)
        real += [leaf for _, leaf in tensors_of(new)]
        replayed: list[Tensor] = []
        found = self._replayed(program, leaves)
        flatten(found, replayed)
        replayed += self._layout.registers
        self._unchecked.discard(key)
        self._checked.add(self._context)
        if self._layout is self._registers.layout_of(new) and agree(replayed, real, given):
            return found
        self._refuse(
            "a step differs from its recording, so it reads something besides its batch, its "
            "state and its settings"
        )
        return self._end(new, self._registers.layout_of(new), logged)

    def _refuse(self, why: str) -> None:
        self._refused.add(self._context)
        log.info("Whole steps are no longer recorded: %s.", why)


def _equal(register: Tensor, old: Tensor | None) -> bool:
    if old is None or old is register:
        return old is register
    return old.shape == register.shape and torch.equal(register, old)


def _is_same(known: Tensor | None, leaf: Tensor) -> bool:
    """Whether a leaf that clients share is one that is known."""
    return known is not None and is_expanded(leaf) and known.data_ptr() == leaf.data_ptr()
