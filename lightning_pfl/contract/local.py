"""Local training: its phases, and the step interface for methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_pfl.contract.view import Objective
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, Tree

Split = Literal["training", "validation", "public"]
StepFunction = TypeVar("StepFunction", bound=Callable[..., Any])
PerClient = int | Mapping[str, int]
"""A number of all clients, or of each by its name."""


@dataclass(frozen=True)
class Phase:
    """A part of local training with one set of trainable parameters and a fresh optimizer.

    Args:
        train: Parameters that train (:data:`~lightning_pfl.core.parameters.ParameterSpec`); all
            others are frozen bit for bit, and normalisation layers that don't train run in eval
            mode.
        epochs: Passes over the client's data, perhaps by client name. Exactly one of ``epochs`` and
            ``steps``.
        steps: Optimizer steps; the client's data is cycled through.
        lr: Learning rate of all parameter groups; None keeps those of ``configure_optimizers``. In
            a round, a learning rate schedule scales it like those.
        name: Value of ``client.phase`` inside ``client_step``.
        batches_per_step: Independent minibatches per step. From 2 on, ``client_step`` receives a
            tuple of consecutive batches of the client's order, which continues into the next epoch;
            ``epochs`` is then the data of all minibatches together.
        full_batch: Whether the client's samples are one minibatch, in their stored order. Not for
            users' DataLoaders.
        evaluate_only: Whether nothing trains: every layer runs in eval mode without augmentation
            and logs, and ``client_step`` calls ``client.loss``. Its steps count. Where a step adds
            up what it finds of each sample, it may get several minibatches as one.
        data: ``"validation"``: a pass over the client's validation samples, all of them whatever
            the Trainer's limits, with ``evaluate_only``. ``"public"``: the round's public samples,
            the same ones in the same order for all clients and in each epoch, without
            augmentation and logs, as they may have no labels. Their steps don't count.
        ahead: For public samples: those of the round that is so many rounds later.

    Raises:
        ValueError: If something would train on validation samples.
    """

    train: ParameterSpec = "all"
    epochs: PerClient | None = None
    steps: PerClient | None = None
    lr: float | None = None
    name: str = "local"
    batches_per_step: int = 1
    full_batch: bool = False
    evaluate_only: bool = False
    data: Split = "training"
    ahead: int = 0

    def __post_init__(self) -> None:
        """Require that nothing trains on validation data."""
        if self.data == "validation" and not self.evaluate_only:
            raise ValueError(
                "Expected a phase on validation data to train nothing, but got "
                "evaluate_only=False. Use Phase(evaluate_only=True, data='validation')."
            )


def without_data(phases: Iterable[Phase], steps: Tensor) -> Tensor:
    """Find clients that took no step although the phases have some, bool ``(clients,)``.

    In phases with a budget of 0, that is no client. Public samples are not a client's data.

    Args:
        phases: A round's local training.
        steps: Number of steps of each client, int64 ``(clients,)``.

    Example:
        >>> steps = torch.tensor([0, 3])
        >>> without_data([Phase(epochs=1)], steps), without_data([Phase(epochs=0)], steps * 0)
        (tensor([ True, False]), tensor([False, False]))
    """
    budget = any(phase.epochs or phase.steps for phase in phases if phase.data != "public")
    return steps == 0 if budget else torch.zeros_like(steps, dtype=torch.bool)


def recordable(*settings: str) -> Callable[[StepFunction], StepFunction]:
    """Let an engine record the operators of a ``client_step`` and replay them.

    Such a step computes its result from its arguments and some settings of the method, by operators
    of torch: it doesn't decide by numbers in tensors, writes to no attribute, and draws nothing but
    by ``client.noise``. A step that draws, or asks for ``client.lr``, is taken as it is, and so is
    one of which a recording has other bits.

    Args:
        settings: All attributes of the method that it reads, besides ``parameter_split``. Numbers
            and strings are followed without being named. What another object holds isn't, where
            the step that is compared is the same without it, as a round's first one is without a
            pull to where it began.

    Example:
        >>> @recordable("prox_weight")
        ... def client_step(self, state, minibatches, client): ...
        >>> client_step.recorded_settings
        ('prox_weight',)
    """

    def mark(step: StepFunction) -> StepFunction:
        step.recorded_settings = settings  # type: ignore[attr-defined]
        return step

    return mark


class LocalStep(Protocol):
    """The functions of ``client_step``, supplied by the engine."""

    @property
    def phase(self) -> str:
        """Name of the running phase."""

    @property
    def lr(self) -> float:
        """Learning rate of the running phase; an error if the parameter groups differ."""

    def train(self, model: Model, batch: Any) -> Model:
        """Take one step of the user's module: gradient and optimizer, ``(clients, ...)``.

        It is ``update(model, grad(model, batch))``, and the only step of a module that steps its
        optimizers itself (``automatic_optimization=False``).
        """

    def grad(
        self,
        model: Model,
        batch: Any,
        also: tuple[str, ...] = (),
        objective: Objective | None = None,
        given: Tree | None = None,
        weights: Tensor | None = None,
        sample_data: Tree | None = None,
    ) -> Model:
        """Compute the training loss's gradient at ``model`` by the phase's parameters.

        The forward pass updates the buffers of ``model`` (BatchNorm statistics) in place. The first
        call of a step logs the module's ``self.log`` values; further calls don't.

        Args:
            model: The model, ``(clients, ...)``.
            batch: The step's minibatches.
            also: Further entries of ``model`` to differentiate by, such as the share of a mixture.
            objective: What is differentiated in the place of the loss, for one client.
            given: What the objective needs of each client, ``(clients, ...)``.
            weights: A factor of each sample's loss, ``(clients, samples)`` in the order of
                :meth:`samples`. The divisor stays the number of real samples.
            sample_data: What the objective needs of each sample, ``(clients, samples, ...)``.

        Returns:
            ``(clients, ...)`` by the phase's trainable parameters. A parameter that the loss
            doesn't reach has no entry. With ``accumulate_grad_batches`` it is the sum over the
            step's minibatches divided by this number, as in Lightning: less than the mean in an
            incomplete last step of an epoch, to which a method's own term is added in full.
        """

    def update(self, model: Model, grads: Model, slot: str = "model") -> Model:
        """Take one step of the user's optimizer; the result reuses the memory of ``model``.

        ``slot`` names the optimizer state (momentum, moments), one per model that the method
        trains.
        """

    def loss(self, model: Model, batch: Any) -> tuple[Tensor, Tensor]:
        """Compute the training loss at ``model`` in an evaluation phase, without changing it.

        Returns:
            The mean over the step's samples and their number, each float64 ``(clients,)``.
        """

    def outputs(self, model: Model, batch: Any) -> Any:
        """Return the outputs of the module's ``forward`` at ``model``, as a constant.

        In eval mode, on the samples as augmented for :meth:`grad`, if something trains in this
        phase; ``model`` isn't changed.

        Returns:
            ``(clients, samples, ...)`` in the order of :meth:`samples`.
        """

    def features(self, model: Model, batch: Any) -> Any:
        """Return the inputs of the module's ``head`` at ``model``; otherwise as :meth:`outputs`."""

    def losses(self, model: Model, batch: Any) -> Tensor:
        """Return the loss of each sample at ``model``, as a constant.

        In eval mode and without augmentation; ``model`` isn't changed.

        Returns:
            ``(clients, samples)`` in the order of :meth:`samples`, 0 for samples that fill up.

        Raises:
            TypeError: If the module has no ``per_sample`` that ``training_step`` calls once.
            ValueError: If ``training_step`` returns something else than the mean of these losses.
        """

    def sample_grads(self, model: Model, batch: Any) -> Model:
        """Return the gradient of each sample's loss, in training mode and with augmentation.

        Takes the memory of a model for each sample. Nothing is logged.

        Returns:
            ``(clients, samples, ...)`` in the order of :meth:`samples`, 0 for samples that fill up.

        Raises:
            ValueError: If the loss of a sample depends on the others (BatchNorm in training mode).
        """

    def noise(self, like: Tree, key: str = "noise") -> Tree:
        """Draw standard normal numbers, with the shapes and types of ``like``, ``(clients, ...)``.

        They follow from the seed, the client, the round, the step and ``key``, and from nothing
        else: engines and resumed runs draw the same ones. Two draws in a step need two keys.
        """

    def samples(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the step's samples, for a method that computes on them without the module.

        Returns:
            The batch before augmentation, leaves ``(clients, samples, ...)``, and the mask of real
            samples, bool ``(clients, samples)``; the others are padding.
        """

    def report(self, loss: Tensor, batch: Any) -> None:
        """Log as ``train_loss`` a loss that the method has computed without :meth:`grad`.

        ``loss`` has the shape ``(clients,)``.
        """
