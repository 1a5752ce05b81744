"""Small networks in modules of users: the first rounds, which make recordings, and later ones.

Clients of equal sizes, and of log-normal ones, whose last minibatches have any size, against the
plain loop in turns, in CPU time of one thread.
"""

import gc
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.cells import InTurns, check_workload, run, use_threads
from benchmarks.workloads import NETWORKS, THREE, of_users
from lightning_pfl import FederatedStrategy

FIRST, LATER = 10, 8
"""Rounds from the first one on, with the probe and most recordings, and rounds after these."""
SIGMAS = (0.0, 1.0)


@dataclass(frozen=True)
class Row:
    """What was measured of a network, a method and the sizes of the clients.

    Attributes:
        first: The loop's CPU seconds over the package's in the first rounds, summed.
        later: The same of medians of later rounds.
        cpu_seconds: The package's median of these.
        choice: The engine that ran.
    """

    first: float
    later: float
    cpu_seconds: float
    choice: str

    @classmethod
    def of(cls, clock: InTurns, first: int, strategy: FederatedStrategy) -> "Row":
        """Return the row of a clock, of which some rounds are the first."""
        ours, theirs = ([cpu for cpu, _ in side] for side in (clock.ours, clock.theirs))
        late = median(ours[first:])
        return cls(
            sum(theirs[:first]) / sum(ours[:first]),
            median(theirs[first:]) / late,
            late,
            strategy.federation.engine.choices["training_step"],
        )

    def describe(self, key: str) -> str:
        """Write a line."""
        milliseconds = f"{1e3 * self.cpu_seconds:8.1f} ms"
        return f"{key:32}{self.first:7.2f}{self.later:7.2f}{milliseconds}  {self.choice[:40]}"


HEAD = f"{'network, method, sigma':32}{'first':>7}{'later':>7}  a later round"


def combinations() -> list[tuple[str, str, float]]:
    """Return what is measured: networks, methods and the spread of sizes."""
    return [(name, method, sigma) for name in NETWORKS for sigma in SIGMAS for method in THREE]


def measure(name: str, method: str, sigma: float, check: bool = True) -> dict[str, Any]:
    """Measure a row.

    Args:
        name: A key of :data:`~benchmarks.workloads.NETWORKS`.
        method: A key of ``plain.METHODS``.
        sigma: Of the logarithm of the clients' sizes.
        check: Whether to compare the models of both sides in double precision before.

    Raises:
        AssertionError: If they differ.
    """
    gc.collect()
    workload = of_users(name, sigma)
    if check:
        check_workload(f"a user's {name}", workload, method, "auto")
    with use_threads(1):
        clock, strategy = run(workload, method, "auto", FIRST + LATER)
    return asdict(Row.of(clock, FIRST, strategy))
