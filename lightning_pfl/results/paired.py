"""Differences between two methods on the same clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Paired:
    """A method minus another one, client by client.

    Attributes:
        clients: Names of the clients.
        differences: One for each client, ``(clients,)``; positive where the method is better.
        mean: Their mean.
        low, high: The 95 % bootstrap interval of the mean, over clients.
    """

    clients: Sequence[str]
    differences: NDArray[np.float64]
    mean: float
    low: float
    high: float

    @property
    def better(self) -> int:
        """Number of clients that gain."""
        return int((self.differences > 0).sum())

    @property
    def worse(self) -> int:
        """Number of clients that lose."""
        return int((self.differences < 0).sum())

    @property
    def verdict(self) -> str:
        """``"above"`` or ``"below"`` where the interval excludes 0."""
        if self.low > 0:
            return "above"
        return "below" if self.high < 0 else "no difference seen"


def pair(
    method: Mapping[str, float], other: Mapping[str, float], larger_is_better: bool
) -> Paired | None:
    """Compare two methods on the clients that both have a value for.

    The interval is of the mean over clients like these, for the seeds at hand: clients are
    resampled, with a fixed seed, and the percentiles of the means taken.

    Args:
        method: Value of each client.
        other: The same of the method to compare with.
        larger_is_better: True for an accuracy, False for a loss.

    Returns:
        The comparison; None for fewer than two clients in common.
    """
    # Imported here, as it takes a second.
    from scipy.stats import bootstrap

    clients = [client for client in method if client in other]
    if len(clients) < 2:
        return None
    sign = 1.0 if larger_is_better else -1.0
    differences = sign * np.array([method[client] - other[client] for client in clients])
    mean = float(differences.mean())
    if np.ptp(differences) == 0 or np.isnan(mean):
        return Paired(clients, differences, mean, mean, mean)
    found = bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Paired(clients, differences, mean, float(found.low), float(found.high))
