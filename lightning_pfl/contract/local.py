"""Local training as methods see it: its phases, and what a client can do in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, Tree


@dataclass(frozen=True)
class Phase:
    """A stretch of local training with one set of trainable parameters and a fresh optimizer.

    Args:
        train: What trains (:data:`~lightning_pfl.core.parameters.ParameterSpec`); everything else
            is frozen bit for bit, and normalisation layers that don't train run in eval mode.
        epochs: Passes over the client's data. Exactly one of ``epochs`` and ``steps``.
        steps: Optimizer steps; the client's data is cycled through.
        lr: Learning rate for all parameter groups; None keeps what ``configure_optimizers`` says.
        name: What ``client.phase`` says inside ``client_step``.
        batches_per_step: Independent minibatches per step. From 2 on, ``client_step`` receives a
            tuple of that many batches, consecutive ones of the client's order, which runs on into
            the next epoch; ``epochs`` then says how much data the steps see together.
        full_batch: Whether the client's samples are one minibatch, in their stored order. Not for
            DataLoaders that users bring, whose order is their own.
        evaluate_only: Whether nothing trains: every layer runs in eval mode, nothing is augmented
            or logged, and ``client_step`` looks at the data by ``client.loss``. Its steps count.
    """

    train: ParameterSpec = "all"
    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    name: str = "local"
    batches_per_step: int = 1
    full_batch: bool = False
    evaluate_only: bool = False


def without_data(phases: Iterable[Phase], steps: Tensor) -> Tensor:
    """Clients that took no step though the phases have some, bool ``(clients,)``.

    With a budget of 0 nobody steps, and it says nothing about a client's data.

    Args:
        phases: A round's local training.
        steps: How many steps each client took, int64 ``(clients,)``.

    Example:
        >>> steps = torch.tensor([0, 3])
        >>> without_data([Phase(epochs=1)], steps), without_data([Phase(epochs=0)], steps * 0)
        (tensor([ True, False]), tensor([False, False]))
    """
    budget = any(phase.epochs or phase.steps for phase in phases)
    return steps == 0 if budget else torch.zeros_like(steps, dtype=torch.bool)


class LocalStep(Protocol):
    """What a client can do inside ``client_step``; supplied by the engine."""

    @property
    def phase(self) -> str:
        """Name of the running phase."""

    @property
    def lr(self) -> float:
        """Learning rate of the running phase.

        An error if the parameter groups have different ones.
        """

    def grad(self, model: Model, batch: Any, also: tuple[str, ...] = ()) -> Model:
        """Gradient of the training loss at ``model`` for what trains now, ``(clients, ...)``.

        The forward pass updates the buffers of ``model`` (BatchNorm statistics) in place. The first
        call of a step logs the module's ``self.log`` values; further calls don't. ``also`` names
        further entries of ``model`` to differentiate by, such as the share of a mixture.
        """

    def update(self, model: Model, grads: Model, slot: str = "model") -> Model:
        """One step of the user's optimizer. The result replaces ``model``, whose memory it reuses.

        ``slot`` names the optimizer state (momentum, moments): one slot per model that the method
        trains.
        """

    def loss(self, model: Model, batch: Any) -> tuple[Tensor, Tensor]:
        """The training loss at ``model``, for a phase that measures; the model is not changed.

        Returns:
            The mean over the step's samples and their number, float64 ``(clients,)`` each.
        """

    def noise(self, like: Tree, key: str = "noise") -> Tree:
        """Draw standard normal numbers, with the shapes and types of ``like``, ``(clients, ...)``.

        They follow from the seed, the client, the round, the step and ``key``, and from nothing
        else: engines and resumed runs draw the same ones. Two draws in a step need two keys.
        """

    def samples(self, batch: Any) -> tuple[Any, Tensor]:
        """The step's samples themselves, for a method that computes on them without the module.

        Returns:
            The batch before any augmentation, leaves ``(clients, samples, ...)``, and which samples
            are real, bool ``(clients, samples)``: the others only fill up the shorter clients.
        """

    def report(self, loss: Tensor, batch: Any) -> None:
        """Log as ``train_loss`` what a method has computed itself, ``(clients,)``.

        For a step without :meth:`grad`.
        """
