"""The step interface of one client whose steps run in Lightning's own loop.

For modules with code inside a step: hooks, manual optimization, several optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_pfl.contract.records import SlotStates
from lightning_pfl.contract.view import Objective
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.tree import Model, Tree, select
from lightning_pfl.data.batch import batch_length
from lightning_pfl.engine.base import ModuleLoop
from lightning_pfl.engine.bound import BoundModule
from lightning_pfl.engine.logs import sorted_out
from lightning_pfl.engine.sequential_local import SequentialLocalStep


class LoopedLocalStep(SequentialLocalStep):
    """A client's step that trains in a loop.

    Args:
        loop: Lightning's own loop.
        settings: As of :class:`~lightning_pfl.engine.sequential_local.SequentialLocalStep`, with
            all that follows.
    """

    def __init__(self, loop: ModuleLoop, *settings: Any) -> None:
        super().__init__(*settings)
        self.loop = loop
        self.bound: BoundModule | None = None

    @contextmanager
    def running(self, per_epoch: int, before: SlotStates | None) -> Iterator[SlotStates | None]:
        """Run a phase's steps in the loop, unless it has none."""
        after = None if before is None else dict(before)
        active, accumulate = self.active, self.settings.accumulate
        if active.idle or active.phase.evaluate_only:
            yield after
            return
        self.steps_per_epoch = -(-per_epoch // accumulate)
        changing = (*active.trainable, *active.buffers)
        with self.loop.phase(active.trainable, active.phase.lr, per_epoch, after):
            self.bound = BoundModule(self.parameter_split.module, changing, self.program.throwaway)
            try:
                yield after
            finally:
                self.bound.release()
                self.bound = None

    def train(self, model: Model, batch: list[tuple[int, Any]]) -> Model:
        """Step the optimizer on the gradient as the loop does."""
        if self.bound is None:
            return super().train(model, batch)
        if self.travel is not None:
            self.travel.step()
        model, end = self.bound.bind(model), len(batch) - 1
        within = self.step % self.steps_per_epoch
        first, last = within * self.settings.accumulate, within + 1 == self.steps_per_epoch
        for at, (number, minibatch) in enumerate(batch):
            with self._looped(number, minibatch) as (ready, found):
                found += [self.loop.run(ready, first + at, at < end, last and at == end)]
        self._logged = True
        self.bound.keep(model)
        return model

    def grad(
        self,
        model: Model,
        batch: list[tuple[int, Any]],
        also: tuple[str, ...] = (),
        objective: Objective | None = None,
        given: Tree | None = None,
        weights: Tensor | None = None,
        sample_data: Tree | None = None,
    ) -> Model:
        """Compute the gradient ``(1, ...)`` of the mean loss over the step's minibatches."""
        self._require_automatic("gradients")
        if self.bound is None:
            return super().grad(model, batch, also, objective, given, weights, sample_data)
        if also or objective is not None or weights is not None:
            raise MisconfigurationException(
                f"Expected a module without code inside a step, as {self.method} differentiates "
                f"more than its loss, but {self.loop.why}. Use a method that trains on the "
                "module's loss alone."
            )
        model = self.bound.bind(model)
        for number, minibatch in batch:
            with self._looped(number, minibatch) as (ready, found):
                found += [self.loop.gradient(ready, number)]
            self.last = number, found[0]
        self._logged = True
        self.bound.keep(model)
        return self.bound.gradients(self.active.trainable)

    @contextmanager
    def _looped(self, number: int, minibatch: Any) -> Iterator[tuple[Any, list[Tensor | None]]]:
        """Yield a minibatch as the module gets it and a list for its loss, which is logged."""
        found: list[Tensor | None] = []
        self.program.log.begin(minibatch)
        with self._metrics_kept(self._logged), self.random.of(number, seeds_alone=True):
            yield self.program.prepared(minibatch), found
        logged = self.program.log.take()
        if not self._logged:
            self._log(*sorted_out(found[0], logged), batch_length(minibatch))

    def update(self, model: Model, grads: Model, slot: str = "model") -> Model:
        """Step the optimizer on a gradient, which the loop clips."""
        if self.bound is None or not grads:
            return super().update(model, grads, slot)
        if self.travel is not None and slot == "model":
            self.travel.step()
        model = self.bound.bind(model)
        self.bound.set_gradients(select(grads, self.optimizer.names))
        with self.random.of_optimizer():
            self.loop.apply(*self.last, slot)
        self.bound.keep(model)
        return model

    def end_step(self) -> None:
        """End a step of the method."""
        if self.bound is not None:
            self.loop.end_step()

    def loss(self, model: Model, batch: list[tuple[int, Any]]) -> tuple[Tensor, Tensor]:
        """Compute the mean loss over the step's samples, and their number, ``(1,)``."""
        self._require_automatic("losses")
        return super().loss(model, batch)

    def _observed(self, model: Model, batch: list[tuple[int, Any]], what: str) -> Any:
        self._require_automatic(what)
        return super()._observed(model, batch, what)

    def _require_automatic(self, what: str) -> None:
        if self.loop.manual:
            raise MisconfigurationException(
                f"Expected a module with automatic optimization, as {self.method} computes {what} "
                f"itself, but {type(self.parameter_split.module).__name__} sets "
                "automatic_optimization=False. Return the loss from `training_step`, or use a "
                "method such as FedAvg, FedPer or FedRep, whose steps are the module's own."
            )
