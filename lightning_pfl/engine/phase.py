"""What a phase means for the user's module: which names train, which layers run in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pfl.layout import Layout
from lightning_pfl.methods.base import Phase

RUNNING_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ActivePhase:
    """A phase resolved against a module.

    Args:
        phase: The method's phase.
        layout: Names of the module.

    Attributes:
        names: Parameters and buffers that may change.
        trainable: The parameters among them.
    """

    def __init__(self, phase: Phase, layout: Layout) -> None:
        self.phase = phase
        self.layout = layout
        self.names = layout.match(phase.train, "train") if phase.train else frozenset()
        self.trainable = tuple(name for name in layout.trainable if name in self.names)
        self.buffers = tuple(name for name in layout.buffers if name in self.names)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Put normalisation layers that don't train in eval mode.

        Everything else keeps the mode that the user chose.

        A layer in training mode would update its running statistics, which no optimizer setting can
        stop.
        """
        changed = [
            module
            for prefix, module in self.layout.module.named_modules()
            if isinstance(module, RUNNING_STATISTICS)
            and module.training
            and not self._trains(prefix, module)
        ]
        for module in changed:
            module.eval()
        try:
            yield
        finally:
            for module in changed:
                module.train()

    def _trains(self, prefix: str, module: nn.Module) -> bool:
        own = [f"{prefix}.{name}" if prefix else name for name in module.state_dict()]
        return not own or any(name in self.names for name in own)

    def couples_samples(self) -> bool:
        """Whether BatchNorm is in training mode: a sample's loss depends on its whole batch."""
        return any(isinstance(m, BATCH_NORM) and m.training for m in self.layout.module.modules())


def is_sample_wise(module: Any) -> bool:
    """Whether the training step is known to be the mean of ``per_sample(batch)["loss"]``.

    Then ragged batches may be padded under a mask.
    """
    from lightning_pfl.module import PersonalizedModule

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
    from lightning_pfl.module import PersonalizedModule

    own = ("forward", "per_sample", "_check_width")
    return is_sample_wise(module) and all(
        getattr(type(module), name) is getattr(PersonalizedModule, name) for name in own
    )
