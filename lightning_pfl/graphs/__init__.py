"""Graphs of clients: builders, graphs from matrices or networkx, and messages over their edges."""

from lightning_pfl.graphs.builders import (
    Complete,
    ErdosRenyi,
    GraphBuilder,
    Metropolis,
    Ring,
    ScaleFree,
    SmallWorld,
)
from lightning_pfl.graphs.files import MatrixFile
from lightning_pfl.graphs.graph import Graph
from lightning_pfl.graphs.resolve import BUILDERS, GraphLike, resolve_graph
from lightning_pfl.graphs.similarity import KNearest, label_histograms, model_features

__all__ = [
    "BUILDERS",
    "Complete",
    "ErdosRenyi",
    "Graph",
    "GraphBuilder",
    "GraphLike",
    "KNearest",
    "MatrixFile",
    "Metropolis",
    "Ring",
    "ScaleFree",
    "SmallWorld",
    "label_histograms",
    "model_features",
    "resolve_graph",
]
