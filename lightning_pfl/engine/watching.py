"""Temporary changes of a module: its mode, its ``forward``, and watching what passes through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Seen:
    """Results of a step's calls, in their order.

    Attributes:
        outputs: What the module returned.
        features: What entered its submodule ``head``.
    """

    outputs: list[Any] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)


@contextmanager
def watching(module: nn.Module) -> Iterator[Seen]:
    """Collect the outputs of the module and the inputs of its head in a step."""
    seen = Seen()
    forward, depth = module.forward, 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = forward(*args, **kwargs)
        finally:
            depth -= 1
        if not depth:  # the second model of a mixture is called inside
            seen.outputs.append(result)
        return result

    head = getattr(module, "head", None)
    with replaced_forward(module, watched):
        if not isinstance(head, nn.Module):
            yield seen
            return
        original = head.forward

        def entered(*args: Any, **kwargs: Any) -> Any:
            seen.features.append(args[0])
            return original(*args, **kwargs)

        with replaced_forward(head, entered):
            yield seen


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put every layer into training or eval mode inside a ``with`` block, and each back."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Replace the ``forward`` of one module object inside a ``with`` block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
