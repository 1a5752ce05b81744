"""Which steps may be recorded, and the rounds in which recordings are compared with them.

A step of a user's may read anything: a global name, a file, the time. It is recorded where its code
shows what it reads (``known_code.py``), and where a ``PersonalizedModule`` promises that, whose
layers may do anything all the same. Then recordings are compared with the step in every round, else
in a few of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_pfl.engine.active_phase import is_unmodified
from lightning_pfl.engine.fingerprint import Same, fingerprint
from lightning_pfl.engine.known_code import (
    Read,
    UnknownCodeError,
    asks_for_places,
    calls_metrics,
    numbers_of_trainer,
    read_by_step,
    reads_epoch,
    tensors_of,
)
from lightning_pfl.engine.recording import BY_VALUE, by_value
from lightning_pfl.engine.trace import Repeated
from lightning_pfl.models.base import PersonalizedModule

RARELY = 16
"""Every which round recordings of known code are compared, the first one included."""
OURS = ("lightning_pfl", "lightning", "torch", "builtins", "abc", "typing")
log = logging.getLogger(__name__)
_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""What was logged of a module, which several engines read in turn."""


class Checks:
    """Counts rounds, and chooses those that record and compare.

    Args:
        module: The user's module, whose steps are recorded.
        step: The function of it that is called.
        metrics: Whether it may call torchmetrics objects.

    Attributes:
        known: Whether the steps of this round run nothing of a user's that isn't known.
        recordable: Whether they may be recorded.
        ours: Whether nothing of a user's runs around the module's steps.
    """

    def __init__(
        self, module: nn.Module, step: str = "training_step", metrics: bool = False
    ) -> None:
        self.module, self.step, self.metrics, self._rounds = module, step, metrics, 0
        self.known = self.recordable = self.ours = False
        self._read: Read | None = None

    def due(self, others: Iterable[Any] = ()) -> bool:
        """Count a round, and return whether its recordings are compared.

        Args:
            others: What a step runs besides the module: the method, and objects that it holds.
        """
        self._rounds += 1
        before = self._read
        self.look()
        self.ours = all(map(is_ours, others))
        self.known = self._read is not None and self.ours
        return self._rounds % RARELY == 1 or not self.known or self._read != before

    def look(self) -> None:
        """Read the step's code, in which functions and names may have been replaced."""
        try:
            self._read = read_by_step(self.module, self.step, self.metrics)
        except UnknownCodeError as unknown:
            self._read = None
            said = _said.setdefault(self.module, set())
            line = f"The code of {self.step} isn't known: {unknown}."
            if line not in said:
                said.add(line)
                log.info(line)
        self.known = self.known and self._read is not None
        self.recordable = self._read is not None or _promises(self.module, self.step)

    def look_after_hooks(self, *recorders: Repeated[Any]) -> None:
        """Read the code again, as a hook of a user's may have changed what steps read.

        Args:
            recorders: Those whose recordings are compared again, unless the code is known.
        """
        self.look()
        if not self.known:
            for one in recorders:
                one.begin_round()

    @property
    def code_known(self) -> bool:
        """Whether the step's own code is known, whatever runs around it."""
        return self._read is not None

    @property
    def placeless(self) -> bool:
        """Whether nothing in the steps of this round depends on how tensors lie in memory."""
        return self.known and self._read is not None and not asks_for_places(self._read)

    @property
    def calls_metrics(self) -> bool:
        """Whether known steps of this round call torchmetrics objects."""
        return self._read is not None and calls_metrics(self._read)

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors that attributes hold and known steps of this round may write to."""
        return tensors_of(self._read or {})

    def reads_epoch(self) -> bool:
        """Whether known steps read the number of the round."""
        return self._read is not None and reads_epoch(self._read)

    def settings(self, any_epoch: bool = False) -> tuple[Any, ...]:
        """Return what recordings depend on besides their arguments, as it is now.

        Args:
            any_epoch: As of :func:`settings_of`.
        """
        return self.placeless, *settings_of(self.module, self._read, any_epoch)


def settings_of(module: nn.Module, read: Read | None, any_epoch: bool = False) -> tuple[Any, ...]:
    """Return what a module's code depends on besides its arguments, as it is now.

    Args:
        module: The module.
        read: What the code reads outside of layers; None where it isn't known.
        any_epoch: Whether to leave out the number of the round, which recordings follow.
    """
    # Tensors that a step makes have the default type.
    return (
        fingerprint(module),
        torch.get_default_dtype(),
        tuple(
            (Same(owner) if not isinstance(owner, str) else owner, name, _key(value))
            for (owner, name), value in (read or {}).items()
        ),
        numbers_of_trainer(module, read or {}, any_epoch),
    )


def _promises(module: Any, step: str) -> bool:
    """Whether a step is that of ``PersonalizedModule``."""
    its_own = getattr(PersonalizedModule, step)
    return is_unmodified(module) and getattr(type(module), step) is its_own


def _key(value: Any) -> Any:
    return by_value(value) if isinstance(value, BY_VALUE) else Same(value)


def is_ours(value: Any) -> bool:
    """Whether no class of a value is a user's."""
    return all(cls.__module__.partition(".")[0] in OURS for cls in type(value).__mro__)
