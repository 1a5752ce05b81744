"""Normal distributions of components: densities of torch, and components without samples."""

from __future__ import annotations

import math

import torch

from lightning_pfl.solvers.normals import SMALLEST, estimated, log_densities, weighted_sums


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).double()


def test_densities_are_torchs_but_for_the_constant() -> None:
    x, mean = draw(2, 5, 3), draw(2, 4, 3, 1)[..., 0]
    variance = mean.square() + 0.1
    found = log_densities(x, mean, variance)
    normal = torch.distributions.Normal(mean.unsqueeze(1), variance.sqrt().unsqueeze(1))
    expected = normal.log_prob(x.unsqueeze(2)).sum(3) + 3 * math.log(2 * math.pi) / 2
    torch.testing.assert_close(found, expected)


def test_a_component_without_samples_stays_and_equal_samples_have_some_variance() -> None:
    x = torch.tensor([[[2.0], [2.0], [5.0]]])
    q = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]]).double()
    first, second = (sums[0] for sums in weighted_sums(x, q))
    old = torch.tensor([[7.0], [8.0]]), torch.tensor([[0.7], [0.8]])
    mean, variance = estimated(q.sum((0, 1)), first, second, *old)
    torch.testing.assert_close(mean, torch.tensor([[2.0], [8.0]]))
    torch.testing.assert_close(variance, torch.tensor([[SMALLEST], [0.8]]))
