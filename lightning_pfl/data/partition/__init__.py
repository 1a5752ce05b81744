"""Partitions: who holds which sample."""

from .base import Partition, Parts
from .consecutive import ConsecutiveClasses
from .draw import draw
from .features import FeatureSkew
from .given import FlowerPartitioner, Natural
from .held_out import HeldOutClasses
from .labels import ClassesPerClient, Dirichlet, LabelSkew
from .sizes import IID, LogNormalSizes, QuantitySkew

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
