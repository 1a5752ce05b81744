"""Random numbers as hashes of a client's key."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import Tree


def random_keys(seed: int, stream: str, round: int, clients: list[int]) -> Tensor:
    """Derive a key per client for its forward passes' random calls, int64 ``(clients,)``."""
    return torch.tensor([derive(seed, "random", stream, round, client) for client in clients])


# The multipliers of splitmix64 (Steele, Lea, Flood 2014), as int64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
_LEAST = -(1 << 63)
STARTS = 8
"""Calls whose first numbers are made at once, as small tensors cost a call of torch each."""


def _wrap(number: int) -> int:
    """Wrap a Python integer modulo 2**64 to int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's shift is arithmetic."""
    return torch.bitwise_right_shift(x, bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, a bijection of int64 in which every input bit counts."""
    x = _multiply_once(x) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def mix_number(x: int) -> int:
    """Apply :func:`mix` to one number of the host."""
    x %= 1 << 64
    x = (x ^ (x >> 30)) * _MULTIPLY_1 % (1 << 64)
    x = (x ^ (x >> 27)) * _MULTIPLY_2 % (1 << 64)
    return _wrap(x ^ (x >> 31))


def _multiply_once(x: Tensor) -> Tensor:
    """Return what :func:`mix` multiplies last."""
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    return x ^ _shift(x, 27)


def uniform(key: Tensor, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw uniform numbers in [0, 1) from a key and a call number.

    Args:
        key: int64 scalar, the client's key.
        call: Number of the random call in the forward pass, from 0.
        shape: Shape of the result.
        dtype: A float or complex type. Draws as many random bits as its mantissa has (53 for
            float64, 24, 11, 8 for bfloat16), so that no number rounds to 1; both parts of a complex
            number are uniform.
    """
    return _uniform(mix(key + _wrap((call + 1) * GOLDEN)), shape, dtype)


def _uniform(start: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw the uniform numbers of a call, of which all elements begin with the same number."""
    if dtype.is_complex:
        return torch.view_as_complex(_uniform(start, (*shape, 2), dtype.to_real()))
    bits = mix(_elements(start, shape))
    if dtype == torch.float64:
        return _shift(bits, 11).double() * 2.0**-53
    digits = min(24, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (_shift(bits, 64 - digits).float() * 2.0**-digits).to(dtype)


def _elements(start: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a number for each element, to be mixed."""
    element = torch.arange(1, math.prod(shape) + 1, device=start.device)
    return torch.add(start, element, alpha=GOLDEN).view(shape)


def _at_least(start: Tensor, shape: tuple[int, ...], p: float, double: bool) -> Tensor:
    """Return whether uniform numbers are at least ``p``, without making them of the bits."""
    digits = 53 if double else 24
    p = p if double else float(np.float32(p))  # as torch compares
    # The first bits of a number without its sign, compared as numbers with one.
    least = math.ceil(p * 2.0**digits) << (64 - digits)
    if not 0 < least < 1 << 64:
        return torch.full(shape, least <= 0, device=start.device)
    if double:
        bits = mix(_elements(start, shape)) ^ _LEAST
    else:  # the last shift of `mix` leaves the first bits as they are
        # Not `torch.tensor`, which copies from the host.
        half = torch.full((), _LEAST, device=start.device)
        bits = torch.add(half, _multiply_once(_elements(start, shape)), alpha=_MULTIPLY_2)
    return bits >= least + _LEAST


def with_starts(keys: Tensor) -> Tensor:
    """Put behind each key the numbers with which its first calls begin.

    Args:
        keys: int64 ``(keys,)``.

    Returns:
        int64 ``(keys, 1 + STARTS)``, of which :class:`Draws` takes a row as a key.
    """
    return torch.cat([keys[:, None], _starts(keys[:, None], 0)], 1)


def _starts(key: Tensor, first: int) -> Tensor:
    """Make the numbers with which some calls of a key begin, from a first one on."""
    calls = torch.arange(first + 1, first + 1 + STARTS, device=key.device)
    return mix(torch.add(key, calls, alpha=GOLDEN))


class Draws:
    """Consecutive random numbers of one client's forward pass.

    Args:
        key: int64 scalar, or a row of :func:`with_starts`; under ``vmap`` one per client.
    """

    def __init__(self, key: Tensor) -> None:
        self._row = key if key.ndim else None
        self.key = key[0] if key.ndim else key
        self.calls = 0
        self.closed = False

    def _start(self) -> Tensor:
        """Count the next call, and return the number with which all of its elements begin."""
        if self.closed:
            raise RuntimeError(
                "Expected no random numbers in the backward pass, but the step draws some there. "
                "Leave dropout out of functions in `torch.utils.checkpoint`."
            )
        call = self.calls
        self.calls += 1
        if self._row is not None and call < STARTS:
            return self._row[1 + call]
        if not call % STARTS:
            self._starts = _starts(self.key, call)
        return self._starts[call % STARTS]

    def at_least(self, p: float, shape: Any, dtype: torch.dtype) -> Tensor:
        """Return whether the next call's uniform numbers are at least ``p``.

        Args:
            p: A number in [0, 1).
            shape: Shape of the result.
            dtype: float32 or float64, as of :meth:`draw`.
        """
        return _at_least(self._start(), tuple(shape), p, dtype == torch.float64)

    def draw(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Draw uniform numbers for the next call."""
        start = self._start()
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        return _uniform(start, tuple(shape), dtype)

    def normal(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Draw standard normal numbers (Box-Muller) for the next call."""
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        torch.finfo(dtype)  # a TypeError for integers, as without a key
        if dtype.is_complex:  # variance 1/2 in each part
            real = self.normal((*shape, 2), dtype.to_real())
            return torch.view_as_complex(real * 0.5**0.5)
        radius = torch.sqrt(-2 * torch.log1p(-self.draw(shape, torch.float64)))
        return (radius * torch.cos(2 * math.pi * self.draw(shape, torch.float64))).to(dtype)


@lru_cache(1024)
def _purpose(purpose: str, name: str) -> int:
    return derive(0, "noise", purpose, name)


def noise(keys: Tensor, like: Tree, purpose: str) -> Tree:
    """Standard normal numbers, a row for each key.

    Args:
        keys: int64 ``(clients,)``; a row depends on its key alone.
        like: Leaves ``(clients, ...)`` of a float or complex type, whose shapes and types are
            taken.
        purpose: Two purposes give independent numbers for the same keys.
    """

    def draw(tree: Tree, path: str) -> Tree:
        drawn: Tree = {}
        for name, leaf in tree.items():
            at = f"{path}/{name}"
            if isinstance(leaf, dict):
                drawn[name] = draw(leaf, at)
                continue
            shape, dtype = tuple(leaf.shape[1:]), leaf.dtype
            of_leaf = mix(keys.to(leaf.device) ^ _purpose(purpose, at))
            drawn[name] = torch.vmap(lambda key, s=shape, d=dtype: Draws(key).normal(s, d))(of_leaf)
        return drawn

    return draw(like, "")
