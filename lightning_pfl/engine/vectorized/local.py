"""The step interface for all clients of a tick at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import LogOptions
from lightning_pfl.contract.view import Objective
from lightning_pfl.core.draws import mix, noise
from lightning_pfl.core.mixture import shielded
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, Tree, materialize, select, tmap
from lightning_pfl.data.batch import batch_leaves, join_batches
from lightning_pfl.engine.active_phase import ActivePhase
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.client_logs import LOSS, ClientLogs
from lightning_pfl.engine.feature_cache import PrefixCache
from lightning_pfl.engine.logs import ListedLogs
from lightning_pfl.engine.optimizer import ClientOptimizer, clip
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.terms import Term, split_terms
from lightning_pfl.engine.trace import Repeated, Traces
from lightning_pfl.engine.travel import Travel
from lightning_pfl.engine.vectorized.gradient import BatchedGradient, Inputs, Result
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick


class VectorizedLocalStep:
    """The :class:`~lightning_pfl.contract.local.LocalStep` of all clients of a tick.

    Args:
        settings: The Trainer's flags.
        active: The phase.
        program: The user's step as a function.
        gradient: The gradient of its loss.
        traces: Recordings of the gradient, for this phase.
        prefix: The features that the minibatches may have.
        optimizer: The clients' optimizer of this phase.
        logs: Where logged values go.
        keys: A key per client of the chunk for the random numbers of this phase, int64
            ``(clients,)``; None if steps draw none.
        noise_keys: Gives such keys also where steps draw none.
        travel: Counts the way of the chunk's clients; None if the method doesn't need it.

    Attributes:
        whole: Recordings of whole steps, if they take this one; else None.
    """

    def __init__(
        self,
        settings: EngineSettings,
        active: ActivePhase,
        program: ClientProgram,
        gradient: BatchedGradient,
        traces: Traces,
        prefix: PrefixCache,
        optimizer: ClientOptimizer,
        logs: ClientLogs,
        keys: Tensor | None,
        noise_keys: Callable[[], Tensor],
        travel: Travel | None,
    ) -> None:
        self.settings, self.active, self.program, self.gradient = (
            settings,
            active,
            program,
            gradient,
        )
        self.traces, self.prefix, self.optimizer = traces, prefix, optimizer
        self.logs: ClientLogs | ListedLogs = logs
        self.keys, self._make_noise_keys = keys, noise_keys
        self.travel = travel
        self.phase = active.phase.name
        self._tick = Tick(None, [])
        self._logged = False
        self._calls: dict[str, int] = {}
        self.whole: Repeated[Any] | None = None

    @property
    def lr(self) -> float:
        """Learning rate of the phase."""
        return self.optimizer.lr

    def begin(self, tick: Tick, step: int) -> None:
        """Start a tick, in which each of its clients takes the step of this number."""
        # Public samples may have no labels that a loss or an accuracy could mean.
        self._tick, self._logged, self.step = tick, self.active.phase.data == "public", step
        self._calls.clear()

    def train(self, model: Model, batch: list[Minibatch]) -> Model:
        """Step each client's optimizer on its gradient."""
        return self.update(model, self.grad(model, batch))

    def grad(
        self,
        model: Model,
        batch: list[Minibatch],
        also: tuple[str, ...] = (),
        objective: Objective | None = None,
        given: Tree | None = None,
        weights: Tensor | None = None,
        sample_data: Tree | None = None,
    ) -> Model:
        """Compute gradients ``(clients, ...)`` of the mean loss over the step's minibatches."""
        materialize(model, self.active.buffers)
        model = shielded(model, self.active.parameter_split.buffers)
        names = self.active.trainable + also
        total: Model = {}
        terms = split_terms([m.width for m in batch], objective, given, weights, sample_data)
        for minibatch, term in zip(batch, terms, strict=True):
            grads = self._minibatch_grad(model, minibatch, names, term)
            # Minibatches may reach different parameters.
            total |= {k: total[k] + g if k in total else g for k, g in grads.items()}
        self._logged = True
        accumulate = self.settings.accumulate
        return tmap(lambda g: g / accumulate, total) if accumulate > 1 else total

    def loss(self, model: Model, batch: list[Minibatch]) -> tuple[Tensor, Tensor]:
        """Compute the mean loss over the step's samples, and their number, ``(clients,)``."""
        model = self._unwritten(model)
        sums = []
        for minibatch in batch:
            self.gradient.number = self._number(minibatch)
            inputs = self._inputs(minibatch, minibatch.samples())
            loss = self.gradient.loss(model, inputs).detach()
            sums.append(loss.double() * send(minibatch.sizes, loss.device))
        count = torch.stack([m.sizes for m in batch]).sum(0).to(sums[0])
        return torch.stack(sums).sum(0) / count, count

    def outputs(self, model: Model, batch: list[Minibatch]) -> Any:
        """Return the module's outputs, ``(clients, samples, ...)``."""
        return self._observed(model, batch, "outputs")

    def features(self, model: Model, batch: list[Minibatch]) -> Any:
        """Return the inputs of the module's head, ``(clients, samples, ...)``."""
        return self._observed(model, batch, "features")

    def _observed(self, model: Model, batch: list[Minibatch], what: str) -> Any:
        model = self._unwritten(model)
        found = []
        for minibatch in batch:
            number = self._number(minibatch)

            def observed(one: Model, inputs: Inputs, number: Any = number) -> Any:
                key = inputs.get("key")
                plain = self.active.phase.evaluate_only
                return self.program.observed(one, inputs["data"], key, number, what, plain)

            inputs = self._inputs(minibatch, minibatch.samples())
            found.append(self.gradient.run(observed, model, inputs))
        return join_batches(found)

    def losses(self, model: Model, batch: list[Minibatch]) -> Tensor:
        """Return the losses of the samples, ``(clients, samples)``."""
        model = self._unwritten(model)

        def losses(one: Model, inputs: Inputs) -> Tensor:
            given = (inputs["data"], inputs.get("key"), inputs.get("mask"))
            return self.program.sample_losses(one, *given)

        inputs = [self._inputs(minibatch, minibatch.samples()) for minibatch in batch]
        return torch.cat([self.gradient.run(losses, model, one) for one in inputs], 1)

    def sample_grads(self, model: Model, batch: list[Minibatch]) -> Model:
        """Return the gradients of the samples' losses, ``(clients, samples, ...)``."""
        self.active.require_independent_samples()
        model = self._unwritten(model)
        trained = {name: model[name].detach() for name in self.active.trainable}
        fixed = {name: leaf for name, leaf in model.items() if name not in trained}
        inputs = [self._inputs(minibatch, minibatch.samples()) for minibatch in batch]
        found = [self.gradient.sample_grads(trained, fixed, one) for one in inputs]
        return tmap(lambda *parts: torch.cat(parts, 1), found[0], *found[1:])

    def update(self, model: Model, grads: Model, slot: str = "model") -> Model:
        """Clip each client's gradients and step the optimizer."""
        settings = self.settings
        if self.travel is not None and slot == "model" and grads:
            self.travel.step(self._tick.rows)
        if settings.clip_value:
            grads = select(grads, self.optimizer.names)
            grads = clip(grads, settings.clip_value, settings.clip_algorithm)
        call = self._calls.get(slot, 0)
        self._calls[slot] = call + 1
        return self.optimizer.update(model, grads, slot, self._tick.rows, call)

    def noise(self, like: Tree, key: str = "noise") -> Tree:
        """Draw normal numbers of the clients' steps, ``(clients, ...)``."""
        if self.whole is not None and self.whole.recording:
            raise TypeError("it draws noise")
        keys = self._noise_keys
        keys = keys if self._tick.rows is None else keys[self._tick.rows]
        return noise(mix(keys + self.step), like, key)

    @cached_property
    def _noise_keys(self) -> Tensor:
        return self._make_noise_keys()

    def samples(self, batch: list[Minibatch]) -> tuple[Any, Tensor]:
        """Return the samples of a step's minibatches, and a mask of the real ones."""
        data, masks = [], []
        for minibatch in batch:
            data.append(minibatch.samples())
            width = next(batch_leaves(data[-1])).shape[1]
            sizes = minibatch.sizes
            real = torch.arange(width, device=sizes.device) < sizes.unsqueeze(1)
            masks.append(send(real, self.settings.device))
        return join_batches(data), torch.cat(masks, 1)

    def report(self, loss: Tensor, batch: list[Minibatch]) -> None:
        """Log a loss ``(clients,)``, weighted by samples."""
        self.program.log.options.setdefault("train_loss", LogOptions())
        sizes = torch.stack([minibatch.sizes for minibatch in batch]).sum(0)
        self.logs.add({"train_loss": loss, LOSS: loss}, sizes, self._tick.rows)

    def _unwritten(self, model: Model) -> Model:
        """Copy the buffers of a model that a forward pass may write to."""
        kept = {name: model[name].clone() for name in self.active.buffers if name in model}
        model = {**model, **kept}
        materialize(model, self.program.throwaway)
        return model

    def key(self, minibatch: Minibatch) -> Tensor | None:
        """Make the keys of a minibatch's random numbers; None if steps draw none."""
        if self.keys is None:
            return None
        keys = self.keys if self._tick.rows is None else self.keys[self._tick.rows]
        return mix(keys + minibatch.number)

    def _number(self, minibatch: Minibatch) -> Any:
        """Return a minibatch's number as the module's step gets it."""
        whole = self.whole
        recorder = self.traces if whole is None or not whole.recording else whole
        return recorder.seen(minibatch.number)

    def _inputs(self, minibatch: Minibatch, data: Any) -> dict[str, Any]:
        """Collect the inputs of a client's program besides the model, leaves ``(clients, ...)``."""
        inputs: dict[str, Any] = {"data": data}
        key = self.key(minibatch) if minibatch.key is None else minibatch.key
        if key is not None:
            inputs["key"] = key
        if minibatch.mask is not None:
            inputs["mask"] = minibatch.mask
        return inputs

    def _minibatch_grad(
        self, model: Model, minibatch: Minibatch, names: tuple[str, ...], term: Term | None
    ) -> Model:
        trained = {name: model[name].detach() for name in names}
        fixed = {name: leaf for name, leaf in model.items() if name not in trained}
        # Buffers that a step may write to need a row per client, also where they are thrown away.
        materialize(fixed, self.program.throwaway)
        # The cached features may not belong to a method's second model.
        cached = minibatch.features is not None and self.prefix.fits(model)
        inputs = self._inputs(minibatch, minibatch.data if cached else minibatch.samples())
        if cached:
            inputs["features"] = minibatch.features

        result: Result

        def differentiated(trained: Model, fixed: Model, inputs: Inputs) -> tuple[Result, int]:
            self.gradient.number = self._number(minibatch)
            return self.gradient(trained, fixed, inputs), self.program.log.way()

        if term is None:
            kind = self.traces.kind(minibatch.number)
            result, way = self.traces.run(differentiated, trained, fixed, inputs, kind=kind)
            self.program.log.replayed(way)
        else:
            self.gradient.objective = term.objective
            result, _ = differentiated(trained, fixed, {**inputs, **term.tensors})
        grads, loss, logged = result
        if not self._logged:
            values = {**self.gradient.metrics.update(logged, self._tick.rows), LOSS: loss}
            reductions = self.program.log.reductions
            sizes = minibatch.sizes if minibatch.size is None else minibatch.size
            self.logs.add(values, sizes, self._tick.rows, reductions)
        return grads
