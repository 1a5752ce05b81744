"""Record a gradient once as a list of tensor operators, and replay it without Python in between.

A step on cached features is a dozen small operators; what it costs is the way there: ``vmap``,
``functional_call``, the module's own code. Replaying gives the same operators on the same
tensors, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 2
"""Calls that run as they are before a gradient of a long phase is recorded."""
LONG = 150
"""Steps of a phase from which recording it pays within the phase."""
PATIENCE = 50
"""Calls before a gradient of a shorter phase is recorded: it pays over the rounds, if they come."""
LIMIT = 64
"""Recordings kept; clients with many different batch sizes would fill the memory."""

Function = Callable[..., Any]


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Every plain setting of a module and what is below it: a recording holds them as constants."""
    plain = (bool, int, float, str, tuple)
    return tuple(
        (name, key, value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, plain)
    )


def layout_of(tree: Any) -> Any:
    """Names, shapes, strides and dtypes: what the recorded operators depend on."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, dict):
        return tuple((key, layout_of(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(layout_of(value) for value in tree)
    return tree


class Traces:
    """Recordings by what they depend on.

    Attributes:
        enabled: Whether steps may be recorded. False where the module's step may read anything but
            its arguments and its settings.
        used: Replays so far.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled, self.used = enabled, 0
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, Function] = {}
        self._context: Any = None

    def enter(self, context: Any) -> None:
        """Begin a phase; ``context`` is what its steps depend on besides their arguments."""
        self._context = context

    def run(self, function: Function, steps: int, *args: Any) -> Any:
        """``function(*args)``, replayed if it was recorded before.

        Args:
            function: Returns a tree of tensors; must not read anything that changes but ``args``.
            steps: How many steps the phase has.
            args: Trees of tensors.
        """
        if not self.enabled:
            return function(*args)
        key = (self._context, layout_of(args))
        recorded = self._recorded.get(key)
        if recorded is None:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= (WARM_UP if steps >= LONG else PATIENCE) or len(self._recorded) >= LIMIT:
                return function(*args)
            recorded = self._recorded[key] = record(function, args)
        self.used += 1
        with torch.no_grad():
            return recorded(*args)


def record(function: Function, args: Any) -> Function:
    """The operators of one call, as a function of the same arguments."""
    # Imported here: it takes a second, and short runs never come here.
    from torch.fx.experimental.proxy_tensor import make_fx

    recorded: Function = make_fx(function)(*args)
    return recorded
