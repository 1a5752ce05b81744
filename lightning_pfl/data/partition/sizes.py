"""Partitions of random samples in different sizes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from lightning_pfl.core.checks import check_share
from lightning_pfl.data.partition.base import (
    Array,
    Partition,
    Parts,
    check_clients,
    check_min_size,
    check_positive,
    cut_by_shares,
    top_up,
)


class SizePartition(Partition):
    """Random samples for every client, in sizes proportional to a subclass's `shares`."""

    min_size = 1

    @abstractmethod
    def shares(self, num_clients: int, rng: Generator) -> npt.NDArray[np.float64]:
        """Return the relative size of each client, ``(num_clients,)``."""

    def split(self, labels: Array, num_clients: int | None, rng: Generator) -> tuple[Parts, Any]:
        """Draw the shares and assign all samples; small clients are topped up."""
        clients = check_clients(len(labels), num_clients, self.min_size)
        plan = self.shares(clients, rng)
        return top_up(self.apply(labels, plan, rng), self.min_size, rng), plan

    def apply(self, labels: Array, plan: Any, rng: Generator) -> Parts:
        """Assign all samples by the same shares."""
        return cut_by_shares(rng.permutation(len(labels)), plan)


class IID(SizePartition):
    """Random samples in equal sizes, which differ by one at most.

    All samples are used.

    Example:
        >>> sorted(len(part) for part in IID()(np.zeros(7), 3, np.random.default_rng(0)))
        [2, 2, 3]
    """

    def shares(self, num_clients: int, rng: Generator) -> npt.NDArray[np.float64]:
        """Return equal shares."""
        return np.ones(num_clients)


class LogNormalSizes(SizePartition):
    r"""Random samples in log-normal sizes.

    Client :math:`k` gets a share in proportion to :math:`e^{\sigma z_k}` with standard normal
    :math:`z_k`. All samples are used, so the mean size is samples / clients.

    Args:
        sigma: :math:`\sigma > 0`, standard deviation of the logarithm of the size. With 1 the
            largest of 100 clients has about ten times the samples of a typical one.
        min_size: Smallest number of samples of a client, at least 0, before the data module cuts
            validation (and, without a test set, test) samples off them; smaller ones are topped up.
    """

    def __init__(self, sigma: float = 1.0, min_size: int = 1) -> None:
        self.sigma = check_positive("sigma", sigma)
        self.min_size = check_min_size(min_size)

    def shares(self, num_clients: int, rng: Generator) -> npt.NDArray[np.float64]:
        """Return one log-normal share per client, scaled so that the largest is 1."""
        # Subtracting the maximum first keeps exp finite for any sigma.
        logs = self.sigma * rng.standard_normal(num_clients)
        shares: npt.NDArray[np.float64] = np.exp(logs - logs.max())
        return shares


class QuantitySkew(SizePartition):
    """Random samples in two sizes: the last clients have ``ratio`` times fewer than the others.

    All samples are used. The defaults are the quantity skew of the FedMAP experiments (of ten
    clients, five hold 2000 samples and five hold 500).

    Args:
        ratio: Size of a large client over the size of a small one, positive.
        small_fraction: Share of clients that are small, in [0, 1], rounded to a number of clients;
            the last ones.
    """

    def __init__(self, ratio: float = 4.0, small_fraction: float = 0.5) -> None:
        self.ratio = check_positive("ratio", ratio)
        self.small_fraction = check_share("small_fraction", small_fraction)

    def shares(self, num_clients: int, rng: Generator) -> npt.NDArray[np.float64]:
        """Return ``ratio`` for the first and 1 for the last clients."""
        num_small = round(self.small_fraction * num_clients)
        shares = np.full(num_clients, self.ratio)
        shares[num_clients - num_small :] = 1.0
        return shares
