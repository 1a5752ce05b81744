"""Federated data: datasets, partitions, sources and the data module."""

from .clients import (
    Batch,
    FederatedDataset,
    FederatedLoaders,
    FederatedTensorDataset,
    as_federated,
    nonfinite_clients,
)

__all__ = [
    "Batch",
    "FederatedDataset",
    "FederatedLoaders",
    "FederatedTensorDataset",
    "as_federated",
    "nonfinite_clients",
]
