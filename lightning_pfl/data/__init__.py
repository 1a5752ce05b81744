"""Federated data: datasets, partitions, sources and the data module."""

from .cifar import CIFAR10, CIFAR100
from .clients import (
    Batch,
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
    as_federated,
    nonfinite_clients,
)
from .datamodule import FederatedDataModule
from .digits import Digits
from .ellipses import EllipseClusters
from .fashion_mnist import FashionMNIST
from .fedmap_synthetic import FedMAPSynthetic
from .femnist import FEMNIST
from .fresh import FreshSamples
from .image_domains import ImageDomains
from .partition import (
    IID,
    ClassesPerClient,
    ConsecutiveClasses,
    Dirichlet,
    FeatureSkew,
    FlowerPartitioner,
    HeldOutClasses,
    LabelSkew,
    LogNormalSizes,
    Natural,
    Partition,
    QuantitySkew,
    draw,
)
from .sent140 import Sent140
from .shifted_lines import ShiftedLines
from .source import Arrays, FreshSource, Source
from .synthetic import LinearRepresentation, QuadraticClients
from .table import HuggingFaceTable

__all__ = [
    "FederatedDataModule",
    "FreshSamples",
    "FederatedTensorDataset",
    "FederatedLoaders",
    "FederatedDataset",
    "Batch",
    "as_federated",
    "nonfinite_clients",
    "Source",
    "FreshSource",
    "Arrays",
    "Digits",
    "FashionMNIST",
    "CIFAR10",
    "CIFAR100",
    "FEMNIST",
    "Sent140",
    "ImageDomains",
    "HuggingFaceTable",
    "QuadraticClients",
    "LinearRepresentation",
    "EllipseClusters",
    "ShiftedLines",
    "FedMAPSynthetic",
    "Partition",
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
    "draw",
]
