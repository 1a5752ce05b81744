"""Seeds for every random choice, derived from (seed, purpose, round, client, ...).

A result therefore doesn't depend on chunk size, number of processes or
on a resume, and two methods with one seed see the same cohorts and the same batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

FEW, FEWEST = 200, 2**15
"""Draw few positions one by one if there are this many times as many, and at least so many."""


def derive(seed: int, *keys: int | str) -> int:
    """Derive an independent 63-bit key, e.g. ``derive(seed, "order", round, client)``."""
    message = "/".join(map(str, (seed, *keys))).encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def generator(key: int) -> torch.Generator:
    """Make a CPU generator seeded with a key of :func:`derive`."""
    return torch.Generator().manual_seed(key)


def permutation(length: int, key: int) -> Tensor:
    """Draw a random permutation of ``length`` positions, int64 ``(length,)`` on the CPU."""
    return torch.randperm(length, generator=generator(key))


def first_of_permutation(length: int, count: int, key: int) -> Tensor:
    """Draw the first positions of :func:`permutation`, without the others where they are few.

    torch shuffles from the front: place ``i`` takes what is at ``i`` plus a 32-bit number modulo
    the places left. NumPy's generator of the same seed draws the same numbers.

    Args:
        length: Number of positions, below 2^32.
        count: How many of them, at most ``length``.
        key: A key of :func:`derive`.

    Returns:
        int64 ``(count,)``.
    """
    if length < FEW * count or length < FEWEST:
        return permutation(length, key)[:count]
    drawn = np.random.RandomState(key % 2**32).bytes(4 * count)
    moved: dict[int, int] = {}
    chosen = []
    for place, number in enumerate(np.frombuffer(drawn, "<u4").tolist()):
        at = place + number % (length - place)
        chosen.append(moved.get(at, at))
        moved[at] = moved.get(place, place)
    return torch.tensor(chosen, dtype=torch.int64)


def seed_torch(key: int) -> None:
    """Seed torch's global generators."""
    # Not `torch.manual_seed`, which records a stack trace each time while CUDA isn't in use.
    torch.default_generator.manual_seed(key)
    for device in _devices():
        torch.cuda.default_generators[device].manual_seed(key)


def _devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


class _Others:
    """Python's and NumPy's global generators, which blocks of :func:`seeded` may share.

    Attributes:
        shared: Whether they do.
        states: What the states were, once such a block has begun.
    """

    shared = False
    states: Any = None


def _states_of_others() -> Any:
    return random.getstate(), np.random.get_state()


def _restore_others(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


@contextmanager
def restoring_once() -> Iterator[None]:
    """Restore Python's and NumPy's global generators once for many blocks of :func:`seeded`.

    To save and restore them takes longer than to read a minibatch. Inside a ``with`` block users'
    code runs in blocks of :func:`seeded` alone, or after :func:`put_generators_back`.
    """
    if _Others.shared:
        yield
        return
    _Others.shared = True
    try:
        yield
    finally:
        put_generators_back()
        _Others.shared = False


def put_generators_back() -> None:
    """Restore what a block of :func:`restoring_once` has left for its end, before users' code."""
    states, _Others.states = _Others.states, None
    if states is not None:
        _restore_others(states)


@contextmanager
def seeded(key: int | None, everything: bool = False) -> Iterator[None]:
    """Seed torch's global generators inside a ``with`` block, and restore their state after it.

    For user code that draws from the global generators: data sets, samplers and transforms.

    Args:
        key: A key of :func:`derive`; None only restores their state.
        everything: Whether to seed Python's and NumPy's global generators too.
    """
    devices = _devices()
    states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    others = None
    if everything and not _Others.shared:
        others = _states_of_others()
    elif everything and _Others.states is None:
        _Others.states = _states_of_others()
    if key is not None:
        seed_torch(key)
    if everything and key is not None:
        random.seed(key)
        np.random.seed(key % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1], strict=True):
            torch.cuda.set_rng_state(state, device)
        if others is not None:
            _restore_others(others)
