"""Nearest neighbours among stored features, and the mixture of their votes with a model."""

from __future__ import annotations

import torch
from torch import Tensor

SHARES = tuple(tenths / 10 for tenths in range(11))
"""The shares among which validation data choose."""


def neighbour_votes(
    queries: Tensor,
    keys: Tensor,
    labels: Tensor,
    stored: Tensor,
    neighbours: int,
    classes: int,
    scale: float = 1.0,
) -> Tensor:
    r"""Compute class probabilities from the nearest keys.

    .. math::
        p(c \mid z) \propto \sum_{i \in N(z),\, y_i = c} e^{-\lVert z - z_i \rVert^2 / (D s)}

    Of keys at the same distance the first ones are nearer.

    Args:
        queries: :math:`z`, ``(samples, D)``.
        keys: :math:`z_i`, ``(stored, D)``.
        labels: :math:`y_i`, int64 ``(stored,)``.
        stored: Which keys there are, bool ``(stored,)``.
        neighbours: The number of neighbours, >= 1; more than there are is all of them.
        classes: The number of classes.
        scale: :math:`s > 0`.

    Returns:
        float64 ``(samples, classes)``; 0 where nothing is stored.

    Example:
        >>> keys = torch.tensor([[0.0, 0], [1, 0], [0, 2], [3, 3]])
        >>> labels, stored = torch.tensor([0, 1, 1, 2]), torch.ones(4, dtype=torch.bool)
        >>> neighbour_votes(torch.tensor([[0.5, 0.0]]), keys, labels, stored, 3, 3)
        tensor([[0.4683, 0.5317, 0.0000]], dtype=torch.float64)
    """
    # In double precision, as near keys have small differences of large squares; and in memory of
    # their own, as a product's last bits depend on where a client's keys begin among others'.
    queries, keys = (leaf.to(torch.float64, copy=True) for leaf in (queries, keys))
    squares = queries.square().sum(1, keepdim=True) + keys.square().sum(1)
    distances = (squares - 2 * queries @ keys.T).clamp_min(0)
    distances = distances.where(stored, torch.inf)
    nearest, order = distances.sort(dim=1, stable=True)
    nearest, order = nearest[:, :neighbours], order[:, :neighbours]
    shares = torch.softmax(-nearest / (keys.shape[1] * scale), 1)
    votes = torch.nn.functional.one_hot(labels[order], classes) * shares.unsqueeze(2)
    return votes.sum(1).where(stored.any(), 0)


def mixed_logits(outputs: Tensor, votes: Tensor, share: Tensor | float) -> Tensor:
    r"""Compute :math:`\log(\lambda v + (1 - \lambda) \operatorname{softmax}(o))`.

    These are logits: their softmax is the mixture.

    Args:
        outputs: Logits :math:`o`, ``(samples, classes)``.
        votes: Probabilities :math:`v`, ``(samples, classes)``.
        share: :math:`\lambda` in [0, 1].

    Example:
        >>> votes, outputs = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.2, 0.8]]).log()
        >>> mixed_logits(outputs, votes, 0.5).exp()
        tensor([[0.3500, 0.6500]])
    """
    share = torch.as_tensor(share, dtype=torch.float64, device=outputs.device)
    model = torch.log1p(-share) + outputs.double().log_softmax(1)
    return torch.logaddexp(model, share.log() + votes.log()).to(outputs.dtype)


def best_share(outputs: Tensor, votes: Tensor, labels: Tensor) -> float:
    """Choose the share of the votes with the smallest mean log loss; the smaller one of equals.

    Args:
        outputs: Logits, ``(samples, classes)``.
        votes: Probabilities, ``(samples, classes)``.
        labels: The true classes, int64 ``(samples,)``.
    """
    at = labels.unsqueeze(1)
    losses = [
        -mixed_logits(outputs.double(), votes, share).gather(1, at).mean() for share in SHARES
    ]
    return SHARES[int(torch.stack(losses).argmin())]
