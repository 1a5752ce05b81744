"""The reference engine: one client and one minibatch after another, in plain torch.

The method's functions run with one client on the client axis, without padding, grouping, caching
or batching over clients. The vectorized engine must return the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pfl.contract.records import (
    Evaluation,
    LocalResult,
    LogOptions,
    OnClients,
    SlotStates,
)
from lightning_pfl.contract.view import Objective
from lightning_pfl.core.draws import mix, noise, random_keys
from lightning_pfl.core.errors import MisconfigurationException, naming_clients
from lightning_pfl.core.kept_memory import KeptMemory
from lightning_pfl.core.mixture import shielded
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Stacked, Tree, materialize, select
from lightning_pfl.data.batch import batch_leaves, batch_length, join_batches, map_batch
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.active_phase import ActivePhase, is_unmodified
from lightning_pfl.engine.base import (
    EngineSettings,
    EvaluationWork,
    LocalWork,
    ModuleLoop,
    begin,
    end,
    require_same_entries,
)
from lightning_pfl.engine.bound import BoundModule
from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.kernels import LargeProducts
from lightning_pfl.engine.logs import LOSS, ClientLogs, ListedLogs, computed_metrics, sorted_out
from lightning_pfl.engine.minibatches import ClientMinibatches
from lightning_pfl.engine.optimizer import (
    ClientOptimizer,
    Recordings,
    clip,
    options_of,
    why_not_elementwise,
)
from lightning_pfl.engine.program import ClientProgram, sample_gradient
from lightning_pfl.engine.safety.global_rng import watch_global_rng
from lightning_pfl.engine.safety.snapshot import attributes, changed, restore, snapshot
from lightning_pfl.engine.sequential_evaluation import SequentialEvaluation
from lightning_pfl.engine.steps import Limits, phase_budget, phase_limits, phase_steps, split_draws
from lightning_pfl.engine.terms import Term, split_terms
from lightning_pfl.engine.trace import Given, Same, Traces, fingerprint, of_object
from lightning_pfl.engine.travel import Travel
from lightning_pfl.engine.whole_steps import WholeSteps
from lightning_pfl.methods.base import Method, Phase

MEASURED = "measured loss"
"""Marks recordings of the loss alone."""
KNOWN = 4
"""Models whose leaves are described once, as long as they stay: methods step two, or make new."""


class SequentialEngine:
    """Runs one client at a time.

    Args:
        module: The user's module.
        parameter_split: Names of the module.
        settings: The Trainer's flags.
        loop: Lightning's own loop, for modules with code inside a step; None for others.
        record: Whether the steps of a ``PersonalizedModule`` may be recorded and replayed.

    Attributes:
        deterministic: Whether no training step has drawn random numbers so far; None before the
            first one.
        random_calls: Random calls in the last training step; 0 shows that the step is
            deterministic.
        quiet: Steps of evaluations so far, and whether they have never drawn, nor, the first time,
            written to an attribute of the module.
        draws_elsewhere: Whether the last training step, or a step of the last evaluation, used
            Python's or NumPy's global generator, which can't differ between clients of a batched
            program.
    """

    name = "sequential"

    def __init__(
        self,
        module: Any,
        parameter_split: ParameterSplit,
        settings: EngineSettings,
        loop: ModuleLoop | None = None,
        record: bool = False,
    ) -> None:
        self.module, self.parameter_split, self.settings = module, parameter_split, settings
        self.loop = loop
        self.fast = record and is_unmodified(module)
        self.traces = Traces(enabled=self.fast)
        self.whole, self.checks = WholeSteps(), Checks(module)
        self._memory = KeptMemory()
        self.optimizer_steps: Recordings | None = {} if record else None
        self._program: ClientProgram | None = None
        self._fingerprints: dict[int, tuple[Any, ...]] = {}
        self._contexts: dict[int, int | None] = {}
        self._active: dict[int, ActivePhase] = {}
        self._evaluators: dict[str, ClientProgram] = {}
        self.quiet: dict[str, bool] = {}
        self._evaluation = SequentialEvaluation(
            module, settings, self.traces, self.fast, self.quiet
        )
        self.deterministic: bool | None = None
        self.random_calls = 0
        self.draws_elsewhere = False
        self.limits = Limits(
            settings.accumulate, settings.limit_train_batches, settings.overfit_batches
        )

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Count the optimizer steps of each client, int64 ``(clients,)``."""
        return phase_steps(data, clients, phases, self.limits)

    def train(self, work: LocalWork, on_clients: OnClients | None = None) -> LocalResult:
        """Train a cohort locally; see :class:`~lightning_pfl.engine.base.Engine`.

        To intercept random functions costs as much as a small step, so clients train without it
        where no step has drawn so far. A client whose steps draw after all is trained once more,
        with keyed random functions.
        """
        check = self.checks.due((work.method, *recorded_settings(work.method).values()))
        self.traces.begin(check)
        self.whole.begin_round(check)
        self._fingerprints.clear()
        self._contexts.clear()
        self._active.clear()
        results: list[LocalResult] = []
        self._memory.begin_round()
        uploads, client_state = (Stacked(len(work.info), self._memory) for _ in range(2))

        for row in range(len(work.info)):
            one = work.rows(slice(row, row + 1))
            if self.deterministic and self.loop is None:
                # Replayed steps don't write to attributes.
                before = {} if self.traces.enabled else snapshot(self.module)
                with watch_global_rng(None, self.checks.known) as found:
                    result = self._client(one, SequentialLocalStep(self, one, keyed=False))
                if found.moved or found.moved_torch:
                    if before:
                        restore(self.module, before)
                    self.deterministic = False
            if not self.deterministic or self.loop is not None:
                local_step = SequentialLocalStep(self, one, keyed=True)
                before = snapshot(self.module) if self.traces.enabled else {}
                result = self._client(one, local_step)
                self._note_draws(local_step)
                if before and (name := changed(self.module, before)) is not None:
                    self.traces.stop(f"a step writes to {name!r}, which a recording wouldn't")
            uploads.put(row, result.uploads)
            client_state.put(row, result.client_state)
            results.append(replace(result, uploads={}, client_state={}))
            if on_clients is not None:
                on_clients([row], result.loss)
        names = dict.fromkeys(name for result in results for name in result.logs)
        missing = torch.full((1,), torch.nan, dtype=torch.float64, device=self.settings.device)
        return LocalResult(
            uploads.tree(),
            client_state.tree(),
            {name: torch.cat([r.logs.get(name, missing) for r in results]) for name in names},
            {name: option for result in results for name, option in result.options.items()},
            torch.cat([result.loss for result in results]),
            [state for result in results for state in result.optimizers],
        )

    def program(self, augment: Callable[[Any], Any] | None) -> ClientProgram:
        """Return the user's step, cached since a replayed step doesn't log its options again."""
        hooks, known = self.settings.batch_hooks, self._program
        if known is None or known.augment is not augment or known.hooks is not hooks:
            # Also in steps without a recording, so that all have the same bits.
            kernels = LargeProducts if self.fast else nullcontext
            known = self._program = ClientProgram(self.module, self.settings, augment, kernels)
        return known

    def records(self, work: LocalWork) -> bool:
        """Whether steps of this work may be recorded."""
        hooked = self.settings.batch_hooks is not None
        return self.traces.enabled and not hooked and getattr(work.data, "augment", None) is None

    def whole_steps(
        self, work: LocalWork, number: int, active: ActivePhase, local_step: SequentialLocalStep
    ) -> int | None:
        """Return what whole recorded steps depend on, as a number; None where there are none.

        Args:
            work: The client's work.
            number: The number of the phase.
            active: The phase.
            local_step: The client's step interface.
        """
        if local_step.keyed:
            return None
        if number not in self._contexts:
            self._contexts[number] = self._find_context(work, number, active, local_step.program)
        return self._contexts[number]

    def _find_context(
        self, work: LocalWork, number: int, active: ActivePhase, program: ClientProgram
    ) -> int | None:
        recordable = hasattr(type(work.method).client_step, "recorded_settings")
        known = recordable and why_not_elementwise(work.optimizer) is None
        plain = work.schedule is None and not work.method.measures_travel
        if not (known and plain and self.records(work)):
            return None
        settings = recorded_settings(work.method)
        return self.whole.context(
            (
                type(work.method),
                *((name, of_object(value)) for name, value in settings.items()),
                (active.trainable, active.phase.name, active.phase.lr, active.phase.data),
                (Same(program), self.settings_in(number)),
                options_of(work.optimizer),
            )
        )

    def settings_in(self, phase: int) -> tuple[Any, ...]:
        """Return the module's settings in a phase of this round; its modes differ."""
        if phase not in self._fingerprints:
            self._fingerprints[phase] = fingerprint(self.module)
        return self._fingerprints[phase]

    def _note_draws(self, local_step: SequentialLocalStep) -> None:
        if local_step.drew is not None:
            # A generator of the module's own leaves no trace in the global ones.
            own = any(isinstance(held, torch.Generator) for *_, held in attributes(self.module))
            drew = local_step.drew or own
            self.deterministic = self.deterministic is not False and not drew

    def _client(self, work: LocalWork, local_step: SequentialLocalStep) -> LocalResult:
        method, info, data = work.method, work.info, work.data
        client = int(info.index)
        received, client_state = work.received, work.client_state
        state = begin(method, received, client_state, info)
        kept = None if work.kept is None else dict(work.kept[0])
        first_epoch = 0
        for number, phase in enumerate(work.phases):
            if number not in self._active:
                self._active[number] = ActivePhase(phase, self.parameter_split)
            active = self._active[number]
            budget = phase_budget(phase)
            order = (info.round, work.stream, first_epoch)
            minibatches = ClientMinibatches(
                work.split(phase),
                client,
                budget,
                phase_limits(phase, self.limits),
                self.settings,
                *order,
            )
            with (
                active.modes(),
                local_step.program.capturing(),
                local_step.program.plain(phase.data == "public"),
            ):
                local_step.program.throwaway = active.throwaway
                whole = self.whole_steps(work, number, active, local_step)
                schedule = work.options(phase, len(minibatches.bounds))
                local_step.begin(active, number, schedule, whole is None)
                before = None if kept is None else kept.get(phase.name, {})
                steps = () if active.idle else minibatches
                with (
                    self._leaving_no_trace(phase) if whole is None else nullcontext(),
                    local_step.keeping(before) as after,
                    local_step.in_loop(minibatches.per_epoch, after),
                    naming_clients(
                        "client_step",
                        data.names,
                        [client],
                        info.round,
                        work.missing_labels(phase),
                    ),
                ):
                    if whole is None:
                        for step in steps:
                            batch = split_draws(step, phase.batches_per_step)
                            local_step.new_step()
                            state = take_step(method, state, batch, local_step)
                            local_step.end_step()
                    else:
                        state = local_step.take_whole_steps(whole, method, state, steps)
                if kept is not None and after:
                    kept[phase.name] = after
            if phase.data == "training":
                first_epoch += minibatches.epochs_used
        if local_step.travel is not None:
            info.travel = local_step.travel.total
        upload, client_state = end(method, work.received, client_state, state, info)
        with naming_clients("training_step", data.names, [client], info.round):
            logs = local_step.finish()
        missing = torch.full((1,), torch.nan, dtype=torch.float64, device=self.settings.device)
        loss = logs.pop(LOSS, missing)
        options = dict(local_step.program.log.options)
        states = [] if kept is None else [kept]
        return LocalResult(upload, client_state, logs, options, loss, states)

    @contextmanager
    def _leaving_no_trace(self, phase: Phase) -> Iterator[None]:
        """Restore the user's torchmetrics objects after an evaluation phase."""
        if not phase.evaluate_only:
            yield
            return
        before = snapshot(self.module)
        try:
            yield
        finally:
            restore(self.module, before)

    def evaluate(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Run a validation, test or prediction step for each client."""
        evaluation = self._evaluation.run(work, on_clients)
        self.draws_elsewhere = self._evaluation.draws_elsewhere
        return evaluation

    def groups(self, work: EvaluationWork) -> Tensor:
        """Number the program that evaluates each client, int64 ``(clients,)``: its own."""
        return torch.arange(len(work.clients))

    def may_replay(self, step: str) -> bool:
        """Whether steps of an evaluation may be recorded."""
        return self._evaluation.may_replay(step)


def recorded_settings(method: Method) -> dict[str, Any]:
    """Return the settings that a method's recordable step reads."""
    names = getattr(type(method).client_step, "recorded_settings", ())
    return {name: getattr(method, name) for name in names}


def take_step(method: Method, state: Tree, batch: Any, local_step: SequentialLocalStep) -> Tree:
    """Take a step of a method, and check what it returns."""
    new = method.client_step(state, batch, local_step)
    require_same_entries(method, state, new)
    return new


class SequentialLocalStep:
    """The step interface of one client (:class:`~lightning_pfl.contract.local.LocalStep`)."""

    def __init__(self, engine: SequentialEngine, work: LocalWork, keyed: bool) -> None:
        self.engine, self.template, self.keyed = engine, work.optimizer, keyed
        self.drew: bool | None = None
        settings, client, round = engine.settings, int(work.info.index), work.info.round
        self.program = engine.program(getattr(work.data, "augment", None))
        self.logs: ClientLogs | ListedLogs = ClientLogs(1, settings.device)
        self.metrics: dict[str, Metric] = {}
        self.key = random_keys(settings.seed, work.stream, round, [client])[0]
        self.travel = Travel(1, settings.device) if work.method.measures_travel else None
        self.method, self.loop = type(work.method).__name__, engine.loop
        self.bound: BoundModule | None = None

    def begin(
        self,
        active: ActivePhase,
        number: int,
        schedule: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        alone: bool = True,
    ) -> None:
        """Start a phase with a fresh optimizer.

        Args:
            active: The phase.
            number: Its number.
            schedule: The optimizer's options at each step; None if they stay.
            alone: Whether gradients may be recorded alone, and not with the rest of a step.
        """
        self.active, self.number, self.phase = active, number, active.phase.name
        self.step = -1
        self._known: dict[tuple[Any, ...], tuple[list[Tensor], Given]] = {}
        self._schedule = schedule
        self._optimizer: ClientOptimizer | None = None
        if self.travel is not None and not active.phase.evaluate_only:
            self.travel.begin(self.template, active.phase.lr)
        if (traces := self.engine.traces).enabled:
            recordable = self.program.augment is None and self.program.hooks is None
            settings = self.engine.settings_in(number)
            context = (active.trainable, self.program, settings)
            # The first client shows whether its steps write to attributes.
            recordable &= self.engine.deterministic is not None
            traces.enter(context if recordable and alone else None)

    @property
    def optimizer(self) -> ClientOptimizer:
        """The client's optimizer in this phase, which replayed steps don't need."""
        if self._optimizer is None:
            self._optimizer = ClientOptimizer(
                self.template,
                self.engine.parameter_split,
                1,
                self.active.phase.lr,
                False,
                self._schedule,
                self.engine.optimizer_steps,
            )
        return self._optimizer

    def take_whole_steps(
        self, context: int, method: Method, state: Tree, steps: Iterable[list[tuple[int, Any]]]
    ) -> Tree:
        """Take the steps of a phase, recorded with the method's arithmetic and the optimizer's.

        Args:
            context: As of :meth:`SequentialEngine.whole_steps`.
            method: The method.
            state: The state before.
            steps: Each step's minibatches.
        """
        whole, draws = self.engine.whole, self.active.phase.batches_per_step
        kept = {} if self._optimizer is None else self._optimizer.placed()
        whole.load(context, {"state": state, "optimizer": kept})

        def take(step: list[tuple[int, Any]], tree: Tree) -> tuple[Tree, Any]:
            self.optimizer.place(tree["optimizer"])
            self._logged = self.active.phase.data == "public"
            logs, self.logs = self.logs, ListedLogs()
            try:
                new = take_step(method, tree["state"], split_draws(step, draws), self)
                return {"state": new, "optimizer": self.optimizer.placed()}, self.logs.listed
            finally:
                self.logs = logs

        for step in steps:
            self.new_step()
            logged = whole.step(partial(take, step), [minibatch for _, minibatch in step])
            for values, size in logged:
                self.logs.add(values, size, None, self.program.log.reductions)
        tree = whole.unload()
        if self._optimizer is not None:
            self._optimizer.place(tree["optimizer"])
        new: Tree = tree["state"]
        return new

    @contextmanager
    def keeping(self, before: SlotStates | None) -> Iterator[SlotStates | None]:
        """Begin a phase with these optimizer states, and yield a dict that ends with the new ones.

        None stands for fresh ones, which aren't kept.
        """
        if before is None:
            yield None
            return
        self.optimizer.load([before])
        after = dict(before)
        yield after
        if self.loop is None:
            after |= self.optimizer.states()[0]

    @contextmanager
    def in_loop(self, per_epoch: int, kept: SlotStates | None) -> Iterator[None]:
        """Take a phase's steps in Lightning's own loop, if the module needs it.

        Args:
            per_epoch: Number of the client's minibatches in an epoch.
            kept: The optimizers' states, replaced at the end; None for fresh ones.
        """
        active, accumulate = self.active, self.engine.settings.accumulate
        if self.loop is None or active.idle or active.phase.evaluate_only:
            yield
            return
        self.steps_per_epoch = -(-per_epoch // accumulate)
        changing = (*active.trainable, *active.buffers)
        with self.loop.phase(active.trainable, active.phase.lr, per_epoch, kept):
            self.bound = BoundModule(self.engine.module, changing, self.program.throwaway)
            try:
                yield
            finally:
                self.bound.release()
                self.bound = None

    def train(self, model: Model, batch: list[tuple[int, Any]]) -> Model:
        """Step the optimizer on the gradient; in Lightning's own loop if the module needs it."""
        if self.loop is None or self.bound is None:
            grads = self.grad(model, batch)
            return self.optimizer.update(model, self._ready(grads, "model")) if grads else model
        if self.travel is not None:
            self.travel.step()
        model, end = self.bound.bind(model), len(batch) - 1
        within = self.step % self.steps_per_epoch
        first, last = within * self.engine.settings.accumulate, within + 1 == self.steps_per_epoch
        for at, (number, minibatch) in enumerate(batch):
            with self._looped(number, minibatch) as (ready, found):
                found += [self.loop.run(ready, first + at, at < end, last and at == end)]
        self._logged = True
        self.bound.keep(model)
        return model

    def _gradient(self, model: Model, batch: list[tuple[int, Any]]) -> Model:
        """Compute the gradient in Lightning's own loop."""
        assert self.loop is not None
        assert self.bound is not None
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
        with self._randomness(number):
            yield self.program.prepared(minibatch), found
        logged = self.program.log.take()
        if not self._logged:
            self._log(*sorted_out(found[0], logged), batch_length(minibatch))

    def _log(self, values: dict[str, Tensor], metrics: dict[str, Metric], size: int) -> None:
        self.logs.add(values, size, None, self.program.log.reductions)
        self.metrics |= metrics

    def _require_automatic(self, what: str) -> None:
        if self.loop is not None and self.loop.manual:
            raise MisconfigurationException(
                f"Expected a module with automatic optimization, as {self.method} computes {what} "
                f"itself, but {type(self.engine.module).__name__} sets "
                "automatic_optimization=False. Return the loss from `training_step`, or use a "
                "method such as FedAvg, FedPer or FedRep, whose steps are the module's own."
            )

    def _require_loss(self, plain: bool) -> None:
        if self.loop is not None and not plain:
            raise MisconfigurationException(
                f"Expected a module without code inside a step, as {self.method} differentiates "
                f"more than its loss, but {self.loop.why}. Use a method that trains on the "
                "module's loss alone."
            )

    def _key(self, number: int) -> Tensor:
        """Return the key of a minibatch or a step, on the host."""
        return mix(self.key + (self.number << 32) + number)

    @contextmanager
    def _randomness(self, number: int) -> Iterator[Tensor | None]:
        """Yield a minibatch's key for random functions, and seed the global generators by it."""
        if not self.keyed:
            yield None
            return
        key = self._key(number)
        # The seed comes from the host, without waiting for the device.
        with watch_global_rng(int(key) & (2**63 - 1)) as found:
            yield key.to(self.engine.settings.device, non_blocking=True)
        self.engine.draws_elsewhere |= found.moved
        drew = bool(self.program.random_calls) or found.moved or found.moved_torch
        self.drew = bool(self.drew) or drew

    def new_step(self) -> None:
        """Start a step, whose first gradient logs, unless samples are public."""
        self._logged = self.active.phase.data == "public"
        self.step += 1
        if self._schedule is not None:
            self.optimizer.at(self.step)
        if not self.active.phase.evaluate_only:
            self.engine.draws_elsewhere = False

    def end_step(self) -> None:
        """End a step."""
        if self.loop is not None and self.bound is not None:
            self.loop.end_step()

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
        self._require_automatic("gradients")
        if self.bound is not None:
            self._require_loss(plain=not also and objective is None and weights is None)
            return self._gradient(model, batch)
        materialize(model, self.active.buffers)
        model = shielded(model, self.engine.parameter_split.buffers)
        known = self._given(model, self.active.trainable + also)
        widths = [batch_length(minibatch) for _, minibatch in batch]
        total: Model = {}
        terms = split_terms(widths, objective, given, weights, sample_data)
        for (number, minibatch), term, width in zip(batch, terms, widths, strict=True):
            with self._randomness(number) as key:
                if term is None:
                    step = partial(self._differentiated, number)
                    grads, values, metrics = self.engine.traces.run(step, known, minibatch, key)
                else:
                    grads, values, metrics = self._differentiated(
                        number, known.tree, minibatch, key, term.first()
                    )
            self.engine.random_calls = self.program.random_calls
            if LOSS not in values:  # `training_step` may skip a batch
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
    ) -> tuple[Model, dict[str, Tensor], dict[str, Metric]]:
        """Compute gradients ``(1, ...)``, logged values and torchmetrics objects.

        The values, with the loss, are ``(1,)``; there is no loss if the step skips the minibatch.
        """
        trained, fixed = model
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in trained.items()}
        accumulate = self.engine.settings.accumulate
        grads: Model = {}

        def backward(loss: Tensor) -> None:
            try:
                grads.update(self._backward(loss / accumulate if accumulate > 1 else loss, leaves))
            except RuntimeError as cause:
                if loss.requires_grad:
                    raise
                raise ValueError(self.active.unreached()) from cause

        loss, logged = self.program.training_loss(
            {**fixed, **leaves}, minibatch, key, number, None, None, backward, term
        )
        return grads, *sorted_out(loss, logged)

    def _backward(self, loss: Tensor, leaves: Model) -> Model:
        if self.engine.traces.recording or self.engine.whole.recording:
            # `backward` would record a copy of each gradient, but reentrant checkpoints need it.
            found: Sequence[Tensor | None] = torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True
            )
        else:
            loss.backward()
            found = [leaf.grad for leaf in leaves.values()]
        return {n: g[None] for n, g in zip(leaves, found, strict=True) if g is not None}

    def loss(self, model: Model, batch: list[tuple[int, Any]]) -> tuple[Tensor, Tensor]:
        """Compute the mean loss over the step's samples, and their number, ``(1,)``."""
        self._require_automatic("losses")
        given = self._given(self._unwritten(model), ())
        total = torch.zeros(1, dtype=torch.float64, device=self.engine.settings.device)
        count = torch.zeros_like(total)
        for number, minibatch in batch:
            step = partial(self._measured, number)
            with torch.no_grad(), self._randomness(number) as key:
                loss = self.engine.traces.run(step, given, minibatch, key, MEASURED)
            if loss is not None:
                total += loss.double() * batch_length(minibatch)
                count += batch_length(minibatch)
        return total / count.clamp_min(1), count

    def _measured(
        self, number: int, model: tuple[Model, Model], minibatch: Any, key: Tensor | None, what: str
    ) -> Tensor | None:
        return self.program.measured_loss(model[1], minibatch, key, number, None)

    def outputs(self, model: Model, batch: list[tuple[int, Any]]) -> Any:
        """Return the module's outputs, ``(1, samples, ...)``."""
        return self._observed(model, batch, "outputs")

    def features(self, model: Model, batch: list[tuple[int, Any]]) -> Any:
        """Return the inputs of the module's head, ``(1, samples, ...)``."""
        return self._observed(model, batch, "features")

    def _observed(self, model: Model, batch: list[tuple[int, Any]], what: str) -> Any:
        self._require_automatic(what)
        one, plain = self._one(model), self.active.phase.evaluate_only
        found = []
        for number, minibatch in batch:
            with self._randomness(number) as key:
                found.append(self.program.observed(one, minibatch, key, number, what, plain)[None])
        return join_batches(found)

    def losses(self, model: Model, batch: list[tuple[int, Any]]) -> Tensor:
        """Return the losses of the samples, ``(1, samples)``."""
        one = self._one(model)
        found = []
        for number, minibatch in batch:
            with torch.no_grad(), self._randomness(number) as key:
                found.append(self.program.sample_losses(one, minibatch, key, None, checked=True))
        return torch.cat(found).unsqueeze(0)

    def sample_grads(self, model: Model, batch: list[tuple[int, Any]]) -> Model:
        """Return the gradients of the samples' losses, ``(1, samples, ...)``."""
        self.active.require_independent_samples()
        one = self._one(model)
        trained = {n: one[n].detach().requires_grad_() for n in self.active.trainable}
        found = []
        for number, minibatch in batch:
            with self._randomness(number) as key:
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
        if self.loop is not None and self.bound is not None:
            model = self.bound.bind(model)
            self.bound.set_gradients(select(grads, self.optimizer.names))
            self.loop.apply(*self.last, slot)
            self.bound.keep(model)
            return model
        return self.optimizer.update(model, grads, slot)

    def _ready(self, grads: Model, slot: str) -> Model:
        """Count the step, and clip its gradient; Lightning's own loop clips by itself."""
        if self.travel is not None and slot == "model":
            self.travel.step()
        settings = self.engine.settings
        if not settings.clip_value or self.bound is not None:
            return grads
        grads = select(grads, self.optimizer.names)
        return clip(grads, settings.clip_value, settings.clip_algorithm)

    def noise(self, like: Tree, key: str = "noise") -> Tree:
        """Normal numbers of the client's step, ``(1, ...)``."""
        if self.engine.whole.recording:
            raise TypeError("it draws noise")
        return noise(self._key(self.step).to(self.engine.settings.device).view(1), like, key)

    def samples(self, batch: list[tuple[int, Any]]) -> tuple[Any, Tensor]:
        """Return the samples of a step's minibatches; all are real."""
        data = join_batches([map_batch(one, lambda leaf: leaf[None]) for _, one in batch])
        first = next(batch_leaves(data))
        return data, first.new_ones(first.shape[:2], dtype=torch.bool)

    def report(self, loss: Tensor, batch: list[tuple[int, Any]]) -> None:
        """Log a loss ``(1,)``, weighted by samples."""
        self.program.log.options.setdefault("train_loss", LogOptions())
        size = torch.tensor([sum(batch_length(minibatch) for _, minibatch in batch)])
        self.logs.add({"train_loss": loss, LOSS: loss}, size, None)

    def finish(self) -> dict[str, Tensor]:
        """Return the client's logged values, ``(1,)`` each."""
        assert isinstance(self.logs, ClientLogs)
        return {**self.logs.compute(), **computed_metrics(self.metrics)}
