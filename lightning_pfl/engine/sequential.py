"""The engine that runs one client and one minibatch after another, in plain torch.

The method's functions run with one client on the client axis, without padding, grouping or batching
over clients. Steps that a method and a module allow are recorded and replayed, and features of a
frozen backbone are kept, which ``engine="reference"`` leaves out. Both and the vectorized engine
must return the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import (
    Evaluation,
    LocalResult,
    OnClients,
    OptimizerState,
)
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.kept_memory import KeptMemory
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import restoring_once
from lightning_pfl.core.tree import Stacked, Tree
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.active_phase import ActivePhase, is_sample_wise
from lightning_pfl.engine.apart import evaluates_apart
from lightning_pfl.engine.base import (
    EngineSettings,
    EvaluationWork,
    LocalWork,
    ModuleLoop,
    begin,
    end,
)
from lightning_pfl.engine.checks import Checks, is_ours
from lightning_pfl.engine.client_logs import LogsInTurn, LogsOfSteps
from lightning_pfl.engine.client_randomness import Source
from lightning_pfl.engine.epoch import Epoch
from lightning_pfl.engine.feature_cache import PrefixCache
from lightning_pfl.engine.fingerprint import Same, of_object
from lightning_pfl.engine.large_operators import LargeOperators
from lightning_pfl.engine.looped_local import LoopedLocalStep
from lightning_pfl.engine.minibatches import ClientMinibatches
from lightning_pfl.engine.noted_metrics import NotedMetrics, makes_calls, put_back
from lightning_pfl.engine.optimizer import Recordings
from lightning_pfl.engine.optimizer_options import (
    changes_rates_alone,
    options_of,
    rates_of,
    why_not_elementwise,
)
from lightning_pfl.engine.orders import CohortOrders
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.safety.global_rng import undrawn, watch_global_rng
from lightning_pfl.engine.safety.snapshot import (
    Snapshot,
    changed,
    has_generators,
    restore,
    snapshot,
)
from lightning_pfl.engine.sequential_evaluation import SequentialEvaluation
from lightning_pfl.engine.sequential_local import SequentialLocalStep, take_step
from lightning_pfl.engine.steps import Limits, phase_budget, phase_limits, phase_steps, split_draws
from lightning_pfl.engine.trace import Traces
from lightning_pfl.engine.whole_steps import WholeSteps, recorded_settings
from lightning_pfl.methods.base import Phase

_Trained = tuple[LocalResult, LogsOfSteps]
"""A client's results, with values of torchmetrics objects alone, and what else it has logged."""


class SequentialEngine:
    """Runs one client at a time.

    Args:
        module: The user's module.
        parameter_split: Names of the module.
        settings: The Trainer's flags.
        loop: Lightning's own loop, for modules with code inside a step; None for others.
        record: Whether steps may be recorded and replayed.
        around: Makes what is around each step that isn't replayed.

    Attributes:
        deterministic: Whether no training step has drawn random numbers so far; None before the
            first one.
        generators: Whether one has drawn from a global generator so far; likewise.
        quiet: Steps of evaluations so far, and whether they have never drawn, nor, the first time,
            written to an attribute of the module.
        draws_elsewhere: Whether the last training step that was watched, or a step of the last
            evaluation, used Python's or NumPy's global generator, which can't differ between
            clients of a batched program.
    """

    name = "sequential"

    def __init__(
        self,
        module: Any,
        parameter_split: ParameterSplit,
        settings: EngineSettings,
        loop: ModuleLoop | None = None,
        record: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._around = around
        self.module, self.parameter_split, self.settings = module, parameter_split, settings
        self.loop, self.record = loop, record
        self._noted = NotedMetrics(module)
        self.checks = Checks(module, metrics=makes_calls(settings))
        epoch = Epoch(module, self.checks.reads_epoch)
        self.traces = Traces(record, self._noted.alone, epoch)
        self.whole = WholeSteps(around=self._noted.alone, epoch=epoch)
        self._memory = KeptMemory()
        self.prefix = PrefixCache(parameter_split, record and settings.feature_cache, alone=True)
        self.optimizer_steps: Recordings | None = {} if record else None
        self._program: ClientProgram | None = None
        self._settings: dict[tuple[int, bool], tuple[Any, ...]] = {}
        self._contexts: dict[tuple[int, bool], tuple[int, dict[str, Tensor]] | None] = {}
        self._joined: dict[int, bool] = {}
        self._active: dict[int, ActivePhase] = {}
        self._orders: dict[int, CohortOrders] = {}
        self._cohort: list[int] = []
        self.quiet: dict[str, bool] = {}
        self._evaluation = SequentialEvaluation(module, settings, record, self.quiet)
        self.deterministic: bool | None = None
        self.generators: bool | None = None
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

        To intercept all random functions and to seed all generators costs as much as a small step.
        So the first client shows what its steps draw from, and later ones get that alone: nothing,
        or keys. A client whose steps use a generator after all is trained once more, with
        everything.
        """
        check = self.checks.due((work.method, *recorded_settings(work.method).values()))
        self.traces.begin_round(check)
        self.whole.begin_round(check, at_once=self.checks.known)
        self._forget_settings()
        self._active.clear()
        self._orders.clear()
        self._cohort = work.info.index.tolist()
        results: list[LocalResult] = []
        self._memory.begin_round()
        # What generators of the module's own draw leaves no trace in the global ones.
        own = has_generators(self.module)
        uploads, client_state = (Stacked(len(work.info), self._memory) for _ in range(2))
        logs = LogsInTurn(len(work.info), self.settings.device)

        # Seeded generators are put back once, where nothing else of a user's may draw.
        seeds = self.checks.ours and (own or self.loop is not None or self.generators is True)
        with restoring_once() if seeds else nullcontext():
            for row in range(len(work.info)):
                one = work.rows(slice(row, row + 1))
                source = "seeds" if own else self._source()
                watches = self._watches
                trained = None if source == "seeds" else self._watched(one, source)
                result, logged = trained or self._seeded(one, watches)
                uploads.put(row, result.uploads)
                client_state.put(row, result.client_state)
                results.append(replace(result, uploads={}, client_state={}))
                logs.add(row, logged)
                logs.add_computed(row, result.logs)
                if on_clients is not None:
                    ran = on_clients([row], partial(logged.loss, self.settings.device))
                    if ran is not False:
                        self.checks.look_after_hooks(self.traces, self.whole)
                        self._forget_settings()
        values, loss = logs.take_losses()
        return LocalResult(
            uploads.tree(),
            client_state.tree(),
            values,
            {name: option for result in results for name, option in result.options.items()},
            loss,
            [state for result in results for state in result.optimizers],
        )

    def _forget_settings(self) -> None:
        """Forget what steps read of the module, which a user's code may have changed."""
        self._settings.clear()
        self._contexts.clear()
        self._joined.clear()

    def _source(self) -> Source:
        """Return what a client's steps get to draw from, by what others have drawn so far."""
        if self.loop is not None or self.generators is not False:
            return "seeds"
        if self.deterministic:
            return "nothing"
        # Recordings of known code seed what they draw from, and the readable twin does so always.
        if self.checks.known or not self.record:
            return "seeds"
        # A recording keeps what was called, by whatever name.
        return "keys" if self.records_now else "names"

    @property
    def _watches(self) -> bool:
        """Whether to notice what steps draw whose generators are seeded, for what depends on it.

        Nothing does once it is known that they use one, nor in Lightning's own loop.
        """
        return self.generators is None or not (self.generators or self.loop is not None)

    def _watched(self, work: LocalWork, source: Source) -> _Trained | None:
        """Train a client whose steps should use no generator; None if one has."""
        records = self.records_now
        # Replayed steps and layers of torch don't write to other attributes.
        quiet = self.checks.known or (records and source == "nothing")
        before = {} if quiet else snapshot(self.module)
        states = self._noted.states() if self.checks.calls_metrics else []
        with watch_global_rng(None, self.checks.known) as found:
            trained = self._client(work, self._local_step(work, source))
        if not (found.moved or found.moved_torch):
            if records:
                self._stop_if_written(before)
            return trained
        if before:
            restore(self.module, before)
        put_back(states)
        self.deterministic, self.generators = False, True
        return None

    def _seeded(self, work: LocalWork, watches: bool) -> _Trained:
        """Train a client with the generators seeded for each step, whose draws may be noticed."""
        local_step = self._local_step(work, "seeds", watches)
        writes = self.records_now and not self.checks.known
        before = snapshot(self.module) if writes else {}
        # What a module draws, it draws from generators that are seeded and put back.
        others = nullcontext() if is_ours(work.method) or self.loop else undrawn(work.method)
        with others:
            trained = self._client(work, local_step)
        self._note_draws(local_step)
        self._stop_if_written(before)
        return trained

    def _note_draws(self, local_step: SequentialLocalStep) -> None:
        if (drew := local_step.random.drew) is not None:
            self.deterministic = self.deterministic is not False and not drew
            self.generators = bool(self.generators) or local_step.random.moved

    def _stop_if_written(self, before: Snapshot) -> None:
        """Stop recording if steps have written to attributes, of which there is a snapshot."""
        if before and (name := changed(self.module, before)) is not None:
            self.traces.stop(f"a step writes to {name!r}, which a recording wouldn't")

    def program(self, augment: Callable[[Any], Any] | None) -> ClientProgram:
        """Return the user's step, cached since a replayed step doesn't log its options again."""
        hooks, known = self.settings.batch_hooks, self._program
        if known is None or known.augment is not augment or known.hooks is not hooks:
            modes = self._kernels if self.record else nullcontext
            known = self._program = ClientProgram(self.module, self.settings, augment, modes)
        return known

    @property
    def gradients(self) -> int:
        """Number of gradients of a client so far, without those of replayed steps."""
        return 0 if self._program is None else self._program.gradients

    def _kernels(self) -> AbstractContextManager[Any]:
        # Also in steps without a recording, so that all of a round have the same bits.
        return LargeOperators(self.checks.placeless) if self.checks.recordable else nullcontext()

    def records(self, work: LocalWork) -> bool:
        """Whether steps of this work may be recorded."""
        hooked = self.settings.batch_hooks is not None
        return self.records_now and not hooked and getattr(work.data, "augment", None) is None

    def replays(self, work: LocalWork) -> bool:
        """Whether whole steps of this work are replayed, by what they have drawn so far.

        Unknown code may draw from generators that a replay wouldn't seed.
        """
        return self.records(work) and (self.deterministic is not False or self.checks.known)

    @property
    def keeps_features(self) -> bool:
        """Whether features of a frozen backbone may be kept.

        Only of known code: a layer's hook or a closure may do anything between two clients, and a
        user's method may write to weights. Whether recordings have been stopped doesn't matter, as
        a resumed run doesn't know of it.
        """
        return self.runs_known_code

    @property
    def runs_known_code(self) -> bool:
        """Whether nothing of a user's runs in training but steps whose code is known."""
        return self.checks.known and self.settings.batch_hooks is None and self.loop is None

    @property
    def records_now(self) -> bool:
        """Whether steps of training may be recorded, by what their code reads in this round."""
        return self.traces.enabled and self.checks.recordable

    def _local_step(
        self, work: LocalWork, source: Source, watched: bool = False
    ) -> SequentialLocalStep:
        make = SequentialLocalStep if self.loop is None else partial(LoopedLocalStep, self.loop)
        return make(
            self.settings,
            self.parameter_split,
            self.program(getattr(work.data, "augment", None)),
            self.traces,
            self.whole,
            self.optimizer_steps,
            self.prefix,
            work,
            source,
            self.checks.code_known,
            self._noted,
            watched,
        )

    def whole_steps(
        self, work: LocalWork, number: int, active: ActivePhase, local_step: SequentialLocalStep
    ) -> tuple[int, dict[str, Tensor]] | None:
        """Return what whole recorded steps depend on, as a number, and the rates that they read.

        None where there are none.

        Args:
            work: The client's work.
            number: The number of the phase.
            active: The phase.
            local_step: The client's step interface.
        """
        keyed = local_step.random.keyed
        if keyed and (self.deterministic is None or not self.checks.known or self.loop is not None):
            return None
        at = number, keyed
        if at not in self._contexts:
            self._contexts[at] = self._find_context(work, number, active, local_step)
        return self._contexts[at]

    def _find_context(
        self, work: LocalWork, number: int, active: ActivePhase, local_step: SequentialLocalStep
    ) -> tuple[int, dict[str, Tensor]] | None:
        recordable = hasattr(type(work.method).client_step, "recorded_settings")
        known = recordable and why_not_elementwise(work.optimizer) is None
        if not known or work.method.measures_travel or not self.records(work):
            return None
        settings, lr = recorded_settings(work.method), active.phase.lr
        rates, scheduled = rates_of(work.optimizer, lr), work.schedule is not None
        if scheduled and len(rates) < len(work.optimizer.param_groups):
            return None
        context = self.whole.context(
            (
                type(work.method),
                *((name, of_object(value)) for name, value in settings.items()),
                (active.trainable, active.phase.name, active.phase.data),
                (Same(local_step.program), local_step.random.keyed),
                self.settings_in(number, any_epoch=True),
                (scheduled, options_of(work.optimizer, lr, rates)),
            )
        )
        return None if context is None else (context, rates)

    def _record_gradients(
        self, active: ActivePhase, number: int, program: ClientProgram, alone: bool
    ) -> None:
        """Let gradients of a phase be recorded, if they may be, and aren't with the rest of a step.

        Args:
            active: The phase.
            number: Its number.
            program: The user's step.
            alone: Whether no whole steps are recorded.
        """
        if not self.traces.enabled:
            return
        if not self.checks.recordable:
            self.traces.enter(None)
            return
        # The first client shows whether its steps write to attributes. In Lightning's own loop
        # hooks may, too, and what was read of settings is another client's.
        recordable = alone and self.deterministic is not None and self.loop is None
        recordable &= program.augment is None and program.hooks is None
        context = (active.trainable, program, self.settings_in(number, any_epoch=True))
        self.traces.enter(context if recordable else None)

    def settings_in(self, phase: int, any_epoch: bool = False) -> tuple[Any, ...]:
        """Return what steps read of the module in a phase of this round; its modes differ."""
        any_epoch = any_epoch and self.checks.reads_epoch()
        if (phase, any_epoch) not in self._settings:
            self._settings[phase, any_epoch] = self.checks.settings(any_epoch)
        return self._settings[phase, any_epoch]

    def _client(self, work: LocalWork, local_step: SequentialLocalStep) -> _Trained:
        """Run a client's phases, and make its upload and its new state."""
        method, info = work.method, work.info
        received, client_state = work.received, work.client_state
        state = begin(method, received, client_state, info)
        kept = None if work.kept is None else dict(work.kept[0])
        first_epoch = 0
        for number, phase in enumerate(work.phases):
            state, epochs = self._phase(work, number, first_epoch, state, kept, local_step)
            if phase.data == "training":
                first_epoch += epochs
        if local_step.random.draws_elsewhere is not None:
            self.draws_elsewhere = local_step.random.draws_elsewhere
        if local_step.travel is not None:
            info.travel = local_step.travel.total
        upload, client_state = end(method, received, client_state, state, info)
        with naming_clients("training_step", work.data.names, info.index, info.round):
            metrics = local_step.finish()
        options = dict(local_step.program.log.options)
        states = [] if kept is None else [kept]
        result = LocalResult(upload, client_state, metrics, options, optimizers=states)
        return result, local_step.client_logs

    def _phase(
        self,
        work: LocalWork,
        number: int,
        first_epoch: int,
        state: Tree,
        kept: OptimizerState | None,
        local_step: SequentialLocalStep,
    ) -> tuple[Tree, int]:
        """Run a phase of a client; return its state, and the epochs of which minibatches were used.

        Args:
            work: The client's work.
            number: The number of the phase.
            first_epoch: Number of the phase's first epoch within the round.
            state: The client's state before.
            kept: The states of its optimizers by phase, of which this one's becomes the new one;
                None: they are fresh.
            local_step: The client's step interface.
        """
        phase, info, program = work.phases[number], work.info, local_step.program
        if number not in self._active:
            self._active[number] = ActivePhase(phase, self.parameter_split)
        active = self._active[number]
        with (
            active.modes(),
            program.capturing(),
            program.plain(phase.data == "public"),
            local_step.random.replacing(),
        ):
            minibatches = self._minibatches(work, number, first_epoch)
            program.throwaway = active.throwaway
            self._add_features(minibatches, number, state, program)
            schedule = work.options(phase, len(minibatches.bounds))
            plain = schedule is None or changes_rates_alone(schedule)
            whole = self.whole_steps(work, number, active, local_step) if plain else None
            local_step.begin(active, number, schedule)
            self._record_gradients(active, number, program, whole is None)
            before = None if kept is None else kept.get(phase.name, {})
            names, missing = work.data.names, work.missing_labels(phase)
            with (
                restoring_once() if self.runs_known_code else nullcontext(),
                self._leaving_no_trace(phase) if whole is None else nullcontext(),
                local_step.running(minibatches.per_epoch, before) as after,
                naming_clients("client_step", names, info.index, info.round, missing),
            ):
                steps = () if active.idle else minibatches
                if whole is None:
                    for step in steps:
                        batch = split_draws(step, phase.batches_per_step)
                        local_step.new_step()
                        with self._around():
                            state = take_step(work.method, state, batch, local_step)
                        local_step.end_step()
                else:
                    count = len(minibatches.bounds) * minibatches.size
                    state = local_step.take_whole_steps(*whole, work.method, state, steps, count)
            if kept is not None and after:
                kept[phase.name] = after
        return state, minibatches.epochs_used

    def _minibatches(self, work: LocalWork, number: int, first_epoch: int) -> ClientMinibatches:
        phase = work.phases[number]
        return ClientMinibatches(
            self._orders_in(work, number, phase),
            int(work.info.index),
            phase_budget(phase),
            phase_limits(phase, self.limits),
            self.settings.device,
            first_epoch,
            join=self._joins(work, number, phase),
        )

    def _add_features(
        self, minibatches: ClientMinibatches, number: int, state: Tree, program: ClientProgram
    ) -> None:
        """Give minibatches of a phase the features of a frozen backbone, where these are kept."""
        active = self._active[number]
        if active.phase.evaluate_only or not self.keeps_features:
            return
        found = self.prefix.features(
            minibatches.data,
            [minibatches.client],
            minibatches.epochs_used,
            active,
            state,
            program,
            partial(self.settings_in, number),
        )
        if found is not None:
            minibatches.cache(found[0][0])

    def _orders_in(self, work: LocalWork, number: int, phase: Phase) -> CohortOrders:
        """Return the cohort's data in a phase, with the orders of samples in this round."""
        if number not in self._orders:
            self._orders[number] = CohortOrders(
                work.split(phase), self._cohort, self.settings.seed, work.stream, work.info.round
            )
        return self._orders[number]

    def _joins(self, work: LocalWork, number: int, phase: Phase) -> bool:
        """Whether minibatches of a phase are joined; within the modes of the phase."""
        # Code that isn't known may set attributes, on which it depends.
        if number not in self._joined or not self.checks.known or self.loop is not None:
            self._joined[number] = self._adds_up(work, phase)
        return self._joined[number]

    def _adds_up(self, work: LocalWork, phase: Phase) -> bool:
        """Whether a phase adds up losses of samples; within the modes of the phase."""
        if not phase.evaluate_only or phase.data != "training" or phase.full_batch:
            return False
        one_by_one = phase.batches_per_step == 1 and self.limits.accumulate == 1
        unseen = self.settings.batch_hooks is None and work.schedule is None
        if not (one_by_one and unseen and is_sample_wise(self.module)):
            return False
        return evaluates_apart(self.module, self.settings, work.data, work.info.round)

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

    def calls_metrics(self, step: str) -> bool:
        """Whether replayed steps of an evaluation call torchmetrics objects."""
        return self._evaluation.calls_metrics(step)
