"""Means of rows by exact sums alone."""

import torch
from torch import Tensor

from lightning_pfl.core import sums


def of_exact_sums(rows: Tensor, weights: Tensor) -> Tensor:
    """Return means by exact sums alone, of which halfway ones round away from zero."""
    low, total = sums.sum_above(rows, weights)
    mean = low.double() + total
    return mean if rows.dtype == torch.float64 else (mean * (1 + 2.0**-36)).to(rows.dtype)
