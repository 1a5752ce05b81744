"""Record a gradient once as a list of tensor operators, and replay it without Python in between.

A step on cached features is a dozen small operators; what it costs is the way there: ``vmap``,
``functional_call``, the module's own code. Replaying gives the same operators on the same
tensors, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pfl.tree import is_expanded

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


def flatten(tree: Any, leaves: list[Tensor]) -> Any:
    """Append the tensors of a tree of dicts, lists and tuples; returns its structure."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if isinstance(tree, dict):
        return tuple((key, flatten(value, leaves)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(flatten(value, leaves) for value in tree)
    return tree


def rebuild(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """The tree with its tensors replaced, in the order of :func:`flatten`."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {key: rebuild(value, leaves) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuild(value, leaves) for value in tree)
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
        leaves: list[Tensor] = []
        structure = flatten(args, leaves)
        # What the recorded operators depend on: shapes, memory layouts, which leaves are expanded.
        shapes = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        key = (self._context, structure, shapes)
        recorded = self._recorded.get(key)
        if recorded is None:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            patience = WARM_UP if steps >= LONG else PATIENCE
            if calls <= patience or len(self._recorded) >= LIMIT:
                return function(*args)
            recorded = self._recorded[key] = Recording(function, args, leaves)
        self.used += 1
        return recorded(leaves)


class Recording:
    """The operators of one call.

    Args:
        function: Returns a tree of tensors.
        args: Trees of tensors.
        leaves: Their tensors, in order.
    """

    def __init__(self, function: Function, args: Any, leaves: list[Tensor]) -> None:
        # Imported here: it takes a second, and short runs never come here.
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: Tensor) -> list[Tensor]:
            self.result = function(*rebuild(args, iter(tensors)))
            results: list[Tensor] = []
            flatten(self.result, results)
            return results

        # Recording runs the function once; what it writes, BatchNorm's statistics, is put back.
        before = [leaf.clone() for leaf in leaves]
        self.replay: Function = make_fx(flat)(*leaves)
        with torch.no_grad():
            for leaf, old in zip(leaves, before, strict=True):
                if not is_expanded(leaf):
                    leaf.copy_(old)

    def __call__(self, leaves: list[Tensor]) -> Any:
        """Run the operators on other tensors of the same shapes."""
        with torch.no_grad():
            return rebuild(self.result, iter(self.replay(*leaves)))
