"""Values per sample, summaries over clients and rounds, and distances between subspaces."""

from typing import TYPE_CHECKING

from lightning_pfl.core.lazy import lazy_names
from lightning_pfl.metrics.clusters import (
    adjusted_rand_index,
    clusters_of_models,
    clusters_of_pairs,
    within_cluster_distance,
)
from lightning_pfl.metrics.history import BestValidationRound, LastRounds
from lightning_pfl.metrics.subspace import orthonormal_basis, principal_angle_distance
from lightning_pfl.metrics.summary import STATISTICS, summarize

if TYPE_CHECKING:
    from lightning_pfl.solvers.centralized.recovery import (
        Bounds,
        cluster_models,
        consensus_weight,
        recovery_bounds,
        recovery_interval,
    )

__all__ = [
    "summarize",
    "STATISTICS",
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

# It builds on solvers, and these on `lightning_pfl.data`: far more than the other names need.
__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(
        ("Bounds", "cluster_models", "consensus_weight", "recovery_bounds", "recovery_interval"),
        "lightning_pfl.solvers.centralized.recovery",
    ),
)
