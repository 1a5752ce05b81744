"""What a phase means for the user's module: which names train, which layers run in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        layout: Names of the module.

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

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do with the data."""
        return not self.trainable and not self.phase.evaluate_only

    def unreached(self) -> str:
        """What to say of a loss without gradient: nothing that trains has a part in it."""
        return (
            f"Expected the loss of `training_step` to depend on what trains in phase "
            f"{self.phase.name!r} ({format_names(self.trainable, range(len(self.trainable)))}), "
            "but got "
            "a loss that depends on none of it. Compute the loss with it, without `detach` or "
            "`torch.no_grad`, or let the method train a part of the model that the loss depends on."
        )

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Put normalisation layers that don't train in eval mode; to measure, every layer.

        Everything else keeps the mode that the user chose.

        A layer in training mode would update its running statistics, which no optimizer setting can
        stop.
        """
        changed = [
            module
            for prefix, module in self.parameter_split.module.named_modules()
            if module.training and self._rests(prefix, module)
        ]
        # Not `eval()`, which would reach what is below, and `train()` what the user has frozen.
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

    def throwaway(self) -> tuple[str, ...]:
        """Buffers that a step may write to although the phase freezes them."""
        return writable(self.parameter_split.module, self.names)


def writable(module: nn.Module, changing: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Buffers outside ``changing`` that a forward pass may write to: it gets copies of them.

    What is frozen then stays as it is, whatever the user's layers do, and so does what a module
    keeps beside its model, its non-persistent buffers. Normalisation layers in eval mode don't
    write.
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
    """Whether a sample's loss, or what a step writes, depends on the rest of its batch.

    That of BatchNorm does with batch statistics, InstanceNorm's running statistics do, and the
    buffers of a user's own layers may. Such a batch can't be padded, nor cut differently.
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
    """Whether the training step is known to be the mean of ``per_sample(batch)["loss"]``.

    Then ragged batches may be padded under a mask.
    """
    return (
        isinstance(module, PersonalizedModule)
        and type(module).training_step is PersonalizedModule.training_step
        and type(module)._step is PersonalizedModule._step
    )


def is_unmodified(module: Any) -> bool:
    """Whether a training step is known to be the loss of ``head(backbone(batch[0]))``.

    Then the inputs feed the backbone alone, and a step may be recorded and replayed: a method of
    the user's own may read anything, for instance the number of the round.
    """
    overridable = ("forward", "per_sample", "_check_width")
    return is_sample_wise(module) and all(
        getattr(type(module), name) is getattr(PersonalizedModule, name) for name in overridable
    )
