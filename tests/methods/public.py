"""Public samples for the tests of methods that compare models on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pfl.core.randomness import derive, permutation
from lightning_pfl.data.datasets import FederatedTensorDataset

SAMPLES = 9


def pictures(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Public pictures like those of the small clients."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 1, 5, 5, generator=generator, dtype=torch.float64).to(dtype)


def with_public(make: Callable[[], nn.Module], **minibatches: Any) -> Callable[..., Any]:
    """Give a module public pictures, whose labels are wrong: no method may learn from them."""

    def made(dtype: torch.dtype = torch.float64) -> Any:
        module: Any = make().to(dtype)

        def public_dataloader() -> FederatedTensorDataset:
            given = {"batch_size": 3, **minibatches}
            fields = pictures(next(module.parameters()).dtype), torch.full((SAMPLES,), 2)
            return FederatedTensorDataset(fields, [torch.arange(SAMPLES)], **given)

        module.public_dataloader = public_dataloader
        return module

    return made


def drawn(round: int, samples: int, seed: int = 0) -> torch.Tensor:
    """Positions of a round's public pictures, in their order."""
    return permutation(SAMPLES, derive(seed, "public", round))[:samples]
