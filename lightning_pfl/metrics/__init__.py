"""Values per sample, summaries over clients and rounds, and distances between subspaces."""

from lightning_pfl.metrics.clusters import (
    adjusted_rand_index,
    clusters_of_models,
    clusters_of_pairs,
    within_cluster_distance,
)
from lightning_pfl.metrics.subspace import orthonormal_basis, principal_angle_distance
from lightning_pfl.metrics.summary import STATISTICS, summarize

__all__ = [
    "summarize",
    "STATISTICS",
    "principal_angle_distance",
    "orthonormal_basis",
    "clusters_of_pairs",
    "clusters_of_models",
    "adjusted_rand_index",
    "within_cluster_distance",
]
