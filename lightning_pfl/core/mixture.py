"""Modules whose output is the mixed output of two models, as for APFL."""

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
"""Prefix of the second model's entries."""
SHARE = "other:share"
"""Name of the first model's weight in the output, ``(clients,)``."""


def mixture(model: Model, other: Model, share: Tensor) -> Model:
    r"""Combine two models so that the module computes :math:`s f_1(x) + (1 - s) f_2(x)`.

    Args:
        model: The first model, ``(clients, ...)``, which is trained.
        other: The second model, ``(clients, ...)``, a constant.
        share: :math:`s` in [0, 1], ``(clients,)``.
    """
    return {**model, **{OTHER + name: leaf for name, leaf in other.items()}, SHARE: share}


def parts(model: Model) -> tuple[Model, Model, Tensor | None]:
    """Split a mixture into two models and the weight, which is None for a plain model."""
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
    """Copy the second model's buffers, which a forward pass in training mode would change."""
    if SHARE not in model:
        return model
    copies = {
        name: model[name].clone(memory_format=torch.contiguous_format)
        for name in (OTHER + buffer for buffer in buffers)
        if name in model
    }
    return {**model, **copies}


class MixedForward:
    """A replacement of a module's ``forward`` that mixes two models' outputs.

    Args:
        module: The module, which holds the first model.
        other: The second model, without client axis.
        share: Weight of the first model's output, a scalar in [0, 1].

    Attributes:
        calls: Number of calls.
    """

    def __init__(self, module: L.LightningModule, other: Model, share: Tensor) -> None:
        self.module, self.share = module, share
        at = places(module)
        self.other = {place: leaf for name, leaf in other.items() for place in at[name]}
        self.original = module.forward
        self.calls = 0
        self._second = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mixed outputs of both models.

        Raises:
            TypeError: If the module's ``forward`` doesn't return a tensor.
        """
        first = self.original(*args, **kwargs)
        if self._second:
            return first
        self.calls += 1
        if not isinstance(first, Tensor):
            raise TypeError(
                "Expected `forward` to return a tensor, since outputs of two models are mixed, "
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
    """Count a call for a step that skips its minibatch without calling the module."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, MixedForward):
        forward.calls += 1


@contextmanager
def mixed_outputs(module: L.LightningModule, other: Model, share: Tensor | None) -> Iterator[None]:
    """Make the module return mixed outputs inside a ``with`` block.

    Raises:
        RuntimeError: If the module is never called, which would ignore the second model.
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
            f"Expected the steps of {type(module).__name__} to call the module itself, so that "
            "outputs of two models can be mixed. Write `self(inputs)` in them, or mix parameters."
        )
