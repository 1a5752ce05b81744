"""Facts about the federation that a method may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.parameters import ParameterSplit


@dataclass(frozen=True)
class Known:
    """Facts about the federation that a method may use, before the first round.

    Attributes:
        parameter_split: The split of parameters into shared, personal and static ones.
        num_clients: Number of clients in the federation, sampled or not.
        seed: Seed of every random choice of the run.
        num_samples: Training samples of each client, int64 ``(num_clients,)``; 0 without training.
        has_training_data: Clients with a minibatch to train on, bool ``(num_clients,)``; clients
            with samples, until the loop has counted minibatches.
        model_sizes: Trainable scalars of each client's model, int64 ``(num_clients,)``.
        label_counts: Training samples of each client by class, int64 ``(num_clients, classes)``;
            None outside of a fit, and where the data have no classes that can be counted.
    """

    parameter_split: ParameterSplit
    num_clients: int
    seed: int
    num_samples: Tensor
    has_training_data: Tensor
    model_sizes: Tensor
    label_counts: Tensor | None = None

    @classmethod
    def of(
        cls,
        parameter_split: ParameterSplit,
        num_clients: int,
        seed: int = 0,
        num_samples: Tensor | None = None,
        model_sizes: Tensor | None = None,
    ) -> Known:
        """Fill in attributes that follow from others.

        Args:
            parameter_split: As above.
            num_clients: As above.
            seed: As above.
            num_samples: As above; None without training.
            model_sizes: As above; None if all clients have the model of ``parameter_split``.
        """
        if num_samples is None:
            num_samples = torch.zeros(num_clients, dtype=torch.int64)
        if model_sizes is None:
            model_sizes = torch.full((num_clients,), parameter_split.num_trainable())
        return cls(parameter_split, num_clients, seed, num_samples, num_samples > 0, model_sizes)

    def require_label_counts(self, method: str) -> Tensor:
        """Return the clients' samples by class.

        Args:
            method: Name of the method, for the error.

        Raises:
            MisconfigurationException: If they aren't known.
        """
        if self.label_counts is None:
            raise MisconfigurationException(
                f"Expected training data whose classes can be counted, as {method} needs each "
                "client's number of samples by class, but got data that aren't pairs of inputs and "
                "class numbers in tensors. Use FederatedDataModule or FederatedTensorDataset."
            )
        return self.label_counts
