"""Callbacks for any method: fine-tuning, neighbours, new clients, each client's best round."""

from lightning_pfl.callbacks.best_round import BestRound
from lightning_pfl.callbacks.head_fine_tuning import HeadFineTuning
from lightning_pfl.callbacks.nearest_neighbours import NearestNeighbours
from lightning_pfl.callbacks.new_clients.callback import NewClientAdaptation
from lightning_pfl.inspect import (
    ClientGraph,
    ClientHeatMap,
    ClientHistogram,
    ClientMap,
    ClusterMonitor,
    DriftMonitor,
    PairwiseDistance,
    PartitionPicture,
    PriorMonitor,
    SubspaceDistance,
)

__all__ = [
    "BestRound",
    "HeadFineTuning",
    "NearestNeighbours",
    "NewClientAdaptation",
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
]
