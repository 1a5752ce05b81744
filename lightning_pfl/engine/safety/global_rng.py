"""Random numbers that a step draws from generators which keys don't reach."""

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
    """What became of Python's and NumPy's global generators.

    Attributes:
        moved: Whether one of them was drawn from.
    """

    moved: bool = False


@contextmanager
def watch_global_rng(key: int) -> Iterator[Elsewhere]:
    """Run a step with all global generators seeded by ``key``; their state is put back after it.

    torch's own for random functions that keys don't reach (an LSTM's dropout, multinomial), and
    Python's and NumPy's, from which mixup and the like draw.

    Args:
        key: A key of :func:`~lightning_pfl.core.randomness.derive`.

    Yields:
        Whether the step drew from Python's or NumPy's generator; known after the block.
    """
    found = Elsewhere()
    with seeded(key, everything=True):
        before = _positions()
        yield found
        found.moved = _positions() != before


def _positions() -> tuple[Any, ...]:
    """Where both Mersenne twisters stand: a word of the state, the place in it, a spare normal."""
    _, words, spare = random.getstate()
    state: Any = np.random.get_state()
    return words[0], words[-1], spare, int(state[1][0]), *state[2:]
