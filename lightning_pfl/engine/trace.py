"""When a step or its gradient is recorded, and when its recording is replayed.

In a small step most time goes to the module's code, to autograd and, for many clients, to ``vmap``.
To record takes about as long as three steps.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_pfl.core.recent import Recent
from lightning_pfl.engine.agreement import agree, copy, put_back
from lightning_pfl.engine.epoch import Epoch, Noted
from lightning_pfl.engine.fingerprint import describe, repeats
from lightning_pfl.engine.in_place import Buffers
from lightning_pfl.engine.recording import KEPT, flatten
from lightning_pfl.engine.replay import Function, Recording, record
from lightning_pfl.engine.safety.global_rng import States
from lightning_pfl.engine.steps import NumberReadError, Unread

WARM_UP = 2
"""Calls without recording."""
LIMIT = 256
"""Largest number of recordings; many different batch sizes would fill the memory."""
WAITING = 128
"""Largest number of recordings that wait for their first use while steps are recorded at their
first call: a number or a name that every minibatch has anew would be recorded in each step."""
CONTEXTS = 1024
"""Largest number of settings that are known, of which recordings depend on one each, and of kinds
of steps whose calls are counted."""
CHANGES = 4
"""Recordings of a step that one after another hold in other rounds; then there is one for each."""
AROUND_RECORDING: ContextVar[Callable[[], AbstractContextManager[Any]]] = ContextVar(
    "AROUND_RECORDING", default=nullcontext
)
"""Makes what is around steps that are recorded, or compared with a recording when it is used first:
for a clock that stands still there."""
Recorded = TypeVar("Recorded")
Leaves = list[Tensor]
log = logging.getLogger(__name__)


class Numbers:
    """Numbers for what recordings depend on.

    Those that weren't asked for in a long time are forgotten, as settings may change in each round.

    Attributes:
        made: How many there were so far, which is the next one.
    """

    def __init__(self) -> None:
        self._known = Recent[Any, int](CONTEXTS)
        self.made = 0

    def __getitem__(self, key: Any) -> int:
        if key not in self._known:
            self._known[key] = self.made
            self.made += 1
        return self._known[key]


class Given:
    """A tree of tensors that several calls have in common, so that it is described once."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.leaves = tree, list[Tensor]()
        self._description = describe(tree, self.leaves)
        self._number: int | None = None

    def number(self, known: dict[Any, int]) -> int:
        """Return a number for what recordings depend on, from the numbers that are known."""
        if self._number is None:
            self._number = known.setdefault(self._description, len(known))
        return self._number


def _tree(arg: Any) -> Any:
    return arg.tree if isinstance(arg, Given) else arg


@dataclass
class _Kept(Generic[Recorded]):
    """A recording.

    Attributes:
        recorded: It.
        round: The round in which it was used last.
        noted: In which rounds it holds; None for all.
        before: How many there were before it, each for other rounds.
    """

    recorded: Recorded
    round: int
    noted: Noted | None = None
    before: int = 0


class Repeated(ABC, Generic[Recorded]):
    """Steps that are recorded at their third call, or their first, and replayed from then on.

    A recording is compared with its step when it is used first, so with other arguments than it was
    made with, which a constant in their place doesn't fit, and one of each phase in rounds that
    check.

    Args:
        around: Entered around steps that are recorded or compared.
        epoch: The number of the round, which keys then don't have; None to have it in keys.

    Attributes:
        used: Number of replays.
        recording: Whether a step is being recorded.
        numbered: Whether steps have read the numbers of minibatches, so that recordings depend on
            them, too.
    """

    def __init__(
        self,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        epoch: Epoch | None = None,
    ) -> None:
        self.used, self.recording, self.numbered = 0, False, False
        self._rests = False
        self._around, self._epoch = around, epoch
        # The settings under which there is a recording for each round.
        self._by_round: set[int] = set()
        self._checks, self._at_once, self._before = True, False, 0
        # What the steps of a phase depend on: to compare that in each step takes as long as a step.
        self._contexts = Numbers()
        self._calls = Recent[Any, int](CONTEXTS)
        self._round = 0
        self._recorded: dict[Any, _Kept[Recorded]] = {}
        self._unchecked: set[Any] = set()
        self._checked: set[Any] = set()

    def begin_round(self, check: bool = True, at_once: bool = False) -> None:
        """Begin a round.

        Args:
            check: Whether a recording of each phase is compared with its step in this round.
            at_once: Whether steps may be recorded at their first call, as nothing runs in them that
                could do something else there.
        """
        if self._rests:
            return
        self._checks, self._at_once = check, at_once
        self._before = self._contexts.made if self._round else 0
        self._checked.clear()
        self._round += 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Record and replay nothing inside a ``with`` block, whose steps belong to no round."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def _take(self, key: tuple[Any, ...], function: Function, given: Any, leaves: Leaves) -> Any:
        """Take a step.

        Args:
            key: All that a recording depends on, the number of its phase's settings first.
            function: The step.
            given: What it is given.
            leaves: The tensors of that.
        """
        # Anomaly detection looks for NaN in each gradient as it is computed, and calls whatever
        # stops a recording an error of the backward pass.
        if self._rests or torch.is_anomaly_enabled():
            return self._really(function, given)
        if key[0] in self._by_round and self._epoch is not None:
            key = *key, self._epoch.now()
        kept = self._recorded.get(key)
        if kept is None or not self._holds(kept):
            return self._first_calls(key, function, given, leaves)
        self.used += 1
        kept.round, recorded = self._round, kept.recorded
        if (first := key in self._unchecked) or (self._checks and key[0] not in self._checked):
            self._unchecked.discard(key)
            self._checked.add(key[0])
            with AROUND_RECORDING.get()() if first else nullcontext(), self._around():
                return self._check(recorded, function, given, leaves)
        return self._replayed(recorded, leaves)

    def _holds(self, kept: _Kept[Recorded]) -> bool:
        """Whether a recording holds in this round, whose number it then has."""
        noted = kept.noted
        return noted is None or self._epoch is None or noted.fits(self._epoch.now())

    def _first_calls(
        self, key: tuple[Any, ...], function: Function, given: Any, leaves: Leaves
    ) -> Any:
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        # Settings that are new after the first round may change in each round, as a rate does: then
        # a recording pays for what comes often within one.
        stays = key[0] < self._before or not self._before
        stays &= key[0] not in self._by_round
        at_once = self._at_once and stays and len(self._unchecked) < WAITING
        if (calls <= WARM_UP and not at_once) or not self._has_room():
            return self._really(function, given)
        del self._calls[key]
        self.recording, noted = True, None
        try:
            with AROUND_RECORDING.get()(), self._around(), self._noting(key[0]) as noted:
                recorded, result = self._record(function, given, leaves)
        # Whatever a method, a user's layers or a device raise; a true error recurs.
        except Exception as error:
            if noted is not None and noted.used:
                self._by_round.add(key[0])
                return self._really(function, given)
            if not self.numbered and isinstance(error, NumberReadError):
                self.numbered = True
                return self._really(function, given)
            reason = (str(error).strip().splitlines() or [""])[0]
            self.stop(f"a step can't be recorded ({type(error).__name__}: {reason})")
        else:
            noted = noted if noted is not None and noted.used else None
            before = self._recorded[key].before + 1 if key in self._recorded else 0
            if before > CHANGES:
                self._by_round.add(key[0])
            self._recorded[key] = _Kept(recorded, self._round, noted, before)
            self._unchecked.add(key)
            return result
        finally:
            self.recording = False
        return self._really(function, given)

    def _noting(self, context: int) -> AbstractContextManager[Noted | None]:
        """Note what a step computes with the number of the round, if recordings follow it."""
        epoch = None if context in self._by_round else self._epoch
        return epoch.noting() if epoch is not None and epoch.is_read() else nullcontext()

    def _has_room(self) -> bool:
        """Whether there is room for a recording; one that no round uses any more makes room.

        So one of an optimizer's rate that changes in each round, but none of many sizes that come
        again in each, which would all be recorded again and again.
        """
        if len(self._recorded) < LIMIT:
            return True
        oldest = min(self._recorded, key=lambda key: self._recorded[key].round, default=None)
        if oldest is None or self._recorded[oldest].round >= self._round - 1:
            return False
        del self._recorded[oldest]
        self._unchecked.discard(oldest)
        return True

    @abstractmethod
    def _really(self, function: Function, given: Any) -> Any:
        """Take the step as usual."""

    @abstractmethod
    def _record(self, function: Function, given: Any, leaves: Leaves) -> tuple[Recorded, Any]:
        """Take the step and record it; an error leaves everything as it was."""

    @abstractmethod
    def _replayed(self, recorded: Recorded, leaves: Leaves) -> Any:
        """Replay a recording."""

    @abstractmethod
    def _check(self, recorded: Recorded, function: Function, given: Any, leaves: Leaves) -> Any:
        """Take the step once, compare it with a replay, and stop if they differ."""

    def seen(self, number: int) -> Any:
        """Return a minibatch's number as a step gets it that may be recorded."""
        return number if self.numbered or not self.recording else Unread()

    def kind(self, *numbers: int) -> tuple[int, ...]:
        """Return what recordings depend on of the numbers of a step's minibatches."""
        return numbers if self.numbered else ()

    @abstractmethod
    def stop(self, why: str) -> None:
        """Record and replay such steps no more."""


class Traces(Repeated[Recording]):
    """Recorded gradients, and other functions of trees.

    Args:
        enabled: Whether steps may be recorded; False if the module's step may read anything but its
            arguments and settings.
        around: As of :class:`Repeated`.
        epoch: As of :class:`Repeated`.

    Attributes:
        enabled: Whether they still may.
    """

    def __init__(
        self,
        enabled: bool,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        epoch: Epoch | None = None,
    ) -> None:
        super().__init__(around, epoch)
        self.enabled = enabled
        # Not what is large: an evaluation's would stay in memory that a step needs.
        self._buffers = Buffers(KEPT)
        self._givens: dict[Any, int] = {}
        self._context: int | None = None

    def enter(self, context: Any) -> None:
        """Begin a phase.

        Args:
            context: Dependencies of its steps besides their arguments; None to record nothing.
        """
        self._context = None if context is None else self._contexts[context]

    def run(self, function: Function, *args: Any, kind: Any = ()) -> Any:
        """Return ``function(*args)``, replayed if it was recorded before.

        Args:
            function: Returns a tree of tensors; must only read ``args`` and constants.
            args: Trees of tensors, or :class:`Given` ones.
            kind: What it depends on besides.
        """
        if not self.enabled or self._context is None:
            return self._really(function, args)
        leaves: Leaves = []
        signature: list[Any] = [self._context, kind]
        try:
            for arg in args:
                if isinstance(arg, Given):
                    leaves += arg.leaves
                    signature.append(arg.number(self._givens))
                else:
                    signature.append(describe(arg, leaves))
        except TypeError:  # a minibatch with an object of the user's
            return self._really(function, args)
        # Operators in place, as replays call them, don't differentiate.
        if any(leaf.requires_grad for leaf in leaves):
            return self._really(function, args)
        return self._take((*signature, repeats(leaves)), function, args, leaves)

    def _really(self, function: Function, given: Any) -> Any:
        return function(*map(_tree, given))

    def _record(self, function: Function, given: Any, leaves: Leaves) -> tuple[Recording, Any]:
        before, generators = [copy(leaf) for leaf in leaves], States()
        try:
            args = tuple(map(_tree, given))
            result, recording = record(function, args, leaves, self._buffers)
        except Exception:
            put_back(leaves, before)
            generators.restore()
            raise
        return recording, result

    def _replayed(self, recorded: Recording, leaves: Leaves) -> Any:
        return recorded(leaves)

    def _check(self, recorded: Recording, function: Function, given: Any, leaves: Leaves) -> Any:
        replayed: Leaves = []
        real: Leaves = []
        generators = States()
        flatten(recorded([copy(leaf) for leaf in leaves]), replayed)
        generators.restore()  # so that the step draws the same
        result = self._really(function, given)
        flatten(result, real)
        if not agree(replayed, real, leaves):
            self.stop(
                "a step differs from its recording, so it reads something besides its batch, its "
                "parameters and its settings"
            )
        return result

    def stop(self, why: str) -> None:
        """Record and replay nothing any more."""
        self.enabled = False
        log.info("Steps are no longer recorded: %s.", why)
