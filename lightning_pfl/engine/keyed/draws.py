"""Random numbers as a hash of a client's key."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.randomness import derive


def random_keys(seed: int, stream: str, round: int, clients: list[int]) -> Tensor:
    """One key per client for the random calls of its forward passes, int64 ``(clients,)``."""
    return torch.tensor([derive(seed, "random", stream, round, client) for client in clients])


# The multipliers of splitmix64 (Steele, Lea, Flood 2014), as the signed integers that torch has.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)


def _wrap(number: int) -> int:
    """A Python number modulo 2**64 as the int64 that torch takes."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64: a bijection of int64 that spreads every input bit."""
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def uniform(key: Tensor, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1) of a key and a call number.

    Args:
        key: int64 scalar, the client's key.
        call: Which random call of the forward pass this is, from 0.
        shape: Shape of the result.
        dtype: A float or complex type. As many random bits as its numbers have (53 for float64,
            24, 11, 8 for bfloat16), so that 1 itself is never a rounding's result; both parts of
            a complex number are uniform.
    """
    if dtype.is_complex:
        parts = uniform(key, call, (*shape, 2), dtype.to_real())
        return torch.view_as_complex(parts)
    start = mix(key + _wrap((call + 1) * _GOLDEN))
    element = torch.arange(1, math.prod(shape) + 1, device=key.device)
    bits = mix(start + element * _GOLDEN).view(shape)
    if dtype == torch.float64:
        return _shift(bits, 11).double() * 2.0**-53
    digits = min(24, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (_shift(bits, 64 - digits).float() * 2.0**-digits).to(dtype)


class Draws:
    """Random numbers of one client's forward pass, call after call.

    Args:
        key: int64 scalar; under ``vmap`` one per client.
    """

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.calls = 0
        self.closed = False

    def draw(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Uniform numbers for the next call."""
        if self.closed:
            raise RuntimeError(
                "Expected no random numbers in the backward pass, but the step draws some there. "
                "If it uses `torch.utils.checkpoint`, leave dropout and the like out of what that "
                "computes a second time: the numbers would be others."
            )
        self.calls += 1
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        return uniform(self.key, self.calls - 1, tuple(shape), dtype)

    def normal(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers (Box-Muller) for the next call."""
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        torch.finfo(dtype)  # a TypeError for whole numbers, as without a key
        if dtype.is_complex:  # variance 1/2 in each part
            real = self.normal((*shape, 2), dtype.to_real())
            return torch.view_as_complex(real * 0.5**0.5)
        radius = torch.sqrt(-2 * torch.log1p(-self.draw(shape, torch.float64)))
        return (radius * torch.cos(2 * math.pi * self.draw(shape, torch.float64))).to(dtype)
