"""The choice of rounds in which recordings are compared with the steps that they replay.

A layer of a user's may read anything: a global name, a file, the time. So a recording is compared
with the step in every round. torch's layers read what they have as attributes, which recordings
know, as do layers whose code shows it (``known_code.py``); where a step runs nothing else, a few
comparisons are enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_pfl.engine.active_phase import is_unmodified
from lightning_pfl.engine.known_code import Read, read_by
from lightning_pfl.engine.safety.snapshot import hooks_of
from lightning_pfl.models.losses import LOSSES

RARELY = 16
"""Every which round recordings of torch's layers are compared, the first one included."""
OURS = ("lightning_pfl", "lightning", "torch", "builtins", "abc", "typing")


class Checks:
    """Counts rounds, and chooses those in which recordings are compared.

    Args:
        module: The user's module, whose steps are recorded.

    Attributes:
        known: Whether the steps of this round run nothing of a user's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._rounds, self.known = module, 0, False
        self._read: Read | None = None

    def due(self, others: Iterable[Any] = ()) -> bool:
        """Count a round, and return whether its recordings are compared.

        Args:
            others: What a step runs besides the module: the method, and objects that it holds.
        """
        self._rounds += 1
        before, self._read = self._read, read_by_step(self.module)
        self.known = self._read is not None and all(map(_is_ours, others))
        return self._rounds % RARELY == 1 or not self.known or self._read != before


def read_by_step(module: Any) -> Read | None:
    """Return what code of users' layers reads elsewhere, if a step runs no other code of theirs.

    That is no loss or hook of a user's, and no function that is replaced on an object. The rest is
    torch's and this package's.
    """
    own = {"forward", "per_sample", "training_step", "validation_step", "test_step", "_step"}
    ours = (
        is_unmodified(module)
        and _is_ours(module)
        and own.isdisjoint(vars(module))
        and module.loss is LOSSES.get(module.loss_name)
        and not hooks_of(module)
    )
    layers = [part for part in module.modules() if part is not module and not _is_torchs(part)]
    return read_by(layers) if ours else None


def _is_ours(value: Any) -> bool:
    """Whether no class of a value is a user's."""
    return all(cls.__module__.partition(".")[0] in OURS for cls in type(value).__mro__)


def _is_torchs(layer: nn.Module) -> bool:
    where = ("torch.nn.modules.", "lightning_pfl.models.")
    forward = getattr(type(layer).forward, "__module__", None) or ""
    known = type(layer).__module__.startswith(where) and forward.startswith(where)
    return known and "forward" not in vars(layer)
