"""The distance between the subspaces of two representations."""

from __future__ import annotations

import torch
from torch import Tensor


def principal_angle_distance(first: Tensor, second: Tensor) -> Tensor:
    r"""Compute the sine of the largest principal angle between two column spaces.

    .. math::
        \operatorname{dist}(B, B_*) = \lVert (I - Q Q^\top)\, Q_* \rVert_2 \in [0, 1]

    with orthonormal bases :math:`Q, Q_*` of the columns of :math:`B, B_*`. It is 0 for equal
    subspaces and 1 if a direction of one is orthogonal to the other. For subspaces of equal
    dimension it is symmetric.

    Args:
        first: :math:`B`, ``(..., d, k)``, with independent columns.
        second: :math:`B_*`, ``(..., d, k)``, with independent columns.

    Returns:
        The distance, ``(...)``. The released notebook of the paper plots its square.

    Raises:
        ValueError: If the matrices don't have one shape with k <= d, or the columns are dependent.

    Example:
        >>> axes = torch.eye(3)
        >>> float(principal_angle_distance(axes[:, :2], axes[:, 1:]))
        1.0

    References:
        Jain, Netrapalli, Sanghavi. Low-rank matrix completion using alternating minimization.
        STOC 2013. arXiv:1212.0467, definition 4.1. Collins, Hassani, Mokhtari, Shakkottai.
        Exploiting shared representations for personalized federated learning. ICML 2021.
        arXiv:2102.07078, definition 1.
    """
    if first.ndim < 2 or first.shape[-2:] != second.shape[-2:] or first.shape[-1] > first.shape[-2]:
        raise ValueError(
            "Expected `first` and `second` to be matrices of one shape (d, k) with k <= d, but got "
            f"first={tuple(first.shape)} and second={tuple(second.shape)}. "
            "Give the bases as columns: transpose the weight of a Linear layer."
        )
    basis, other = orthonormal_basis(first), orthonormal_basis(second)
    residual = other - basis @ (basis.mT @ other)
    distance: Tensor = torch.linalg.matrix_norm(residual, ord=2).clamp(max=1)
    return distance


def orthonormal_basis(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, ``(..., d, k)``.

    Args:
        matrix: ``(..., d, k)`` with independent columns.

    Raises:
        ValueError: If the columns are dependent, up to rounding.
    """
    ranks = torch.linalg.matrix_rank(matrix)
    if (ranks < matrix.shape[-1]).any():
        raise ValueError(
            f"Expected `matrix` to have {matrix.shape[-1]} independent columns, but got rank "
            f"{int(ranks.min())}. Drop columns, or start from a random matrix."
        )
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis
