"""One client's minibatch as the objective of a method sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.tree import Tree


@dataclass(frozen=True)
class StepView:
    """One client's minibatch at the model that is differentiated; no tensor has a client axis.

    Attributes:
        loss: The mean loss over the real samples, of the given weights where there are some.
        batch: The minibatch, augmented as the module saw it.
        real: 1 for real samples and 0 for those that fill up, ``(samples,)``; None if all are real.
        sample_data: The samples' rows of what was given for them, ``(samples, ...)``.
    """

    loss: Tensor
    batch: Any
    real: Tensor | None = None
    sample_data: Tree = field(default_factory=dict)
    _losses: Tensor | None = None
    _outputs: tuple[Any, ...] = ()
    _features: tuple[Any, ...] = ()
    _mean: Tensor | None = None

    @property
    def losses(self) -> Tensor:
        """The loss of each sample, ``(samples,)``; unweighted."""
        return require_losses(self._losses, self._mean)

    @property
    def outputs(self) -> Any:
        """Outputs of the module's ``forward``, ``(samples, ...)``."""
        return require_one(self._outputs, "the module itself, `self(inputs)`")

    @property
    def features(self) -> Any:
        """Inputs of the module's ``head``, ``(samples, ...)``."""
        return require_one(self._features, "the submodule `head`")

    @property
    def targets(self) -> Any:
        """The second entry of the minibatch."""
        if not isinstance(self.batch, (tuple, list)) or len(self.batch) < 2:
            raise TypeError(
                "Expected minibatches to be pairs (inputs, targets), as the method needs targets, "
                f"but got {type(self.batch).__name__}. Return pairs from the dataset."
            )
        return self.batch[1]

    def mean(self, values: Tensor) -> Tensor:
        """Average over the real samples.

        Args:
            values: One value per sample, ``(samples,)``.
        """
        if self.real is None:
            return values.mean()
        return values.where(self.real > 0, 0).sum() / self.real.sum()


Objective = Callable[[StepView, Tree], Tensor]
"""What a client minimises: a scalar of a minibatch and of what the method gives for the client.

The second argument has one client's rows of ``given``. It is called for one client at a time, or
under ``vmap``, so it must not use other tensors that differ between clients.
"""


def require_losses(losses: Tensor | None, loss: Tensor | None) -> Tensor:
    """Return the samples' losses, or raise without them.

    Args:
        losses: The samples' losses, ``(samples,)``; None if they aren't known.
        loss: What ``training_step`` returned, which must be their mean up to rounding; None if
            that is known, or not to be read.

    Raises:
        TypeError: If the module doesn't give each sample's loss.
        ValueError: If ``loss`` isn't the mean.
    """
    if losses is None:
        raise TypeError(
            "Expected a module whose loss is the mean over samples of `per_sample(batch)['loss']`, "
            "as the method needs the loss of each sample, but got another `training_step`. Let it "
            "call `self.per_sample(batch)` once and return that mean, or use PersonalizedModule."
        )
    if loss is None:
        return losses
    mean = losses.detach().double().mean()
    rounding = 1e-4 if min(loss.element_size(), losses.element_size()) >= 4 else 0.05
    found = loss.detach().double()
    if not torch.isclose(found, mean, rtol=rounding, atol=rounding**2, equal_nan=True):
        raise ValueError(
            "Expected `training_step` to return the mean of `per_sample(batch)['loss']`, as the "
            f"method needs the loss of each sample, but it returns {float(found):.6g} and the mean "
            f"is {float(mean):.6g}. Put weights of samples and other terms into `per_sample`."
        )
    return losses


def require_one(found: tuple[Any, ...], what: str) -> Any:
    """Return the result of the only call of a part of the module in a step.

    Raises:
        RuntimeError: If there was no call, or several.
    """
    if len(found) != 1:
        raise RuntimeError(
            f"Expected a step to call {what}, once, as the method needs the result, but got "
            f"{len(found)} calls. Call it once in each step."
        )
    return found[0]
