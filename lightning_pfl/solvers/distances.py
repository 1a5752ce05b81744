"""Distances of outputs to a target, sample by sample, for distillation."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Distance = Literal["l1", "l2", "kl"]


def distance_to(
    outputs: Tensor, target: Tensor, kind: Distance, temperature: float = 1.0
) -> Tensor:
    r"""Compute the distance of each sample's outputs to its target.

    ``"l1"`` and ``"l2"``: the mean absolute or squared difference over the outputs. ``"kl"``:
    :math:`T^2 \operatorname{KL}(\operatorname{softmax}(t/T) \,\|\, \operatorname{softmax}(o/T))`.

    Args:
        outputs: :math:`o`, ``(samples, outputs)``.
        target: :math:`t`, ``(samples, outputs)``.
        kind: Which distance.
        temperature: :math:`T > 0`.

    Returns:
        ``(samples,)``.

    Example:
        >>> import torch
        >>> outputs, target = torch.tensor([[1.0, 1, 0]]), torch.tensor([[1.0, 1.5, 0]])
        >>> [round(float(distance_to(outputs, target, kind)), 4) for kind in ("l1", "l2", "kl")]
        [0.1667, 0.0833, 0.0311]
    """
    if kind == "l1":
        return (outputs - target).abs().mean(1)
    if kind == "l2":
        return (outputs - target).square().mean(1)
    wanted = (target / temperature).log_softmax(1)
    found = (outputs / temperature).log_softmax(1)
    return temperature**2 * (wanted.exp() * (wanted - found)).sum(1)
