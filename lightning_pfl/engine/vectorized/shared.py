"""Common parts of an engine's chunks: the user's step, recordings, what is known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.engine.base import EngineSettings, LocalWork
from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.cuda_graphs import StepGraphs
from lightning_pfl.engine.epoch import Epoch
from lightning_pfl.engine.feature_cache import PrefixCache
from lightning_pfl.engine.optimizer import Recordings
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.steps import Limits
from lightning_pfl.engine.trace import Traces
from lightning_pfl.engine.vectorized.gradient import Transform
from lightning_pfl.engine.vectorized.kernels import FastKernels
from lightning_pfl.engine.vectorized.survey import NOTHING_KNOWN, Survey, Surveys
from lightning_pfl.engine.whole_steps import WholeSteps
from lightning_pfl.methods.base import Phase


class Shared:
    """Common parts of an engine's chunks.

    Args:
        module: The user's module.
        parameter_split: Names of the module.
        settings: The Trainer's flags.
        transform: ``"forward"``: ``vmap`` of the forward pass and one ordinary backward pass;
            ``"grad"``: ``vmap`` of the gradient, for layers without a batching rule for autograd
            (LSTM, GRU).
    """

    def __init__(
        self,
        module: Any,
        parameter_split: ParameterSplit,
        settings: EngineSettings,
        transform: Transform = "forward",
    ) -> None:
        self.module, self.parameter_split = module, parameter_split
        self.settings, self.transform = settings, transform
        self.limits = Limits(
            settings.accumulate, settings.limit_train_batches, settings.overfit_batches
        )
        self.prefix = PrefixCache(parameter_split, enabled=settings.feature_cache)
        self.checks = Checks(module)
        epoch = Epoch(module, self.checks.reads_epoch)
        self.traces = Traces(enabled=True, epoch=epoch)
        self.graphs = StepGraphs(settings.device) if settings.cuda_graphs else None
        self.whole = WholeSteps(expanded=True, epoch=epoch)
        self.optimizer_steps: Recordings = {}
        self._program: ClientProgram | None = None
        self.surveys = Surveys(parameter_split, settings)

    def look(self) -> None:
        """Begin a round, or go on after a hook of a user's: forget what may no longer hold."""
        if not self.checks.known:
            self.surveys.forget()
            self.prefix.forget()

    def survey(
        self, work: LocalWork, phase: Phase, program: ClientProgram, settings: Any
    ) -> Survey:
        """Find what the steps of a phase do; to be asked inside of its modes.

        Args:
            work: The clients' work.
            phase: The phase.
            program: The user's step.
            settings: As of :meth:`~lightning_pfl.engine.checks.Checks.settings`.
        """
        # Public samples may have no labels that a loss could mean, and are as many for all.
        if phase.data == "public":
            return NOTHING_KNOWN
        return self.surveys.of(work.split(phase), program, settings)

    def program(self, augment: Callable[[Any], Any] | None) -> ClientProgram:
        """Return the user's step, cached since a replayed step doesn't log its options again."""
        hooks, known = self.settings.batch_hooks, self._program
        if known is None or known.augment is not augment or known.hooks is not hooks:
            kernels = FastKernels if self.transform == "forward" else nullcontext
            known = ClientProgram(self.module, self.settings, augment, kernels)
            self._program = known
        return known
