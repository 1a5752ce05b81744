"""Partitions of samples over clients."""

from lightning_pfl.data.partition.base import Partition, Parts
from lightning_pfl.data.partition.consecutive import ConsecutiveClasses
from lightning_pfl.data.partition.draw import draw
from lightning_pfl.data.partition.features import FeatureSkew
from lightning_pfl.data.partition.given import FlowerPartitioner, Natural
from lightning_pfl.data.partition.held_out import HeldOutClasses
from lightning_pfl.data.partition.labels import ClassesPerClient, Dirichlet, LabelSkew
from lightning_pfl.data.partition.sizes import IID, LogNormalSizes, QuantitySkew

__all__ = [
    "IID",
    "ClassesPerClient",
    "ConsecutiveClasses",
    "Dirichlet",
    "LogNormalSizes",
    "QuantitySkew",
    "LabelSkew",
    "FeatureSkew",
    "HeldOutClasses",
    "Natural",
    "FlowerPartitioner",
    "Partition",
    "Parts",
    "draw",
]
