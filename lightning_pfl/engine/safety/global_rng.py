"""Detection of draws from global random generators, which client keys don't reach."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_pfl.core.randomness import seeded


@dataclass
class Elsewhere:
    """A record of draws from Python's and NumPy's global generators.

    Attributes:
        moved: Whether one of them was used.
    """

    moved: bool = False


@contextmanager
def watch_global_rng(key: int) -> Iterator[Elsewhere]:
    """Seed all global generators by ``key`` inside a ``with`` block, and restore them after it.

    torch's generator serves random functions without keys (an LSTM's dropout, multinomial),
    Python's and NumPy's serve mixup and similar code.

    Args:
        key: A key of :func:`~lightning_pfl.core.randomness.derive`.

    Yields:
        A record of draws from Python's or NumPy's generator, valid after the block.
    """
    found = Elsewhere()
    with seeded(key, everything=True):
        before = _positions()
        yield found
        found.moved = _positions() != before


def _positions() -> tuple[Any, ...]:
    """Return positions of both Mersenne twisters: a word, the index, a spare normal."""
    _, words, spare = random.getstate()
    state: Any = np.random.get_state()
    return words[0], words[-1], spare, int(state[1][0]), *state[2:]
