"""Keys for every random choice.

A function of (seed, purpose, round, client, ...), never of what ran before.

A result therefore doesn't depend on how a cohort is cut into chunks, on the number of processes or
on a resume, and two methods with one seed see the same cohorts and the same batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def derive(seed: int, *keys: int | str) -> int:
    """An independent key in [0, 2**63) for a purpose, e.g.

    ``derive(seed, "order", round, client)``.
    """
    message = "/".join(map(str, (seed, *keys))).encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def generator(key: int) -> torch.Generator:
    """A CPU generator seeded with a key of :func:`derive`."""
    return torch.Generator().manual_seed(key)


def permutation(length: int, key: int) -> Tensor:
    """A random order of ``length`` positions, int64 ``(length,)`` on the CPU."""
    return torch.randperm(length, generator=generator(key))


@contextmanager
def seeded(key: int, everything: bool = False) -> Iterator[None]:
    """Run a block with torch's global generators seeded by ``key``, and put their state back.

    For code that we don't own and that draws from the global generators: a user's dataset, sampler
    or transform.

    Args:
        key: A key of :func:`derive`.
        everything: Whether Python's and NumPy's global generators are seeded as well, as the
            transforms of datasets often draw from them.
    """
    # Not `torch.manual_seed`: while CUDA isn't in use, that notes down a stack trace each time.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    others = (random.getstate(), np.random.get_state()) if everything else None
    torch.default_generator.manual_seed(key)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(key)
    if everything:
        random.seed(key)
        np.random.seed(key % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1], strict=True):
            torch.cuda.set_rng_state(state, device)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])
