"""Two models whose outputs are mixed: one model to everything but the call of the module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.func import functional_call

from lightning_pfl.core.parameters import places
from lightning_pfl.core.tree import Model

OTHER = "other:"
"""What the names of the second model's entries begin with."""
SHARE = "other:share"
"""The first model's share of the output, ``(clients,)``."""


def mixture(model: Model, other: Model, share: Tensor) -> Model:
    r"""A model that calls the module as :math:`s f_1(x) + (1 - s) f_2(x)`.

    Args:
        model: The first model, ``(clients, ...)``; what trains is its entries.
        other: The second model, ``(clients, ...)``.
        share: :math:`s`, ``(clients,)``.
    """
    return {**model, **{OTHER + name: leaf for name, leaf in other.items()}, SHARE: share}


def parts(model: Model) -> tuple[Model, Model, Tensor | None]:
    """The first model, the second one, and the share; None if it is no mixture."""
    if SHARE not in model:
        return model, {}, None
    first = {name: leaf for name, leaf in model.items() if not name.startswith(OTHER)}
    second = {
        name.removeprefix(OTHER): leaf
        for name, leaf in model.items()
        if name.startswith(OTHER) and name != SHARE
    }
    return first, second, model[SHARE]


def shielded(model: Model, buffers: Iterable[str]) -> Model:
    """The same, where a pass in training mode writes to copies of the second model's buffers.

    It is a constant, and may belong to somebody else.
    """
    if SHARE not in model:
        return model
    copies = {
        name: model[name].clone(memory_format=torch.contiguous_format)
        for name in (OTHER + buffer for buffer in buffers)
        if name in model
    }
    return {**model, **copies}


class MixedForward:
    """Stands in for a module's ``forward``.

    Args:
        module: The module, which holds the first model whenever it is called.
        other: The second model, without client axis.
        share: The first model's share, a scalar.

    Attributes:
        calls: How often it was called.
    """

    def __init__(self, module: L.LightningModule, other: Model, share: Tensor) -> None:
        self.module, self.share = module, share
        at = places(module)
        self.other = {place: leaf for name, leaf in other.items() for place in at[name]}
        self.original = module.forward
        self.calls = 0
        self._second = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with both models.

        Raises:
            TypeError: If it doesn't return a tensor.
        """
        first = self.original(*args, **kwargs)
        if self._second:
            return first
        self.calls += 1
        if not isinstance(first, Tensor):
            raise TypeError(
                "Expected `forward` to return a tensor, since the outputs of two models are mixed, "
                f"but got {type(first).__name__}. Return a tensor, or mix parameters."
            )
        self._second = True
        try:
            other = {name: leaf.to(first.device) for name, leaf in self.other.items()}
            second = functional_call(self.module, other, args, kwargs, tie_weights=False)
        finally:
            self._second = False
        share = self.share.to(first)
        return share * first + (1 - share) * second


def excuse(module: L.LightningModule) -> None:
    """Take a step that skips its minibatch without a call of the module: there is no output."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, MixedForward):
        forward.calls += 1


@contextmanager
def mixed_outputs(module: L.LightningModule, other: Model, share: Tensor | None) -> Iterator[None]:
    """Let calls of the module give mixed outputs.

    Raises:
        RuntimeError: If the module is never called: the second model would be ignored.
    """
    if share is None:
        yield
        return
    forward = MixedForward(module, other, share)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
    if not forward.calls:
        raise RuntimeError(
            f"Expected the steps of {type(module).__name__} to call the module itself, since the "
            "outputs of two models are mixed, but they don't. Write `self(inputs)` in them, or mix "
            "parameters."
        )
