"""A phase resolved against the user's module: parameters that train, layers in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import nn

from lightning_pfl.core.errors import format_names
from lightning_pfl.core.parameters import BATCH_NORM, RUNNING_STATISTICS, ParameterSplit
from lightning_pfl.methods.base import Phase
from lightning_pfl.models.base import PersonalizedModule


class ActivePhase:
    """A phase resolved against a module.

    Args:
        phase: The method's phase.
        parameter_split: Names of the module.

    Attributes:
        names: Parameters and buffers that may change.
        trainable: The parameters among them.
    """

    def __init__(self, phase: Phase, parameter_split: ParameterSplit) -> None:
        self.phase = phase
        self.parameter_split = parameter_split
        trains = phase.train if not phase.evaluate_only else None
        self.names = parameter_split.match(trains, "train") if trains else frozenset()
        self.trainable = tuple(name for name in parameter_split.trainable if name in self.names)
        self.buffers = tuple(name for name in parameter_split.buffers if name in self.names)

    @cached_property
    def throwaway(self) -> tuple[str, ...]:
        """Frozen buffers that a step may write to; to be read inside :meth:`modes`."""
        return writable(self.parameter_split.module, self.names)

    @property
    def idle(self) -> bool:
        """Whether the phase neither trains nor evaluates."""
        return not self.trainable and not self.phase.evaluate_only

    def require_independent_samples(self) -> None:
        """Require that the loss of a sample doesn't depend on the others of its minibatch.

        Raises:
            ValueError: If it does.
        """
        module = self.parameter_split.module
        if couples_samples(module, training=True):
            raise ValueError(
                "Expected samples that are independent of each other, as the method takes the "
                f"gradient of each, but {type(module).__name__} has layers such as BatchNorm that "
                "compute with all samples of a minibatch. Use GroupNorm or LayerNorm."
            )

    def unreached(self) -> str:
        """Return the error text for a loss that doesn't depend on the trainable parameters."""
        return (
            f"Expected the loss of `training_step` to depend on a parameter that trains in phase "
            f"{self.phase.name!r} ({format_names(self.trainable, range(len(self.trainable)))}), "
            "but got a loss without gradient. Don't use `detach` or `torch.no_grad` in it, or "
            "train other parameters."
        )

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Put normalisation layers that don't train in eval mode; all layers of an evaluation.

        In training mode a layer would update its running statistics. Other layers keep the user's
        mode.
        """
        changed = [
            module
            for prefix, module in self.parameter_split.module.named_modules()
            if module.training and self._rests(prefix, module)
        ]
        # Not `eval()` and `train()`, which would change submodules, also those the user has frozen.
        for module in changed:
            module.training = False
        try:
            yield
        finally:
            for module in changed:
                module.training = True

    def _rests(self, prefix: str, module: nn.Module) -> bool:
        if self.phase.evaluate_only:
            return True
        return isinstance(module, RUNNING_STATISTICS) and not self._trains(prefix, module)

    def _trains(self, prefix: str, module: nn.Module) -> bool:
        names = [f"{prefix}.{name}" if prefix else name for name in module.state_dict()]
        return not names or any(name in self.names for name in names)


def writable(module: nn.Module, changing: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """List buffers outside ``changing`` that a forward pass may write to, to run it on copies.

    Non-persistent buffers are included. Normalisation layers in eval mode don't write.
    """
    return tuple(
        name
        for name, _ in module.named_buffers()
        if name not in changing and not _is_quiet(module, name)
    )


def _is_quiet(module: nn.Module, buffer: str) -> bool:
    owner = module.get_submodule(buffer.rpartition(".")[0])
    return isinstance(owner, RUNNING_STATISTICS) and not owner.training


def couples_samples(module: nn.Module, training: bool) -> bool:
    """Whether a sample's loss, or what a step writes, depends on the other samples of its batch.

    True for BatchNorm with batch statistics, InstanceNorm with running statistics, and perhaps
    buffers of user-defined layers. Such a batch can't be padded or cut differently.
    """
    for part in module.modules():
        if isinstance(part, BATCH_NORM) and (part.training or part.running_mean is None):
            return True
        if not training:
            continue
        if isinstance(part, RUNNING_STATISTICS):
            if part.training and part.running_mean is not None:
                return True
        elif any(b.is_floating_point() for b in part.buffers(recurse=False)):
            return True
    return False


def is_sample_wise(module: Any) -> bool:
    """Whether the training step is the mean of ``per_sample(batch)["loss"]`` for certain.

    Then ragged batches may be padded under a mask.
    """
    return (
        isinstance(module, PersonalizedModule)
        and type(module).training_step is PersonalizedModule.training_step
        and type(module)._step is PersonalizedModule._step
    )


def is_unmodified(module: Any) -> bool:
    """Whether a training step is the loss of ``head(backbone(batch[0]))`` for certain.

    Then the inputs feed only the backbone, and a step may be recorded and replayed, as no
    user-defined function reads anything else.
    """
    overridable = ("forward", "per_sample", "_check_width")
    return is_sample_wise(module) and all(
        getattr(type(module), name) is getattr(PersonalizedModule, name) for name in overridable
    )
