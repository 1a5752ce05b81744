"""Use of random numbers and of samples by a step, found by trying one.

Both decide how clients' minibatches are made, and so the last bits of a round. A step is tried with
the settings that the module has then: a run that goes on from a checkpoint finds the same as one
that was never stopped, whatever the settings were before.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import couples_samples, is_unmodified
from lightning_pfl.engine.apart import SAMPLES, stands_apart, stirred, unit_of
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.keyed.mode import KeyedRandomness
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.trace import Same

KEPT, TRIED = 64, 8
"""Largest number of settings of which findings are kept, and of clients whose samples are tried."""


class Survey(NamedTuple):
    """Findings about a training step.

    Attributes:
        draws: Whether it may make random calls.
        apart: Whether a sample's loss depends on no other sample of its minibatch, nor what the
            step writes.
    """

    draws: bool
    apart: bool

    @property
    def pads(self) -> bool:
        """Whether minibatches of unequal sizes may be padded, and so run together."""
        # A dropout mask is a function of the shape: a padded batch could get another one than the
        # client alone where samples aren't the first axis.
        return self.apart and not self.draws


NOTHING_KNOWN = Survey(draws=True, apart=False)


class Surveys:
    """Surveys of steps, made once for each of the module's settings.

    Args:
        parameter_split: Names of the module.
        settings: The Trainer's flags.
    """

    def __init__(self, parameter_split: ParameterSplit, settings: EngineSettings) -> None:
        self.parameter_split, self.settings = parameter_split, settings
        self._found: dict[Any, Survey] = {}

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
                if len(self._found) >= KEPT:
                    self.forget()
                self._found[key] = found
        return found or NOTHING_KNOWN

    def _try(self, data: FederatedTensorDataset, program: ClientProgram) -> Survey | None:
        """Try a step on one client after another, until it has finite losses; None without any."""
        # Another process may have the samples of some clients.
        here = data.sizes_here()
        order = torch.argsort(here, descending=True, stable=True)
        for client in order[: min(TRIED, int((here > 0).sum()))].tolist():
            samples = data.indices[client][: max(data.batch_size, SAMPLES)]
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
        counted: list[int] = []

        def losses(some: Any) -> Tensor:
            found, calls = _losses(program, model, some)
            counted.append(calls)
            return found

        if couples_samples(program.module, True):
            losses(batch)
            return Survey(any(counted), apart=False)
        apart = stands_apart(losses, batch, unit_of(program, model))
        if any(counted):
            return Survey(draws=True, apart=False)
        return None if apart is None else Survey(draws=False, apart=apart)


def _losses(program: ClientProgram, model: Model, batch: Any) -> tuple[Tensor, int]:
    """Compute the samples' losses in a training step, and count its random calls."""
    key = torch.zeros((), dtype=torch.int64, device=next(iter(model.values())).device)
    model = {name: leaf.clone() for name, leaf in model.items()}
    with torch.no_grad(), KeyedRandomness(key) as mode:
        losses = program.sample_losses(model, batch, None, None, training=True)
    return losses, mode.calls
