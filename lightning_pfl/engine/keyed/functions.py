"""torch's random functions as hashes of (client key, call number, element).

torch's dropout draws from one generator for a batched program, so its masks depend on which
clients share the program. These don't: they are the same for every engine, chunk size and number of
processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pfl.core.draws import Draws
from lightning_pfl.engine.keyed import factories


def _drop(draws: Draws, x: Tensor, p: float, mask_shape: Any, inplace: bool = False) -> Tensor:
    if p >= 1.0:
        return x.mul_(0.0) if inplace else x * 0.0
    # A short type would round the rate.
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    kept = draws.at_least(p, mask_shape, exact).to(x.dtype)  # torch multiplies booleans slower
    return x.mul_(kept).div_(1.0 - p) if inplace else x * kept / (1.0 - p)


def _check_rate(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(
            f"Expected the dropout probability `p` to be between 0 and 1, but got {p=}. "
            "Use 0 for no dropout."
        )


def _dropout(
    draws: Draws,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    spatial: int = 0,
) -> Tensor:
    """Drop elements, or whole channels of ``spatial`` axes each."""
    _check_rate(p)
    if not training or p == 0.0:
        return input
    # torch reads three axes in `dropout2d` as (samples, channels, length).
    leading = 2 if spatial == 2 else input.ndim - spatial
    shape = (*input.shape[:leading], *[1] * (input.ndim - leading))
    return _drop(draws, input, p, shape, inplace)


def _attention(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    _check_rate(dropout_p)
    if dropout_p == 0.0:
        return _NATIVE_ATTENTION(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (
        query @ key.transpose(-2, -1) * (scale if scale is not None else query.shape[-1] ** -0.5)
    )
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    if attn_mask is not None:
        bias = (
            attn_mask
            if attn_mask.dtype != torch.bool
            else torch.zeros_like(scores).masked_fill(~attn_mask, -math.inf)
        )
        scores = scores + bias
    weights = scores.softmax(-1)
    return _drop(draws, weights, dropout_p, weights.shape) @ value


# Saved here, as names of random functions are replaced while steps run.
_NATIVE_ATTENTION = F.scaled_dot_product_attention


def _in_place(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(draws: Draws, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy_(draw(draws, self, *args, **kwargs))

    return fill


def _uniform_values(
    draws: Draws, x: Tensor, a: float = 0.0, b: float = 1.0, **kwargs: Any
) -> Tensor:
    low, high = float(kwargs.get("from", a)), float(kwargs.get("to", b))
    return low + (high - low) * draws.draw(x.shape, x.dtype)


def _normal_values(
    draws: Draws, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> Tensor:
    return mean + std * draws.normal(x.shape, x.dtype)


def _bernoulli_values(draws: Draws, x: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
    return (draws.draw(x.shape, torch.float64) < p).to(x.dtype)


# Functions that aren't in this table (multinomial, an LSTM's inner dropout, ...) raise an error
# under `vmap`, and so run sequentially.
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: partial(_dropout, spatial=1),
    F.dropout2d: partial(_dropout, spatial=2),
    F.dropout3d: partial(_dropout, spatial=3),
    F.scaled_dot_product_attention: _attention,
    torch.rand: factories.factory(Draws.draw),
    torch.randn: factories.factory(Draws.normal),
    torch.rand_like: factories.factory_like(Draws.draw),
    torch.randn_like: factories.factory_like(Draws.normal),
    torch.randint: factories.randint,
    torch.randperm: factories.randperm,
    torch.bernoulli: factories.bernoulli,
    Tensor.bernoulli: factories.bernoulli,
    Tensor.bernoulli_: _in_place(_bernoulli_values),
    Tensor.uniform_: _in_place(_uniform_values),
    Tensor.normal_: _in_place(_normal_values),
}
