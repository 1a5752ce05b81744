"""A guard for steps that write to their minibatch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.data.batch import map_batch


class Rereading:
    """Refuses a step that has written to a minibatch of which its method takes another gradient.

    That gradient would be one of other samples. Lightning's own loop takes one gradient of a
    minibatch, after which nobody reads it.
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[Any, list[int]]] = {}

    def begin(self) -> None:
        """Start a step of the method."""
        self._versions.clear()

    def read(self, minibatch: Any, samples: Any) -> None:
        """Let a minibatch be read once more in this step.

        Args:
            minibatch: The same object each time.
            samples: Its samples.

        Raises:
            MisconfigurationException: If they have changed since they were read first.
        """
        now: list[int] = []

        def note(leaf: Tensor) -> Tensor:
            # Tensors of `torch.inference_mode` count no writes.
            now.append(0 if leaf.is_inference() else leaf._version)
            return leaf

        map_batch(samples, note)
        # With the minibatch, whose id thus stays its own.
        _, before = self._versions.setdefault(id(minibatch), (minibatch, now))
        if now != before:
            raise MisconfigurationException(
                "Expected a step that leaves its minibatch as it is, as the method takes several "
                "gradients of it, but `training_step` wrote to it in place. Compute a new tensor, "
                "`x = x * 2` in the place of `x.mul_(2)`."
            )
