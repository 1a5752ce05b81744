"""Detection of draws from global random generators, which client keys don't reach."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_pfl.core.randomness import seeded


@dataclass
class Elsewhere:
    """A record of draws from the global generators.

    Attributes:
        moved: Whether Python's or NumPy's was used.
        moved_torch: Whether one of torch's was used.
    """

    moved: bool = False
    moved_torch: bool = False


@contextmanager
def watch_global_rng(key: int | None, torch_alone: bool = False) -> Iterator[Elsewhere]:
    """Seed global generators by ``key`` inside a ``with`` block, and restore them after it.

    torch's generator serves random functions without keys (an LSTM's dropout, multinomial),
    Python's and NumPy's serve mixup and similar code.

    Args:
        key: A key of :func:`~lightning_pfl.core.randomness.derive`; None where a draw only has to
            be noticed, which is faster.
        torch_alone: Whether no code of a user's runs that isn't known, so that only torch's may be
            used: the others are neither seeded nor looked at, which takes longest.

    Yields:
        A record of draws, valid after the block.
    """
    found = Elsewhere()
    if key is not None:
        with seeded(key, everything=not torch_alone):
            before = States(torch_alone)
            yield found
            before.compare(found)
        return
    before = States(torch_alone)
    try:
        yield found
    finally:
        before.compare(found)
        if found.moved or found.moved_torch:
            before.restore()


@contextmanager
def undrawn(method: Any) -> Iterator[None]:
    """Check that what a method does for a client doesn't use the global generators.

    Args:
        method: The method.

    Raises:
        ValueError: If it has.
    """
    with watch_global_rng(None) as found:
        yield
    if found.moved or found.moved_torch:
        whose = "torch's" if found.moved_torch else "Python's or NumPy's"
        raise ValueError(
            f"Expected {type(method).__name__} to draw by keys, as global generators are elsewhere "
            f"in a resumed run or another process, but what it does for a client uses {whose}. "
            "Draw by `client.noise(tree)` in a step; elsewhere by `generator(derive(seed, name, "
            "info.round, client))` of `lightning_pfl.core.randomness`."
        )


class States:
    """The states of all global generators, or of torch's alone."""

    def __init__(self, torch_alone: bool = False) -> None:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.torch = [torch.get_rng_state(), *devices]
        self.others: Any = None if torch_alone else (random.getstate(), np.random.get_state())

    def compare(self, found: Elsewhere) -> None:
        """Note whether a generator was used since."""
        now = States(torch_alone=self.others is None)
        found.moved = self._positions() != now._positions()
        found.moved_torch = not all(map(torch.equal, self.torch, now.torch))

    def restore(self) -> None:
        """Restore the states."""
        torch.set_rng_state(self.torch[0])
        if len(self.torch) > 1:
            torch.cuda.set_rng_state_all(self.torch[1:])
        if self.others is not None:
            random.setstate(self.others[0])
            np.random.set_state(self.others[1])

    def _positions(self) -> tuple[Any, ...]:
        """Return positions of both Mersenne twisters: a word, the index, a spare normal."""
        if self.others is None:
            return ()
        (_, words, spare), numpy = self.others
        return words[0], words[-1], spare, int(numpy[1][0]), *numpy[2:]
