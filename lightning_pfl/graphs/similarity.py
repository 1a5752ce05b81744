"""Nearest-neighbour graphs of similar clients, by their labels or their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pfl.core.checks import check_integer
from lightning_pfl.core.tree import shapes
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.graphs.builders import GraphBuilder
from lightning_pfl.graphs.files import check_ending, read


class KNearest(GraphBuilder):
    """A graph with an edge where one client is among the other's nearest.

    Args:
        features: Features to compare by Euclidean distance, an array ``(clients, features)`` or the
            path of a ``.npy`` file: :func:`label_histograms`, which clients must disclose, or
            :func:`model_features`.
        neighbours: Number of nearest clients, at least 1.
    """

    def __init__(self, features: Any, neighbours: int = 5) -> None:
        check_integer("neighbours", neighbours, 1, "Use 5.")
        if isinstance(features, (str, Path)):
            check_ending("features", features, (".npy",))
        self.features, self.neighbours = features, neighbours

    def __call__(self, num_clients: int, seed: int) -> Any:
        """Build the union of both directions, with weights 1.

        Raises:
            FileNotFoundError: If the file doesn't exist.
            ValueError: If it can't be read, doesn't have one row per client, or there are at most
                ``neighbours`` clients.
        """
        from sklearn.neighbors import kneighbors_graph

        given = self.features
        if isinstance(given, (str, Path)):
            given = read("features", str(given))
        try:
            rows = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Expected `features` to be numbers, but got features={given!r}. Give an array "
                "(clients, features)."
            ) from error
        if rows.ndim != 2 or len(rows) != num_clients or not np.isfinite(rows).all():
            raise ValueError(
                f"Expected `features` to be finite, one row for each of {num_clients} clients, but "
                f"got the shape {rows.shape}. Give an array (clients, features)."
            )
        if num_clients <= self.neighbours:
            raise ValueError(
                f"Expected more than neighbours={self.neighbours!r} clients, but got "
                f"{num_clients}. Use a smaller number."
            )
        directed = kneighbors_graph(rows, self.neighbours)
        return directed.maximum(directed.T)


def label_histograms(data: FederatedTensorDataset, num_classes: int) -> Tensor:
    """Compute the share of each class in each client's samples, float64 ``(clients, classes)``.

    Args:
        data: A split whose second field is the label, an integer per sample.
        num_classes: Number of classes.
    """
    labels = data.fields[1]
    owner = torch.arange(data.num_clients).repeat_interleave(data.num_samples)
    positions = torch.cat([*data.indices, torch.empty(0, dtype=torch.int64)]).to(labels.device)
    place = owner * num_classes + labels[positions].long().cpu()
    counts = torch.bincount(place, minlength=data.num_clients * num_classes).double()
    counts = counts.view(data.num_clients, num_classes)
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def model_features(models: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Flatten the clients' models to rows, float64 ``(clients, scalars)``.

    All floating-point entries are included, buffers too, in the order of the first model.

    Args:
        models: A ``state_dict`` per client, such as
            ``[strategy.client_state_dict(name) for name in strategy.client_names]`` after a run of
            LocalOnly.

    Raises:
        ValueError: If the models don't have the same entries of the same shapes.

    Example:
        >>> model_features([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 5.0])}])
        tensor([[1., 2.],
                [0., 5.]], dtype=torch.float64)
    """
    found = [shapes(dict(model)) for model in models]
    for client, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                "Expected `models` to have the same entries of the same shapes, but got "
                f"{found[0]} of client 0 and {other} of client {client}. Use label_histograms for "
                "different architectures."
            )
    names = [name for name, leaf in models[0].items() if leaf.is_floating_point()] if models else []
    rows = [torch.cat([model[name].flatten().double() for name in names]) for model in models]
    return torch.stack(rows).cpu() if rows else torch.zeros(0, 0, dtype=torch.float64)
