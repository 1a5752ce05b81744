"""Federated data: datasets, partitions, sources and the data module."""

from lightning_pfl.data.datamodule import FederatedDataModule
from lightning_pfl.data.datasets import (
    Batch,
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
    as_federated,
    label_counts,
)
from lightning_pfl.data.fresh import FreshDataModule
from lightning_pfl.data.holdout import Cut, LastSamples, Stratified, WholeGroups
from lightning_pfl.data.partition import (
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
from lightning_pfl.data.sources.base import FreshSource, Source, SourceData
from lightning_pfl.data.sources.cifar import CIFAR10, CIFAR100
from lightning_pfl.data.sources.digits import Digits
from lightning_pfl.data.sources.ellipses import EllipseClusters
from lightning_pfl.data.sources.fashion_mnist import FashionMNIST
from lightning_pfl.data.sources.fedmap_synthetic import FedMAPSynthetic
from lightning_pfl.data.sources.femnist import FEMNIST
from lightning_pfl.data.sources.image_domains import ImageDomains
from lightning_pfl.data.sources.sent140 import Sent140
from lightning_pfl.data.sources.shifted_lines import ShiftedLines
from lightning_pfl.data.sources.synthetic import LinearRepresentation, QuadraticClients
from lightning_pfl.data.sources.table import HuggingFaceTable
from lightning_pfl.data.subspaces import subspace_clusters

__all__ = [
    "FederatedDataModule",
    "FreshDataModule",
    "FederatedTensorDataset",
    "FederatedLoaders",
    "FederatedDataset",
    "Batch",
    "as_federated",
    "label_counts",
    "subspace_clusters",
    "Cut",
    "Stratified",
    "LastSamples",
    "WholeGroups",
    "Source",
    "FreshSource",
    "SourceData",
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
