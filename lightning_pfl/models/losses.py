"""Losses and hits of each sample, from outputs and targets of a batch.

All functions are elementwise over the batch, so that batches can be padded and masked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

#: A function of (output, target) that returns one value per sample, ``(batch, ...)``.
Loss = Callable[[Tensor, Tensor], Tensor]


def align_target(output: Tensor, target: Tensor) -> Tensor:
    """Give ``target`` the shape of ``output`` where they differ only in a trailing axis of size 1.

    Without this, ``(batch, 1)`` minus ``(batch,)`` broadcasts to ``(batch, batch)`` and trains on
    pairs of unrelated samples.

    Args:
        output: Output of the network, ``(batch, ...)``.
        target: Target of the same shape up to a trailing axis of size 1.

    Raises:
        ValueError: If the shapes differ otherwise.
    """
    if output.shape == target.shape:
        return target
    if output.shape == (*target.shape, 1) or target.shape == (*output.shape, 1):
        return target.reshape(output.shape)
    raise ValueError(
        f"Expected `target` to have the shape of the output, but got target={tuple(target.shape)} "
        f"and output={tuple(output.shape)}. Give the head one output per value of a target."
    )


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Compute the squared error, elementwise, ``(batch, ...)``, without a factor one half."""
    return (output - align_target(output, target)) ** 2


def half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Compute half the squared error, elementwise: the papers' loss of least squares."""
    return squared_error(output, target) / 2


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Compute the softmax cross-entropy per sample from logits ``(batch, classes, ...)``."""
    return F.cross_entropy(output, target, reduction="none")


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Compute the sigmoid cross-entropy, elementwise, from logits; targets are 0 or 1."""
    target = align_target(output, target).to(output.dtype)
    return F.binary_cross_entropy_with_logits(output, target, reduction="none")


def squared_hinge(output: Tensor, target: Tensor) -> Tensor:
    """Compute the squared hinge loss, elementwise; the classes are targets above 0 and others."""
    sign = 2 * (align_target(output, target) > 0).to(output.dtype) - 1
    return (1 - sign * output).clamp_min(0).square()


def class_matches(output: Tensor, target: Tensor) -> Tensor:
    """Return 1.0 where the largest logit is the target (an index, or probabilities), else 0.0."""
    if target.is_floating_point():
        target = target.argmax(1)
    return (output.argmax(1) == target).to(output.dtype)


def sign_matches(output: Tensor, target: Tensor) -> Tensor:
    """Return 1.0 where the logit's sign is that of the target 0 or 1, else 0.0."""
    return ((output > 0) == (align_target(output, target) > 0.5)).to(output.dtype)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mse": squared_error,
    "bce": binary_cross_entropy,
}


def one_per_sample(values: Tensor, batch_size: int) -> Tensor:
    """Average elementwise values over all axes but the first, ``(batch, ...)`` to ``(batch,)``.

    Raises:
        ValueError: If the first axis isn't the batch, for instance after ``reduction="mean"``.
    """
    if values.ndim == 0 or len(values) != batch_size:
        raise ValueError(
            f"Expected `loss` to return one value per sample, but got shape {tuple(values.shape)} "
            f"for {batch_size} samples. Use reduction='none'."
        )
    return values.flatten(1).mean(1) if values.ndim > 1 else values
