"""What a method may know of the federation that it works for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_pfl.core.parameters import ParameterSplit


@dataclass(frozen=True)
class Known:
    """What a method may know of the federation, before the first round.

    Attributes:
        parameter_split: Which parameters are shared, personal or static.
        num_clients: Clients in the federation, sampled or not.
        seed: Seed of every random choice of the run.
        num_samples: Training samples of each client, int64 ``(num_clients,)``; 0 where nobody
            trains.
        has_training_data: Which clients have a minibatch to train on, bool ``(num_clients,)``;
            until the loop has counted, those with samples.
        model_sizes: Trainable scalars of each client's model, int64 ``(num_clients,)``.
    """

    parameter_split: ParameterSplit
    num_clients: int
    seed: int
    num_samples: Tensor
    has_training_data: Tensor
    model_sizes: Tensor

    @classmethod
    def of(
        cls,
        parameter_split: ParameterSplit,
        num_clients: int,
        seed: int = 0,
        num_samples: Tensor | None = None,
        model_sizes: Tensor | None = None,
    ) -> Known:
        """Fill in what follows from the rest.

        Args:
            parameter_split: As above.
            num_clients: As above.
            seed: As above.
            num_samples: As above; None where nobody trains.
            model_sizes: As above; None where all clients have the model of ``parameter_split``.
        """
        if num_samples is None:
            num_samples = torch.zeros(num_clients, dtype=torch.int64)
        if model_sizes is None:
            model_sizes = torch.full((num_clients,), parameter_split.num_trainable())
        return cls(parameter_split, num_clients, seed, num_samples, num_samples > 0, model_sizes)
