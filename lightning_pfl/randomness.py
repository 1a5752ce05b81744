"""Keys for every random choice.

A function of (seed, purpose, round, client, ...), never of what ran before.

A result therefore doesn't depend on how a cohort is cut into chunks, on the number of processes or
on a resume, and two methods with one seed see the same cohorts and the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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
def seeded(key: int) -> Iterator[None]:
    """Run a block with torch's global generators seeded by ``key``, and put their state back.

    For code that we don't own and that draws from the global generator: a user's dataset, sampler
    or transform.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key)
        yield
