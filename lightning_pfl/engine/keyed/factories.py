"""torch's functions that make random tensors, with a key and torch's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.draws import Draws

Draw = Callable[["Draws", Any, torch.dtype], Tensor]
Factory = Callable[..., Tensor]
# Options about the generator and the memory, without influence on the values.
_ELSEWHERE = ("generator", "pin_memory", "device")


def _hand_over(values: Tensor, out: Tensor | None, requires_grad: bool) -> Tensor:
    """Return the values in the tensor that the caller asked for."""
    if out is not None:
        if out.shape != values.shape:
            out.resize_(values.shape)
        values = out.copy_(values)
    return values.requires_grad_() if requires_grad else values


def factory(draw: Draw) -> Factory:
    """Replace ``torch.rand`` or ``torch.randn``: sizes in every form, and all keywords."""

    def make(
        mode: Draws,
        *size: Any,
        out: Tensor | None = None,
        requires_grad: bool = False,
        **options: Any,
    ) -> Tensor:
        options = {name: value for name, value in options.items() if name not in _ELSEWHERE}
        # torch parses the sizes (and refuses wrong ones) without allocating memory.
        like = torch.empty(*size, **options, device="meta")
        dtype = like.dtype if out is None else out.dtype
        return _hand_over(draw(mode, like.shape, dtype), out, requires_grad)

    return make


def factory_like(draw: Draw) -> Factory:
    """Replace ``torch.rand_like`` or ``torch.randn_like``."""

    def make(
        mode: Draws,
        input: Tensor,
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **_: Any,
    ) -> Tensor:
        return _hand_over(draw(mode, input.shape, dtype or input.dtype), None, requires_grad)

    return make


def _bounds(given: list[Any], named: dict[str, Any]) -> tuple[int, int]:
    """Parse ``low`` and ``high`` like torch: a single number is ``high``."""
    names = ("low", "high") if "high" in named or len(given) == 2 else ("high",)
    found = {**dict(zip(names, given, strict=False)), **named}
    low, high = int(found.get("low", 0)), int(found["high"])
    if low >= high:
        raise ValueError(
            f"Expected `low` of torch.randint to be below `high`, but got {low=} and {high=}. "
            "Numbers are drawn from [low, high)."
        )
    return low, high


def randint(
    mode: Draws,
    *args: Any,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """Replace ``torch.randint``: ``[low,] high, size``, each by position or by name."""
    given = list(args)
    size = options["size"] if "size" in options else given.pop()
    named: dict[str, Any] = {name: options[name] for name in ("low", "high") if name in options}
    low, high = _bounds(given, named)
    shape = torch.empty(size, device="meta").shape
    whole = torch.floor(mode.draw(shape, torch.float64) * (high - low)).long() + low
    if dtype is None:
        dtype = torch.int64 if out is None else out.dtype
    return _hand_over(whole.to(dtype), out, requires_grad)


def randperm(
    mode: Draws,
    n: Any,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    **_: Any,
) -> Tensor:
    """Replace ``torch.randperm`` by the order of uniform numbers."""
    order = mode.draw((int(n),), torch.float64).argsort()
    return _hand_over(order if dtype is None else order.to(dtype), out, requires_grad)


def bernoulli(
    mode: Draws,
    input: Tensor,
    p: float | None = None,
    *,
    out: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Replace ``torch.bernoulli``: 1 with the probabilities ``input``, or ``p``."""
    below = mode.draw(input.shape, torch.float64) < (input if p is None else p)
    return _hand_over(below.to(input.dtype), out, requires_grad=False)
