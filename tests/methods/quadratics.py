"""Ragged quadratic clients that the methods' closed forms share.

Client k has the loss a_k/2 ||w - c_k||^2 in every minibatch, so K steps of plain SGD map w to
c_k + (1 - lr a_k)^K (w - c_k): ``descend``. Minibatches of three give the clients 2, 1 and 3 steps
an epoch; the fourth client has no samples and is never sampled.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.testing import quadratic_clients

closed_form = pytest.mark.quick
"""Mark of a method's closed form, so that `make quick` runs it."""
A = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
C = torch.tensor([[0.0, 1.0], [1.0, -2.0], [3.0, 0.5], [-1.0, 2.0]], dtype=torch.float64)
SAMPLES = torch.tensor([4, 1, 7, 0])
STEPS = torch.tensor([2, 1, 3, 0])
LR = 0.1


def ragged() -> FederatedTensorDataset:
    """The four clients above."""
    return quadratic_clients(A, C, SAMPLES.tolist(), batch_size=3, shuffle=True)


def mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over the clients, ``(dim,)``; weights need no normalisation."""
    weights = weights.double()
    return (weights / weights.sum()) @ values


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-10, the tolerance for whole rounds in double precision."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
