"""The step interface of one client, whose steps run one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pfl.contract.records import LogOptions, SlotStates
from lightning_pfl.contract.view import Objective
from lightning_pfl.core.draws import noise
from lightning_pfl.core.mixture import shielded
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, materialize, select
from lightning_pfl.data.batch import batch_leaves, batch_length, join_batches, map_batch
from lightning_pfl.engine.active_phase import ActivePhase
from lightning_pfl.engine.base import (
    EngineSettings,
    LocalWork,
    require_same_entries,
)
from lightning_pfl.engine.client_logs import LOSS, LogsOfSteps
from lightning_pfl.engine.client_randomness import ClientRandomness, Source
from lightning_pfl.engine.feature_cache import PrefixCache
from lightning_pfl.engine.logs import ListedLogs, computed_metrics, sorted_out
from lightning_pfl.engine.minibatches import Featured, samples_of
from lightning_pfl.engine.noted_metrics import Calls, NotedMetrics, made
from lightning_pfl.engine.optimizer import ClientOptimizer, Recordings, clip
from lightning_pfl.engine.optimizer_options import why_not_elementwise
from lightning_pfl.engine.program import ClientProgram, sample_gradient
from lightning_pfl.engine.recording import NotRecordableError
from lightning_pfl.engine.safety.snapshot import metric_objects, restore, snapshot
from lightning_pfl.engine.steps import split_draws
from lightning_pfl.engine.terms import Term, split_terms
from lightning_pfl.engine.trace import Given, Traces
from lightning_pfl.engine.travel import Travel
from lightning_pfl.engine.whole_steps import WholeSteps
from lightning_pfl.methods.base import Method

MEASURED = "measured loss"
"""Marks recordings of the loss alone."""
KNOWN = 4
"""Models whose leaves are described once, as long as they stay: methods step two, or make new."""


def _plain(batch: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Return a step's minibatches without features."""
    return [(number, samples_of(minibatch)) for number, minibatch in batch]


def take_step(method: Method, state: Tree, batch: Any, local_step: SequentialLocalStep) -> Tree:
    """Take a step of a method, and check what it returns."""
    new = method.client_step(state, batch, local_step)
    require_same_entries(method, state, new)
    return new


@contextmanager
def _measuring() -> Iterator[None]:
    """Compute losses without gradients inside a ``with`` block.

    Raises:
        ValueError: If a step asks for a gradient there.
    """
    with torch.no_grad():
        try:
            yield
        except RuntimeError as cause:
            if "does not require grad" not in str(cause):
                raise
            raise ValueError(
                "Expected `training_step` to ask for no gradient by `torch.autograd.grad`, as the "
                f"method also measures its loss, without gradients, but got: {cause}. Use "
                "`torch.func.grad` in it, or another method."
            ) from cause


class SequentialLocalStep:
    """The :class:`~lightning_pfl.contract.local.LocalStep` of one client.

    Args:
        settings: The Trainer's flags.
        parameter_split: Names of the module.
        program: The user's step as a function.
        traces: Recordings of gradients and losses, for the phase that runs.
        whole: Recordings of whole steps.
        optimizer_steps: Recordings of optimizers' steps; None to record none.
        prefix: The features that minibatches may have.
        work: The client's work.
        source: What steps get to draw from.
        known: Whether the code of the module's step is known.
        noted: Notes calls of torchmetrics objects in steps that are recorded.
        watched: Whether to notice what steps draw while generators are seeded.

    Attributes:
        client_logs: What the client has logged, without torchmetrics objects.
        random: Keys of the client's random numbers, and whether steps draw any.
    """

    def __init__(
        self,
        settings: EngineSettings,
        parameter_split: ParameterSplit,
        program: ClientProgram,
        traces: Traces,
        whole: WholeSteps,
        optimizer_steps: Recordings | None,
        prefix: PrefixCache,
        work: LocalWork,
        source: Source,
        known: bool,
        noted: NotedMetrics,
        watched: bool,
    ) -> None:
        self.settings, self.parameter_split, self.program = settings, parameter_split, program
        self.traces, self.whole, self.optimizer_steps = traces, whole, optimizer_steps
        self.template = work.optimizer
        self.random = ClientRandomness(settings, program, whole, work, source, known, watched)
        self.noted = noted
        self.prefix = prefix
        self.client_logs = LogsOfSteps()
        self.logs: LogsOfSteps | ListedLogs = self.client_logs
        self.metrics: dict[str, Metric] = {}
        self.travel = Travel(1, settings.device) if work.method.measures_travel else None
        self.method = type(work.method).__name__

    def begin(
        self,
        active: ActivePhase,
        number: int,
        schedule: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        """Start a phase with a fresh optimizer.

        Args:
            active: The phase.
            number: Its number.
            schedule: The optimizer's options at each step; None if they stay.
        """
        self.active, self.phase = active, active.phase.name
        self.random.begin(number)
        self.step = -1
        self._known: dict[tuple[Any, ...], tuple[list[Tensor], Given]] = {}
        self._schedule = schedule
        self._optimizer: ClientOptimizer | None = None
        if self.travel is not None and not active.phase.evaluate_only:
            self.travel.begin(self.template, active.phase.lr)

    @property
    def optimizer(self) -> ClientOptimizer:
        """The client's optimizer in this phase, which replayed steps don't need."""
        if self._optimizer is None:
            self._optimizer = ClientOptimizer(
                self.template,
                self.parameter_split,
                1,
                self.active.phase.lr,
                False,
                self._schedule,
                self.optimizer_steps,
            )
        return self._optimizer

    def take_whole_steps(
        self,
        context: int,
        rates: Mapping[str, Tensor],
        method: Method,
        state: Tree,
        steps: Iterable[list[tuple[int, Any]]],
        count: int,
    ) -> Tree:
        """Take the steps of a phase, recorded with the method's arithmetic and the optimizer's.

        Args:
            context: As of :meth:`~lightning_pfl.engine.whole_steps.WholeSteps.context`.
            rates: Learning rates that steps read, as of
                :func:`~lightning_pfl.engine.optimizer_options.rates_of`.
            method: The method.
            state: The state before.
            steps: Each step's minibatches.
            count: How many minibatches there are at most.
        """
        whole = self.whole
        kept = {} if self._optimizer is None else self._optimizer.placed()
        whole.load(context, {"state": state, "optimizer": kept, "rates": dict(rates)})
        registers: dict[str, Tensor] = whole.state()["rates"]
        seeds, rows = self.random.keys(count)
        with self.random.around_whole_steps():
            for step in steps:
                self._count_step()
                if self._schedule is not None:
                    for number, rate in registers.items():
                        rate.fill_(self._schedule[self.step][int(number)]["lr"])
                numbers, minibatches = map(list, zip(*step, strict=True))
                mine = [seeds[number] for number in numbers if seeds]
                keys = [rows[number] for number in numbers if seeds]
                take = partial(self._take_whole_step, method, numbers, mine)
                logged = whole.step(take, (minibatches, keys), whole.kind(*numbers))
                for values, size, way in logged:
                    self.program.log.replayed(way)
                    self._log(values, {}, size)
        tree = whole.unload()
        if self._optimizer is not None:
            self._optimizer.place(tree["optimizer"], tree["rates"])
        new: Tree = tree["state"]
        return new

    def _take_whole_step(
        self,
        method: Method,
        numbers: list[int],
        seeds: list[int],
        tree: Tree,
        given: tuple[list[Any], list[Tensor]],
    ) -> tuple[Tree, Any]:
        """Take a step whose operators are recorded.

        Args:
            method: The method.
            numbers: The numbers of its minibatches.
            seeds: Their seeds; empty where no generator is seeded.
            tree: The client's state, its optimizer's, and learning rates.
            given: The minibatches, and their keys.

        Returns:
            The new tree, and what was logged.
        """
        minibatches, keys = given
        self.optimizer.place(tree["optimizer"], tree["rates"])
        self.prefix.moved(tree["state"])
        self._logged = self.active.phase.data == "public"
        logs, self.logs = self.logs, ListedLogs(self.program.log)
        pairs = list(zip(numbers, minibatches, strict=True))
        batch = split_draws(pairs, self.active.phase.batches_per_step)
        try:
            with self.random.in_whole_step(numbers, seeds, keys):
                new = take_step(method, tree["state"], batch, self)
            return tree | {"state": new, "optimizer": self.optimizer.placed()}, self.logs.listed
        finally:
            self.logs = logs

    @contextmanager
    def running(self, per_epoch: int, before: SlotStates | None) -> Iterator[SlotStates | None]:
        """Run a phase's steps, and yield a dict that ends with its optimizer's states.

        Args:
            per_epoch: Number of the client's minibatches in an epoch.
            before: The states with which it begins; None for fresh ones, which aren't kept.
        """
        if before is None:
            yield None
            return
        self.optimizer.load([before])
        after = dict(before)
        yield after
        after |= self.optimizer.states()[0]

    def train(self, model: Model, batch: list[tuple[int, Any]]) -> Model:
        """Step the optimizer on the gradient."""
        return self.update(model, self.grad(model, batch))

    def _log(self, values: dict[str, Tensor], metrics: dict[str, Metric], size: int) -> None:
        self.metrics |= metrics
        calls: Calls | None = self.program.log.calls
        if calls is not None and isinstance(self.logs, LogsOfSteps):
            values, metrics = made(calls, values, self.parameter_split.module)
            self.metrics |= metrics
        self.logs.add(values, size, None, self.program.log.reductions)

    def _make_calls(self, values: dict[str, Tensor]) -> None:
        """Make a step's calls of torchmetrics objects, of which nothing is logged."""
        calls: Calls | None = self.program.log.calls
        if calls is not None and not self._logged:
            if not isinstance(self.logs, LogsOfSteps):
                raise NotRecordableError("it calls a torchmetrics object and skips its minibatch")
            made(calls, values, self.parameter_split.module)

    @property
    def _is_recorded(self) -> bool:
        return self.traces.recording or self.whole.recording

    def _number(self, number: int) -> Any:
        """Return a minibatch's number as the module's step gets it."""
        return (self.whole if self.whole.recording else self.traces).seen(number)

    @contextmanager
    def _metrics_kept(self, kept: bool = True) -> Iterator[None]:
        """Leave torchmetrics objects as they are where nothing is logged of a step."""
        # What is noted doesn't tell them anything.
        objects = self._metric_objects if kept and not self.noted.active else ()
        before = [snapshot(one) for one in objects]
        try:
            yield
        finally:
            for one, was in zip(objects, before, strict=True):
                restore(one, was)

    @cached_property
    def _metric_objects(self) -> tuple[nn.Module, ...]:
        return metric_objects(self.parameter_split.module)

    def new_step(self) -> None:
        """Start a step, whose first gradient logs, unless samples are public."""
        self._count_step()
        if self._schedule is not None:
            self.optimizer.at(self.step)

    def _count_step(self) -> None:
        self._logged = self.active.phase.data == "public"
        self.step += 1
        if not self.active.phase.evaluate_only:
            self.random.new_step()

    def end_step(self) -> None:
        """End a step."""

    @property
    def lr(self) -> float:
        """Learning rate of the phase."""
        return self.optimizer.lr

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
        materialize(model, self.active.buffers)
        model = shielded(model, self.parameter_split.buffers)
        known = self._given(model, self.active.trainable + also)
        if not self.prefix.fits(model):
            batch = _plain(batch)
        widths = [batch_length(samples_of(minibatch)) for _, minibatch in batch]
        total: Model = {}
        terms = split_terms(widths, objective, given, weights, sample_data)
        for (number, minibatch), term, width in zip(batch, terms, widths, strict=True):
            plain = term is None
            with self._metrics_kept(self._logged), self.random.of(number, plain) as key:
                if term is None:
                    step = partial(self._differentiated, number)
                    kind = self.traces.kind(number)
                    found = self.traces.run(step, known, minibatch, key, kind=kind)
                    grads, values, metrics, way = found
                    self.program.log.replayed(way)
                else:
                    grads, values, metrics, _ = self._differentiated(
                        number, known.tree, minibatch, key, term.first()
                    )
            if LOSS not in values:  # `training_step` may skip a batch
                self._make_calls(values)
                continue
            if not self._logged:
                self._log(values, metrics, width)
            # Minibatches may reach different parameters.
            if total:
                grads = {k: total[k] + g if k in total else g for k, g in grads.items()}
            total = {**total, **grads}
        self._logged = True
        return total

    def _given(self, model: Model, names: tuple[str, ...]) -> Given:
        """Return the client's trained leaves and the others, without client axis.

        Steps of an optimizer change leaves in place, so that most steps have those of the last.
        """
        key = names, *map(id, model.values())
        known = self._known.get(key)
        if known is None:
            trained = {name: model[name][0] for name in names}
            fixed = {name: leaf[0] for name, leaf in model.items() if name not in trained}
            if len(self._known) >= KNOWN:
                self._known.clear()
            # With the leaves, whose ids thus stay theirs.
            known = self._known[key] = [*model.values()], Given((trained, fixed))
        return known[1]

    def _differentiated(
        self,
        number: int,
        model: tuple[Model, Model],
        minibatch: Any,
        key: Tensor | None,
        term: Term | None = None,
    ) -> tuple[Model, dict[str, Tensor], dict[str, Metric], int | None]:
        """Compute gradients ``(1, ...)``, logged values, torchmetrics objects, and how they log.

        The values, with the loss, are ``(1,)``; there is no loss if the step skips the minibatch.
        """
        trained, fixed = model
        features = minibatch[1] if isinstance(minibatch, Featured) else None
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in trained.items()}
        accumulate = self.settings.accumulate
        grads: Model = {}

        def backward(loss: Tensor) -> None:
            try:
                grads.update(self._backward(loss / accumulate if accumulate > 1 else loss, leaves))
            except RuntimeError as cause:
                if loss.requires_grad:
                    raise
                raise ValueError(self.active.unreached()) from cause

        self.noted.begin()
        loss, logged = self.program.training_loss(
            {**fixed, **leaves},
            *(samples_of(minibatch), key, self._number(number), None, features, backward, term),
        )
        values, metrics = sorted_out(loss, logged)
        if self.noted.active:
            self.program.log.calls = self.noted.taken(logged)
            values, metrics = values | self.noted.given(), {}
        way = self.program.log.way() if self.traces.recording else None
        return grads, values, metrics, way

    def _backward(self, loss: Tensor, leaves: Model) -> Model:
        if self._is_recorded:
            # `backward` would record a copy of each gradient, but reentrant checkpoints need it.
            found: Sequence[Tensor | None] = torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True
            )
        else:
            # A step that calls `backward` by itself, for an adversarial input, leaves gradients.
            for leaf in leaves.values():
                leaf.grad = None
            loss.backward()
            found = [leaf.grad for leaf in leaves.values()]
        return {n: g[None] for n, g in zip(leaves, found, strict=True) if g is not None}

    def loss(self, model: Model, batch: list[tuple[int, Any]]) -> tuple[Tensor, Tensor]:
        """Compute the mean loss over the step's samples, and their number, ``(1,)``."""
        given = self._given(self._unwritten(model), ())
        device = self.settings.device
        sums, samples = [], 0
        for number, minibatch in _plain(batch):
            step = partial(self._measured, number)
            with _measuring(), self._metrics_kept(), self.random.of(number, True) as key:
                kind = self.traces.kind(number)
                loss = self.traces.run(step, given, minibatch, key, MEASURED, kind=kind)
            if loss is not None:
                size = batch_length(minibatch)
                sums.append(loss.double() * size)
                samples += size
        count = torch.full((1,), float(samples), dtype=torch.float64, device=device)
        if not sums:
            return torch.zeros_like(count), count
        total = torch.stack(sums).sum() if len(sums) > 1 else sums[0]
        return total.view(1) / count, count

    def _measured(
        self, number: int, model: tuple[Model, Model], minibatch: Any, key: Tensor | None, what: str
    ) -> Tensor | None:
        return self.program.measured_loss(model[1], minibatch, key, self._number(number), None)

    def outputs(self, model: Model, batch: list[tuple[int, Any]]) -> Any:
        """Return the module's outputs, ``(1, samples, ...)``."""
        return self._observed(model, batch, "outputs")

    def features(self, model: Model, batch: list[tuple[int, Any]]) -> Any:
        """Return the inputs of the module's head, ``(1, samples, ...)``."""
        return self._observed(model, batch, "features")

    def _observed(self, model: Model, batch: list[tuple[int, Any]], what: str) -> Any:
        one, plain = self._one(model), self.active.phase.evaluate_only
        found = []
        for number, minibatch in _plain(batch):
            with self._metrics_kept(), self.random.of(number) as key:
                at = self._number(number)
                found.append(self.program.observed(one, minibatch, key, at, what, plain)[None])
        return join_batches(found)

    def losses(self, model: Model, batch: list[tuple[int, Any]]) -> Tensor:
        """Return the losses of the samples, ``(1, samples)``."""
        one = self._one(model)
        found = []
        for number, minibatch in _plain(batch):
            with _measuring(), self._metrics_kept(), self.random.of(number) as key:
                found.append(self.program.sample_losses(one, minibatch, key, None, checked=True))
        return torch.cat(found).unsqueeze(0)

    def sample_grads(self, model: Model, batch: list[tuple[int, Any]]) -> Model:
        """Return the gradients of the samples' losses, ``(1, samples, ...)``."""
        self.active.require_independent_samples()
        one = self._one(model)
        trained = {n: one[n].detach().requires_grad_() for n in self.active.trainable}
        found = []
        for number, minibatch in _plain(batch):
            with self._metrics_kept(), self.random.of(number) as key:
                losses = self.program.sample_losses(
                    {**one, **trained}, minibatch, key, None, training=True, checked=True
                )
            found += [sample_gradient(loss, trained) for loss in losses]
        return {n: torch.stack([grads[n] for grads in found]).unsqueeze(0) for n in trained}

    def _unwritten(self, model: Model) -> Model:
        """Copy the buffers of the client's model that a forward pass may write to."""
        return model | {name: model[name].clone() for name in self.active.buffers if name in model}

    def _one(self, model: Model) -> Model:
        """Return the client's model without client axis, with buffers of its own."""
        return {name: leaf[0] for name, leaf in self._unwritten(model).items()}

    def update(self, model: Model, grads: Model, slot: str = "model") -> Model:
        """Clip the gradient and step the optimizer."""
        if not grads:
            return model
        grads = self._ready(grads, slot)
        with self.random.of_optimizer() if self._optimizer_draws else nullcontext():
            return self.optimizer.update(model, grads, slot)

    @cached_property
    def _optimizer_draws(self) -> bool:
        """Whether the optimizer may draw random numbers: torch's own don't."""
        return why_not_elementwise(self.template) is not None

    def _ready(self, grads: Model, slot: str) -> Model:
        """Count the step, and clip its gradient."""
        if self.travel is not None and slot == "model":
            self.travel.step()
        value, algorithm = self.settings.clip_value, self.settings.clip_algorithm
        if not value:
            return grads
        return clip(select(grads, self.optimizer.names), value, algorithm)

    def noise(self, like: Tree, key: str = "noise") -> Tree:
        """Normal numbers of the client's step, ``(1, ...)``."""
        if self._is_recorded:
            raise TypeError("it draws noise")
        return noise(self.random.key(self.step), like, key)

    def samples(self, batch: list[tuple[int, Any]]) -> tuple[Any, Tensor]:
        """Return the samples of a step's minibatches; all are real."""
        data = join_batches([map_batch(one, lambda leaf: leaf[None]) for _, one in _plain(batch)])
        first = next(batch_leaves(data))
        return data, first.new_ones(first.shape[:2], dtype=torch.bool)

    def report(self, loss: Tensor, batch: list[tuple[int, Any]]) -> None:
        """Log a loss ``(1,)``, weighted by samples."""
        self.program.log.options.setdefault("train_loss", LogOptions())
        size = sum(batch_length(minibatch) for _, minibatch in _plain(batch))
        self.logs.add({"train_loss": loss, LOSS: loss}, size, None)

    def finish(self) -> dict[str, Tensor]:
        """Return the values of the client's torchmetrics objects, ``(1,)`` each."""
        return computed_metrics(self.metrics)
