"""The documented order of a client's samples, by Python's integers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

WORD = 1 << 64


def splitmix64(state: int, count: int) -> int:
    """The ``count``-th number, from 1, of the generator by Steele, Lea and Flood (2014)."""
    z = (state + count * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def order_by_hand(
    samples: int, client: int, epoch: int, seed: int = 0, stream: str = "local", round: int = 0
) -> Tensor:
    """Sort samples by their hashes, as signed numbers."""
    message = f"{seed}/orders/{stream}/{round}".encode()
    key = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1
    own = splitmix64(splitmix64(key, client + 1), epoch + 1)
    hashes = [splitmix64(own, sample + 1) for sample in range(samples)]
    signed = [number - WORD if number >= WORD // 2 else number for number in hashes]
    return torch.tensor(sorted(range(samples), key=signed.__getitem__), dtype=torch.int64)
