"""Figures and monitors of a federated run, for TensorBoard."""

from lightning_pfl.inspect.client_graph import ClientGraph
from lightning_pfl.inspect.client_heat_map import ClientHeatMap
from lightning_pfl.inspect.client_histogram import ClientHistogram
from lightning_pfl.inspect.client_map import ClientMap
from lightning_pfl.inspect.cluster_monitor import ClusterMonitor
from lightning_pfl.inspect.dendrogram import draw_dendrogram, draw_path
from lightning_pfl.inspect.drift import DriftMonitor
from lightning_pfl.inspect.pairwise_distance import PairwiseDistance
from lightning_pfl.inspect.partition_picture import PartitionPicture
from lightning_pfl.inspect.prior_monitor import PriorMonitor
from lightning_pfl.inspect.subspace_distance import SubspaceDistance

__all__ = [
    "ClientGraph",
    "ClientHeatMap",
    "ClientHistogram",
    "ClientMap",
    "ClusterMonitor",
    "DriftMonitor",
    "PairwiseDistance",
    "PartitionPicture",
    "PriorMonitor",
    "SubspaceDistance",
    "draw_dendrogram",
    "draw_path",
]
