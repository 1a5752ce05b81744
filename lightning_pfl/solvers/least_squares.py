"""Least squares of many clients at once, and the method of moments for their common subspace."""

from __future__ import annotations

import torch
from torch import Tensor


def least_squares(
    features: Tensor, targets: Tensor, real: Tensor | None = None, ridge: float = 0.0
) -> Tensor:
    r"""Solve each client's least-squares problem in one batched call.

    .. math::
        \arg\min_w \frac{1}{2 m} \lVert y - A w \rVert^2 + \frac{\rho}{2} \lVert w \rVert^2

    With :math:`\rho = 0` and dependent columns, such as :math:`m < k`, the solution of least norm.

    Args:
        features: :math:`A`, ``(clients, m, k)``.
        targets: :math:`y`, ``(clients, m)``.
        real: Mask of real samples, bool ``(clients, m)``; None: all.
        ridge: :math:`\rho \ge 0`.

    Returns:
        :math:`w`, ``(clients, k)``; zero for a client without samples, NaN for a client whose
        samples aren't finite. In 16 bits the solution in single precision is rounded.

    Example:
        >>> least_squares(torch.tensor([[[1.0, 1.0]]]), torch.tensor([[2.0]])).round(decimals=5)
        tensor([[1., 1.]])
    """
    if real is not None:  # rows of zeros don't change w
        features = features.where(real.unsqueeze(2), 0)
        targets = targets.where(real, 0)
    given = features.dtype
    if given in (torch.bfloat16, torch.float16):  # no solver has them
        features, targets = features.float(), targets.float()
    if ridge > 0:
        features, targets = _with_ridge(features, targets, real, ridge)
    # LAPACK refuses the entire batch for one number that isn't finite.
    finite = features.isfinite().all(2).all(1) & targets.isfinite().all(1)
    features = features.where(finite.view(-1, 1, 1), 0)
    right = targets.where(finite.unsqueeze(1), 0).unsqueeze(2)
    if features.device.type == "cpu":
        # By singular values, so that small ones are cut off for each client.
        solution: Tensor = torch.linalg.lstsq(features, right, driver="gelsd").solution
    else:  # the only driver on GPUs needs independent columns
        solution = torch.linalg.pinv(features) @ right
    return solution.squeeze(2).where(finite.unsqueeze(1), torch.nan).to(given)


def _with_ridge(
    features: Tensor, targets: Tensor, real: Tensor | None, ridge: float
) -> tuple[Tensor, Tensor]:
    """Append the penalty as samples: k rows of the identity with target zero."""
    clients, samples, width = features.shape
    count = features.new_full((clients,), samples) if real is None else real.sum(1).to(features)
    identity = torch.eye(width, dtype=features.dtype, device=features.device)
    # A client without samples gets the identity itself, whose solution is zero.
    rows = (ridge * count.clamp_min(1)).sqrt().view(-1, 1, 1) * identity
    return torch.cat([features, rows], 1), torch.cat(
        [targets, targets.new_zeros(clients, width)], 1
    )


def residuals(features: Tensor, targets: Tensor, weights: Tensor, real: Tensor) -> Tensor:
    """Compute a linear fit's residuals with the sign of the gradient, ``(clients, m)``.

    Args:
        features: ``(clients, m, k)``.
        targets: ``(clients, m)``.
        weights: ``(clients, k)``.
        real: Mask of real samples, bool ``(clients, m)``; others have residual zero.
    """
    found: Tensor = torch.einsum("cmk,ck->cm", features, weights) - targets
    return found.where(real, 0)


def mean_product(features: Tensor, values: Tensor, real: Tensor) -> Tensor:
    r"""Compute :math:`\frac1m A^\top r`, the gradient of half a mean of squares, ``(clients, k)``.

    Args:
        features: :math:`A`, ``(clients, m, k)``.
        values: :math:`r`, ``(clients, m)``, zero for padding.
        real: Mask of real samples, bool ``(clients, m)``.
    """
    count = real.sum(1, keepdim=True).clamp_min(1).to(features)
    return torch.einsum("cmk,cm->ck", features, values) / count


def moments(inputs: Tensor, targets: Tensor, real: Tensor) -> Tensor:
    r"""Compute :math:`Z = \frac1m \sum_j y_j^2 x_j x_j^\top`, ``(clients, d, d)``.

    For Gaussian inputs and :math:`y = w^\top B^\top x` its expectation is :math:`\lVert w
    \rVert^2 I + 2 B w w^\top B^\top`: the columns of :math:`B` are the leading eigenvectors of a
    mean over clients whose heads span all directions.

    Args:
        inputs: ``(clients, m, d)``.
        targets: ``(clients, m)``.
        real: Mask of real samples, bool ``(clients, m)``.
    """
    scaled = inputs * targets.where(real, 0).unsqueeze(2)
    count = real.sum(1).clamp_min(1).to(inputs)
    return scaled.mT @ scaled / count.view(-1, 1, 1)


def upper_triangle(matrices: Tensor) -> Tensor:
    """Extract the upper triangle of symmetric matrices, ``(..., d (d + 1) / 2)``."""
    row, column = torch.triu_indices(*matrices.shape[-2:], device=matrices.device)
    return matrices[..., row, column]


def symmetric(triangle: Tensor, width: int) -> Tensor:
    """Restore the symmetric matrix ``(width, width)`` from its :func:`upper_triangle`."""
    row, column = torch.triu_indices(width, width, device=triangle.device)
    matrix = triangle.new_zeros(width, width)
    matrix[row, column] = triangle
    matrix[column, row] = triangle
    return matrix


def leading_eigenvectors(matrix: Tensor, count: int) -> Tensor:
    """Find orthonormal eigenvectors of the largest eigenvalues, as columns ``(d, count)``.

    Args:
        matrix: Symmetric, ``(d, d)``.
        count: Number of eigenvectors, in [1, d].

    Returns:
        By descending eigenvalue, each with its largest entry positive to fix the sign.
    """
    vectors = torch.linalg.eigh(matrix.double()).eigenvectors.flip(1)[:, :count]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    signed: Tensor = vectors * largest.sign()
    return signed.to(matrix)
