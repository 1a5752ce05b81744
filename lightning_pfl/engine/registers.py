"""Registers: tensors in which the states of one client, or chunk of clients, after another are.

A step that is repeated as it was recorded finds everything that it reads and writes at the same
place. A state is copied to its registers when its phase begins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.tree import Path, Tree, is_expanded, items
from lightning_pfl.engine.agreement import agree, copy
from lightning_pfl.engine.epoch import Epoch
from lightning_pfl.engine.fingerprint import describe, repeats
from lightning_pfl.engine.recording import flatten, rebuild
from lightning_pfl.engine.trace import Recorded, Repeated

Step = Callable[[Tree, Any], tuple[Tree, Any]]
"""A step: of a state and minibatches; returns the new state and a tree of tensors to log."""


@dataclass(frozen=True)
class Layout:
    """The entries of a state, and their registers.

    Attributes:
        number: Another one for each layout.
        tree: The state, whose leaves are registers.
        registers: These leaves.
        paths: Their paths.
        memory: Addresses of their memory.
    """

    number: int
    tree: Tree
    registers: list[Tensor]
    paths: list[Path]
    memory: frozenset[int]


class Registers:
    """Makes registers for leaves, one for each path, shape and type.

    Args:
        expanded: Whether a leaf that all clients of a chunk share has a register that they share.
    """

    def __init__(self, expanded: bool) -> None:
        self._expanded = expanded
        self._registers: dict[Any, Tensor] = {}
        self._layouts: dict[Any, Layout] = {}

    def layout_of(self, state: Tree) -> Layout:
        """Return the layout of a state, with registers for its leaves."""
        leaves: list[Tensor] = []
        # The structure has what isn't a tensor, too, such as an optimizer's momentum of None.
        structure = flatten(state, leaves)
        kinds = tuple([(one.shape, one.dtype, one.device, self.is_shared(one)) for one in leaves])
        found = self._layouts.get((structure, kinds))
        if found is None:
            paths = [path for path, _ in tensors_of(state)]
            each = zip(paths, kinds, leaves, strict=True)
            registers = [self._register(path, kind, leaf) for path, kind, leaf in each]
            tree, memory = rebuild(state, iter(registers)), frozenset(map(memory_of, registers))
            found = Layout(len(self._layouts), tree, registers, paths, memory)
            self._layouts[structure, kinds] = found
        return found

    def _register(self, path: Path, kind: tuple[Any, ...], leaf: Tensor) -> Tensor:
        if (path, kind) not in self._registers:
            self._registers[path, kind] = register_for(leaf, self.is_shared(leaf))
        return self._registers[path, kind]

    def is_shared(self, leaf: Tensor) -> bool:
        """Whether clients share a leaf, and so its register."""
        return self._expanded and is_expanded(leaf)


class StepsInPlace(Repeated[Recorded]):
    """Takes the steps of one client, or chunk of clients, after another on registers.

    Args:
        expanded: As of :class:`Registers`.
        around: As of :class:`~lightning_pfl.engine.trace.Repeated`.
        epoch: As of :class:`~lightning_pfl.engine.trace.Repeated`.
    """

    _context: int
    _layout: Layout

    def __init__(
        self,
        expanded: bool,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        epoch: Epoch | None = None,
    ) -> None:
        super().__init__(around, epoch)
        self._registers = Registers(expanded)
        self._refused: set[int] = set()

    def context(self, dependencies: Any) -> int | None:
        """Return a number for what steps depend on besides state and minibatches.

        None where steps can't be recorded.
        """
        number = self._contexts[dependencies]
        return None if number in self._refused else number

    def step(self, function: Step, minibatches: Any, kind: Any = ()) -> Any:
        """Take a step, and return what it logs.

        Args:
            function: The step; may change leaves of the state in place.
            minibatches: Those that it takes.
            kind: What it depends on besides; None for a step that isn't recorded.
        """
        leaves: list[Tensor] = []
        if kind is None or self._context in self._refused:
            return self._really(function, minibatches)
        try:
            described = describe(minibatches, leaves)
        except TypeError:  # a minibatch with an object of the user's
            return self._really(function, minibatches)
        # Operators in place, as replays call them, don't differentiate.
        if any(leaf.requires_grad for leaf in leaves):
            return self._really(function, minibatches)
        key = self._context, kind, self._layout.number, described, repeats(leaves)
        return self._take(key, function, minibatches, leaves)

    def state(self, each: Callable[[Tensor], Tensor] | None = None) -> Tree:
        """Return the registers, or a function of each, in new dicts, which steps change."""
        leaves = self._layout.registers
        state: Tree = rebuild(
            self._layout.tree, iter(leaves) if each is None else map(each, leaves)
        )
        return state

    def _really(self, function: Step, given: Any) -> Any:
        return self._end(*function(self.state(), given))

    def _end(self, new: Tree, logged: Any) -> Any:
        """Copy to the registers what a step in Python has returned, and return what it logs."""
        memory = self._layout.memory
        values: list[Tensor] = []
        flatten(logged, values)
        # What is logged stays when registers change.
        kept = [value.clone() if memory_of(value) in memory else value for value in values]
        self._layout = self._registers.layout_of(new)
        ends = zip(self._layout.registers, (leaf for _, leaf in tensors_of(new)), strict=True)
        fill(ends, self._layout)
        return rebuild(logged, iter(kept))

    def _check(self, recorded: Recorded, function: Step, given: Any, leaves: list[Tensor]) -> Any:
        # A step may write to its minibatches, as `x.mul_(2)` does.
        leaves = [copy(leaf) for leaf in leaves]
        inputs = [*self._layout.registers, *leaves]
        # The step itself, on copies: where it agrees, the replay counts.
        new, logged = function(self.state(copy), given)
        real: list[Tensor] = []
        flatten(logged, real)
        real += [leaf for _, leaf in tensors_of(new)]
        replayed: list[Tensor] = []
        found = self._replayed(recorded, leaves)
        flatten(found, replayed)
        replayed += self._layout.registers
        if self._layout is self._registers.layout_of(new) and agree(replayed, real, inputs):
            return found
        self.stop(
            "a step differs from its recording, so it reads something besides its minibatches, its "
            "state and its settings"
        )
        return self._end(new, logged)

    def stop(self, why: str) -> None:
        """Record and replay the steps of this kind of phase no more."""
        self._refused.add(self._context)
        self.leave_out(why)

    @abstractmethod
    def leave_out(self, why: str) -> None:
        """Say why steps aren't recorded."""


def register_for(leaf: Tensor, shared: bool) -> Tensor:
    """Make memory for a leaf; contiguous, or one row for all clients where they share it."""
    shape = leaf.shape[1:] if shared else leaf.shape
    register = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return register.as_strided(leaf.shape, (0, *register.stride())) if shared else register


def fill(pairs: Iterable[tuple[Tensor, Tensor]], layout: Layout) -> None:
    """Copy leaves to their registers, which are among those of a layout."""
    moved = [
        # What another copy changes is read before.
        (register, leaf.clone() if memory_of(leaf) in layout.memory else leaf)
        for register, leaf in pairs
        if leaf is not register
    ]
    for register, leaf in moved:
        if is_expanded(register):  # one row is all of its memory
            register[:1].copy_(leaf[:1])
        else:
            register.copy_(leaf)


def tensors_of(tree: Tree) -> Iterator[tuple[Path, Tensor]]:
    """Iterate over the paths and the tensors of a tree, in the order of ``flatten``."""
    return ((path, leaf) for path, leaf in items(tree) if isinstance(leaf, Tensor))


def memory_of(leaf: Tensor) -> int:
    """Return the address of a leaf's memory."""
    return leaf.untyped_storage().data_ptr()
