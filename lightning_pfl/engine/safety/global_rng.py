"""Detection of draws from global random generators, which client keys don't reach."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
def watch_global_rng(key: int | None) -> Iterator[Elsewhere]:
    """Seed all global generators by ``key`` inside a ``with`` block, and restore them after it.

    torch's generator serves random functions without keys (an LSTM's dropout, multinomial),
    Python's and NumPy's serve mixup and similar code.

    Args:
        key: A key of :func:`~lightning_pfl.core.randomness.derive`; None where a draw only has to
            be noticed, which is faster.

    Yields:
        A record of draws, valid after the block.
    """
    found = Elsewhere()
    with seeded(key, everything=True):
        before, torch_before = _positions(), _torch_states()
        yield found
        found.moved = _positions() != before
        found.moved_torch = not all(map(torch.equal, torch_before, _torch_states()))


def _torch_states() -> list[Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _positions() -> tuple[Any, ...]:
    """Return positions of both Mersenne twisters: a word, the index, a spare normal."""
    _, words, spare = random.getstate()
    state: Any = np.random.get_state()
    return words[0], words[-1], spare, int(state[1][0]), *state[2:]
