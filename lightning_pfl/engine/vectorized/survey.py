"""Use of random numbers and of samples by a step, found by trying one.

Both decide how clients' minibatches are made, and so the last bits of a round. A step is tried with
the settings that the module has then: a run that goes on from a checkpoint finds the same as one
that was never stopped, whatever the settings were before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.recent import Recent
from lightning_pfl.core.tree import Model
from lightning_pfl.data.batch import batch_length
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import couples_samples, is_unmodified
from lightning_pfl.engine.apart import (
    SAMPLES,
    begins_alike,
    samples_to_try,
    stands_apart,
    stirred,
    unit_of,
)
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.fingerprint import Same
from lightning_pfl.engine.keyed.mode import KeyedRandomness
from lightning_pfl.engine.program import ClientProgram

KEPT = 64
"""Largest number of settings of which findings are kept."""


class Survey(NamedTuple):
    """Findings about a training step.

    Attributes:
        draws: Whether it may make random calls.
        pads: Whether minibatches of unequal sizes may be padded, and so run together: a sample's
            loss depends on no other sample of its minibatch, nor what the step writes, nor what it
            draws on how many follow it.
    """

    draws: bool
    pads: bool


NOTHING_KNOWN = Survey(draws=True, pads=False)


class Surveys:
    """Surveys of steps, made once for each of the module's settings.

    Args:
        parameter_split: Names of the module.
        settings: The Trainer's flags.
    """

    def __init__(self, parameter_split: ParameterSplit, settings: EngineSettings) -> None:
        self.parameter_split, self.settings = parameter_split, settings
        self._found = Recent[Any, Survey](KEPT)

    def forget(self) -> None:
        """Try steps again, as their code may read more than the module's settings."""
        self._found.clear()

    def of(self, data: FederatedDataset, program: ClientProgram, settings: Any) -> Survey:
        """Survey a training step, on samples of the dataset's largest client.

        Args:
            data: The dataset, of all clients: whichever of them train, the finding is the same.
            program: The user's step.
            settings: What steps depend on besides their arguments.
        """
        known = is_unmodified(program.module) and self.settings.batch_hooks is None
        if not known or not isinstance(data, FederatedTensorDataset):
            return NOTHING_KNOWN
        key = Same(program), program.augment, settings
        found = self._found.get(key)
        if found is None:
            found = self._try(data, program)
            if found is not None:
                self._found[key] = found
        return found or NOTHING_KNOWN

    def _try(self, data: FederatedTensorDataset, program: ClientProgram) -> Survey | None:
        """Try a step on one client after another, until it has finite losses; None without any."""
        for samples in samples_to_try(data, max(data.batch_size, SAMPLES)):
            # Whatever a user's module raises; the step raises it again, and names its client.
            with suppress(Exception):
                if found := self._survey(data.gather(samples), program):
                    return found
        return None

    def _survey(self, batch: Any, program: ClientProgram) -> Survey | None:
        """Survey a step on a minibatch; None if its losses aren't finite."""
        trained = self.parameter_split.trainable
        model = {
            name: stirred(leaf) if name in trained else leaf
            for name, leaf in self.parameter_split.model().items()
        }
        modes: list[_Tried] = []

        def losses(alike: bool, some: Any) -> Tensor:
            rows = batch_length(some) if alike else None
            found, mode = _losses(program, model, some, rows)
            modes.append(mode)
            return found

        if couples_samples(program.module, True):
            losses(False, batch)
            return Survey(any(mode.calls for mode in modes), pads=False)
        unit = unit_of(program, model)
        pads = stands_apart(partial(losses, True), batch, unit)
        draws = any(mode.calls for mode in modes)
        if pads and draws:
            # Of other random numbers those that count may be rare.
            pads = all(mode.calls == mode.dropped for mode in modes)
            pads = pads and begins_alike(partial(losses, False), batch, unit)
        if pads is None and not draws:
            return None
        return Survey(draws, bool(pads))


class _Tried(KeyedRandomness):
    """Drops half of all elements, so that it shows which are dropped.

    Where samples aren't the first axis of a mask, or of what was reshaped to it, the elements of a
    sample lie elsewhere in a padded minibatch, and so would be others.

    Args:
        key: The key.
        rows: Drop the same elements of each of so many samples; None for those of the key.

    Attributes:
        dropped: Number of random calls of dropout.
    """

    def __init__(self, key: Tensor, rows: int | None) -> None:
        super().__init__(key)
        self.rows, self.dropped = rows, 0

    def at_least(self, p: float, shape: Any, dtype: torch.dtype) -> Tensor:
        """Return whether the next call's uniform numbers are at least one half."""
        self.dropped += 1
        first, *rest = shape or (1,)
        if not shape or self.rows is None or first % self.rows:
            return super().at_least(0.5, shape, dtype)
        kept = super().at_least(0.5, (1, first // self.rows, *rest), dtype)
        return kept.expand(self.rows, *kept.shape[1:]).flatten(0, 1)


def _losses(
    program: ClientProgram, model: Model, batch: Any, rows: int | None
) -> tuple[Tensor, _Tried]:
    """Compute the samples' losses in a training step, and return what has drawn."""
    key = torch.zeros((), dtype=torch.int64, device=next(iter(model.values())).device)
    model = {name: leaf.clone() for name, leaf in model.items()}
    with torch.no_grad(), _Tried(key, rows) as mode:
        losses = program.sample_losses(model, batch, None, None, training=True)
    return losses, mode
