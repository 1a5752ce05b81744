"""Values per sample, summaries over clients and rounds, and distances between subspaces."""

from typing import TYPE_CHECKING, Any

from lightning_pfl.metrics.clusters import (
    adjusted_rand_index,
    clusters_of_models,
    clusters_of_pairs,
    within_cluster_distance,
)
from lightning_pfl.metrics.fairness import fairness, gini, jain_index
from lightning_pfl.metrics.history import BestValidationRound, LastRounds
from lightning_pfl.metrics.subspace import orthonormal_basis, principal_angle_distance
from lightning_pfl.metrics.summary import STATISTICS, summarize

if TYPE_CHECKING:
    from lightning_pfl.metrics.recovery import (
        Bounds,
        cluster_models,
        consensus_weight,
        recovery_bounds,
        recovery_interval,
    )

__all__ = [
    "summarize",
    "STATISTICS",
    "fairness",
    "jain_index",
    "gini",
    "principal_angle_distance",
    "orthonormal_basis",
    "clusters_of_pairs",
    "clusters_of_models",
    "adjusted_rand_index",
    "within_cluster_distance",
    "LastRounds",
    "BestValidationRound",
    "Bounds",
    "cluster_models",
    "consensus_weight",
    "recovery_bounds",
    "recovery_interval",
]

RECOVERY = ("Bounds", "cluster_models", "consensus_weight", "recovery_bounds", "recovery_interval")


def __getattr__(name: str) -> Any:
    """Load what solves problems when it is asked for: the solvers import this package."""
    if name not in RECOVERY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_pfl.metrics import recovery

    return getattr(recovery, name)
