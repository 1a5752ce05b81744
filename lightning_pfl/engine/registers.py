"""Registers: tensors in which the states of one client, or chunk of clients, after another are.

A step that is repeated as it was recorded finds everything that it reads and writes at the same
place. A state is copied to its registers when its phase begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.tree import Path, Tree, is_expanded, items
from lightning_pfl.engine.recording import flatten, rebuild


@dataclass(frozen=True)
class Layout:
    """The entries of a state, and their registers.

    Attributes:
        number: Another one for each layout.
        tree: The state, whose leaves are registers.
        registers: These leaves.
        paths: Their paths.
    """

    number: int
    tree: Tree
    registers: list[Tensor]
    paths: list[Path]


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
        paths, registers = [], []
        for path, leaf in tensors_of(state):
            key = path, leaf.shape, leaf.dtype, leaf.device, self.is_shared(leaf)
            if key not in self._registers:
                self._registers[key] = register_for(leaf, self.is_shared(leaf))
            paths.append(path)
            registers.append(self._registers[key])
        # With what isn't a tensor, such as an optimizer's momentum of None.
        known = flatten(state, []), *map(id, registers)
        if known not in self._layouts:
            tree = rebuild(state, iter(registers))
            self._layouts[known] = Layout(len(self._layouts), tree, registers, paths)
        return self._layouts[known]

    def is_shared(self, leaf: Tensor) -> bool:
        """Whether clients share a leaf, and so its register."""
        return self._expanded and is_expanded(leaf)


def register_for(leaf: Tensor, shared: bool) -> Tensor:
    """Make memory for a leaf; contiguous, or one row for all clients where they share it."""
    shape = leaf.shape[1:] if shared else leaf.shape
    register = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return register.as_strided(leaf.shape, (0, *register.stride())) if shared else register


def fill(pairs: Iterable[tuple[Tensor, Tensor]], layout: Layout) -> None:
    """Copy leaves to their registers, which are among those of a layout."""
    memory = {memory_of(register) for register in layout.registers}
    moved = [
        # What another copy changes is read before.
        (register, leaf.clone() if memory_of(leaf) in memory else leaf)
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
