"""Random functions as hashes of (client key, call number, element).

torch's dropout draws from one generator for a batched program, so its masks depend on which
clients share the program. These don't: they are the same for every engine, chunk size and number of
processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pfl.core.draws import Draws
from lightning_pfl.engine.keyed import factories
from lightning_pfl.engine.operators import own_function


class KeyedRandomness(Draws, TorchFunctionMode):
    """A mode in which torch's random functions draw from a hash of ``key``.

    The hash is :func:`~lightning_pfl.core.draws.uniform`.

    Args:
        key: int64 scalar; under ``vmap`` one per client.

    Attributes:
        calls: Number of random calls; 0 after a forward pass shows that it is deterministic.
        closed: Whether the forward pass is over, after which draws are refused.
    """

    def __init__(self, key: Tensor) -> None:
        Draws.__init__(self, key)
        TorchFunctionMode.__init__(self)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Refuse random functions during a backward pass.

        No mode is active inside of one, so they are replaced in their namespaces.
        """
        self.closed = True

        ours = {n: partial(handler, self) for n, handler in _OF_F.items()}
        theirs = {n: partial(handler, self) for n, handler in _OF_TORCH.items()}
        with _replaced(F, **ours), _replaced(torch, **theirs):
            yield

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = own_function(func)
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, *args, **(kwargs or {}))


# --- the random functions ---


def _drop(
    mode: KeyedRandomness, x: Tensor, p: float, mask_shape: Any, inplace: bool = False
) -> Tensor:
    if p >= 1.0:
        return x.mul_(0.0) if inplace else x * 0.0
    # A short type would round the rate.
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    kept = mode.at_least(p, mask_shape, exact).to(x.dtype)  # torch multiplies booleans slower
    return x.mul_(kept).div_(1.0 - p) if inplace else x * kept / (1.0 - p)


def _check_rate(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(
            f"Expected the dropout probability `p` to be between 0 and 1, but got {p=}. "
            "Use 0 for no dropout."
        )


def _dropout(
    mode: KeyedRandomness,
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
    return _drop(mode, input, p, shape, inplace)


def _attention(
    mode: KeyedRandomness,
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
    return _drop(mode, weights, dropout_p, weights.shape) @ value


# Saved here, as `_multi_head` replaces the function while it runs.
_NATIVE_ATTENTION = F.scaled_dot_product_attention


def _multi_head(mode: KeyedRandomness, *args: Any, **kwargs: Any) -> Any:
    # The function looks its helpers up in the module's namespace, out of reach of a mode that is
    # already inside a call.
    with _replaced(
        F,
        dropout=lambda *a, **k: _dropout(mode, *a, **k),
        scaled_dot_product_attention=lambda *a, **k: _attention(mode, *a, **k),
    ):
        return F.multi_head_attention_forward(*args, **kwargs)


@contextmanager
def _replaced(namespace: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    originals = {name: getattr(namespace, name) for name in functions}
    for name, function in functions.items():
        setattr(namespace, name, function)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(namespace, name, original)


def _in_place(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(mode: KeyedRandomness, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy_(draw(mode, self, *args, **kwargs))

    return fill


def _uniform_values(
    mode: KeyedRandomness, x: Tensor, a: float = 0.0, b: float = 1.0, **kwargs: Any
) -> Tensor:
    low, high = float(kwargs.get("from", a)), float(kwargs.get("to", b))
    return low + (high - low) * mode.draw(x.shape, x.dtype)


def _normal_values(
    mode: KeyedRandomness, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> Tensor:
    return mean + std * mode.normal(x.shape, x.dtype)


def _bernoulli_values(
    mode: KeyedRandomness, x: Tensor, p: float | Tensor = 0.5, **_: Any
) -> Tensor:
    return (mode.draw(x.shape, torch.float64) < p).to(x.dtype)


# Functions that aren't in this table (multinomial, an LSTM's inner dropout, ...) raise an error
# under `vmap`, and so run sequentially.
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: partial(_dropout, spatial=1),
    F.dropout2d: partial(_dropout, spatial=2),
    F.dropout3d: partial(_dropout, spatial=3),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
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
# Without functions that look up others of the table in their namespace.
_OF_F = {
    function.__name__: handler
    for function, handler in _HANDLERS.items()
    if getattr(F, function.__name__, None) is function
    and function is not F.multi_head_attention_forward
}
_OF_TORCH = {
    function.__name__: handler
    for function, handler in _HANDLERS.items()
    if getattr(torch, function.__name__, None) is function
}
