"""Temporary changes of a module: its mode, its ``forward``, and watching what passes through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Seen:
    """Results of a step's calls, in their order.

    Attributes:
        outputs: What the module returned.
        features: What entered its submodule ``head``.
        losses: The ``"loss"`` of what its ``per_sample`` returned, if it has that function.
    """

    outputs: list[Any] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)


@contextmanager
def watching(module: nn.Module) -> Iterator[Seen]:
    """Collect the module's outputs, the inputs of its head and its samples' losses in a step."""
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

    def measured(*args: Any, **kwargs: Any) -> Any:
        values = per_sample(*args, **kwargs)
        if isinstance(values, Mapping) and "loss" in values:  # a function of that name may be else
            seen.losses.append(values["loss"])
        return values

    head = getattr(module, "head", None)
    per_sample: Any = getattr(module, "per_sample", None)
    measuring = nullcontext() if per_sample is None else replaced(module, "per_sample", measured)
    with replaced(module, "forward", watched), measuring:
        if not isinstance(head, nn.Module):
            yield seen
            return
        original = head.forward

        def entered(*args: Any, **kwargs: Any) -> Any:
            seen.features.append(args[0])
            return original(*args, **kwargs)

        with replaced(head, "forward", entered):
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
def replaced(module: nn.Module, name: str, function: Any) -> Iterator[None]:
    """Replace a function of one module object, such as ``forward``, inside a ``with`` block."""
    before = module.__dict__.get(name)
    module.__dict__[name] = function
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before
