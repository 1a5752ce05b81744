"""One chunk of a cohort through all phases of a round, as one batched program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import LocalResult
from lightning_pfl.core.draws import random_keys
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Tree, is_expanded, rows, tmap
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.active_phase import ActivePhase
from lightning_pfl.engine.base import LocalWork, begin, end, require_same_entries
from lightning_pfl.engine.client_logs import LOSS, ClientLogs
from lightning_pfl.engine.fingerprint import Same, of_object
from lightning_pfl.engine.logs import ListedLogs
from lightning_pfl.engine.optimizer import ClientOptimizer
from lightning_pfl.engine.optimizer_options import options_of, rates_of
from lightning_pfl.engine.orders import loader_key, round_key
from lightning_pfl.engine.program import ClientProgram, batchable_kernels
from lightning_pfl.engine.steps import phase_budget, phase_limits, split_draws
from lightning_pfl.engine.trace import Repeated
from lightning_pfl.engine.travel import Travel
from lightning_pfl.engine.vectorized.evaluation import ONE_BY_ONE
from lightning_pfl.engine.vectorized.gradient import BatchedGradient
from lightning_pfl.engine.vectorized.loaders import Batches, LoaderBatches
from lightning_pfl.engine.vectorized.local import VectorizedLocalStep
from lightning_pfl.engine.vectorized.metrics import ClientMetrics
from lightning_pfl.engine.vectorized.resident import ResidentBatches
from lightning_pfl.engine.vectorized.shared import Shared
from lightning_pfl.engine.vectorized.survey import Survey
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick
from lightning_pfl.methods.base import Phase


class Chunk:
    """One chunk of a cohort through all phases of a round."""

    def __init__(self, engine: Shared, work: LocalWork) -> None:
        self.engine, self.work = engine, work
        self.method, self.data, self.info = work.method, work.data, work.info
        self.device = engine.settings.device
        self.clients = [int(client) for client in self.info.index]
        self.program = engine.program(getattr(self.data, "augment", None))
        self.logs = ClientLogs(len(self.clients), self.device)
        self.keys: Tensor | None = None
        self.metrics = ClientMetrics(engine.module, len(self.clients), self.device)
        measured = self.method.measures_travel
        self.travel = Travel(len(self.clients), self.device) if measured else None
        self.kept = None if work.kept is None else [dict(state) for state in work.kept]

    def noise_keys(self) -> Tensor:
        """Return a key for each client, int64 ``(clients,)``, also for steps without draws."""
        seed, work = self.engine.settings.seed, self.work
        return send(random_keys(seed, work.stream, work.info.round, self.clients), self.device)

    def run(self) -> LocalResult:
        """Run ``client_init``, every phase and ``client_final``."""
        info, received, client_state = self.info, self.work.received, self.work.client_state
        state = begin(self.method, received, client_state, info)
        first_epochs = [0] * len(self.clients)
        for number, phase in enumerate(self.work.phases):
            active = ActivePhase(phase, self.engine.parameter_split)
            with (
                active.modes(),
                batchable_kernels(self.engine.transform),
                self._capturing(),
                self.program.plain(phase.data == "public"),
            ):
                self.program.throwaway = active.throwaway
                self.settings = self.engine.checks.settings()
                survey = self.engine.survey(self.work, phase, self.program, self.settings)
                self.keys = self.noise_keys() if survey.draws else None
                batches = self._batches(phase, survey, first_epochs)
                found = self.engine.prefix.features(
                    self.work.split(phase),
                    self.clients,
                    max(batches.epochs_used, default=0),
                    active,
                    state,
                    self.program,
                    lambda: self.settings,
                )
                if found is not None:
                    assert isinstance(batches, ResidentBatches)
                    batches.cache(*found)
                state = self._phase(state, active, batches, number)
            if phase.data != "training":
                continue
            used = zip(first_epochs, batches.epochs_used, strict=True)
            first_epochs = [first + epochs for first, epochs in used]
        if self.travel is not None:
            info.travel = self.travel.total
        upload, client_state = end(self.method, received, client_state, state, info)
        logs = {**self.logs.compute(), **self.metrics.compute()}
        missing = torch.full(
            (len(self.clients),), torch.nan, dtype=torch.float64, device=self.device
        )
        loss = logs.pop(LOSS, missing)
        options = dict(self.program.log.options)
        return LocalResult(upload, client_state, logs, options, loss, self.kept or [])

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        with self.program.capturing(), self.metrics.deferring():
            yield

    def _batches(self, phase: Phase, survey: Survey, first_epochs: list[int]) -> Batches:
        stream = self.engine.settings.seed, self.work.stream, self.info.round
        budget, limits = phase_budget(phase), phase_limits(phase, self.engine.limits)
        data = self.work.split(phase)
        if isinstance(data, FederatedTensorDataset):
            return ResidentBatches(
                *(data, self.clients, budget, limits),
                round_key(*stream),
                survey.pads,
                first_epochs,
            )
        key = partial(loader_key, *stream)
        return LoaderBatches(data, self.clients, budget, limits, key, self.device, first_epochs)

    def _phase(self, state: Tree, active: ActivePhase, batches: Batches, number: int) -> Tree:
        if active.idle or not len(batches.steps):
            return state
        steps, context = int(batches.steps.max()), self._whole_context(active, batches)
        local_step = self._local_step(active, number, steps, context is not None)
        name = active.phase.name
        advice = self.work.missing_labels(active.phase) or ONE_BY_ONE
        with naming_clients("client_step", self.data.names, self.clients, self.info.round, advice):
            if context is not None:
                return self._whole_phase(context, state, active, batches, local_step)
            if self.kept is not None:
                local_step.optimizer.load([state.get(name, {}) for state in self.kept])
            for step in range(steps):
                local_step.optimizer.new_tick()
                local_step.optimizer.at(step)
                for tick in batches.at(step):
                    local_step.begin(tick, step)
                    state = self._take(state, tick.rows, tick.minibatches, active, local_step)
        if self.kept is not None:
            for kept, after in zip(self.kept, local_step.optimizer.states(), strict=True):
                if after:
                    kept[name] = after
        return state

    def _take(
        self,
        state: Tree,
        index: slice | Tensor | None,
        minibatches: list[Minibatch],
        active: ActivePhase,
        local_step: VectorizedLocalStep,
    ) -> Tree:
        """Take a step of some clients, None for all, and return the state of all."""
        batch = split_draws(minibatches, active.phase.batches_per_step)
        part = state if index is None else rows(state, index)
        new = self.method.client_step(part, batch, local_step)
        require_same_entries(self.method, part, new)
        return new if index is None else _write(state, part, new, index)

    def _whole_context(self, active: ActivePhase, batches: Batches) -> int | None:
        """Number what the phase's whole steps depend on; None if they run as usual."""
        engine, work, program = self.engine, self.work, self.program
        if engine.graphs is None and not batches.in_one:
            return None  # gradients alone are recorded then
        phase = active.phase
        settings = getattr(type(self.method).client_step, "recorded_settings", None)
        why = why_not_captured(engine, work, program, settings is not None)
        if why is not None:
            if engine.graphs is not None:
                engine.graphs.leave_out(why)
            return None
        return (engine.whole if engine.graphs is None else engine.graphs).context(
            (
                type(self.method),
                *((name, of_object(getattr(self.method, name))) for name in settings or ()),
                (active.trainable, active.buffers, active.throwaway),
                (phase.name, phase.data, phase.evaluate_only, phase.batches_per_step),
                (Same(program), self.settings if engine.graphs else self._settings_in_any_round()),
                options_of(work.optimizer, phase.lr, self._rates(active)),
            )
        )

    def _settings_in_any_round(self) -> tuple[Any, ...]:
        """Return what steps read of the module, but for the number of the round."""
        checks = self.engine.checks
        return checks.settings(any_epoch=True) if checks.reads_epoch() else self.settings

    def _rates(self, active: ActivePhase) -> dict[str, Tensor]:
        """Return learning rates that steps read; a graph would keep what it was captured with."""
        if self.engine.graphs is not None:
            return {}
        return rates_of(self.work.optimizer, active.phase.lr)

    def _whole_phase(
        self,
        context: int,
        state: Tree,
        active: ActivePhase,
        batches: Batches,
        local_step: VectorizedLocalStep,
    ) -> Tree:
        """Take the steps of a phase, as CUDA graphs or recorded programs.

        Those in which one tick has all of a step's clients.
        """
        graphs, optimizer = self.engine.graphs, local_step.optimizer
        repeated = self.engine.whole if graphs is None else graphs
        kept, rates = optimizer.placed(), self._rates(active)
        repeated.load(context, {"state": state, "optimizer": kept, "rates": rates})
        ends: list[tuple[Tensor, Tree]] = []

        for step in range(int(batches.steps.max())):
            ticks = list(batches.at(step, along=True))
            optimizer.new_tick()
            # Several ticks share counters of steps.
            alone = len(ticks) == 1
            for tick in ticks:
                if (done := tick.leaving) is not None:
                    copied = partial(torch.index_select, dim=0, index=done)
                    ends.append((done, tmap(copied, repeated.state()["state"])))
                # Rows of any positions differ each time.
                first = len(self.clients) if tick.rows is None else _stop(tick.rows)
                local_step.begin(tick, step)
                for minibatch in tick.minibatches:
                    minibatch.key = local_step.key(minibatch)
                tensors = [minibatch.tensors(self.device) for minibatch in tick.minibatches]
                numbers = repeated.kind(*(minibatch.number for minibatch in tick.minibatches))
                kind = (first, numbers) if alone else None
                take = partial(self._take_whole_step, repeated, active, local_step, tick, alone)
                listed = repeated.step(take, tensors, kind)
                for values, sizes, way in listed:
                    self.program.log.replayed(way)
                    counted = sizes if tick.counted is None else tick.counted
                    self.logs.add(values, counted, tick.rows, self.program.log.reductions)
        tree = repeated.unload()
        optimizer.place(tree["optimizer"], tree["rates"])
        new: Tree = tree["state"]
        for done, left in ends:
            new = tmap(partial(_put_back, done=done), new, left)
        return new

    def _take_whole_step(
        self,
        repeated: Repeated[Any],
        active: ActivePhase,
        local_step: VectorizedLocalStep,
        tick: Tick,
        alone: bool,
        tree: Tree,
        tensors: list[Any],
    ) -> tuple[Tree, Any]:
        """Take a step that is captured or recorded.

        Args:
            repeated: What captures or records it.
            active: The phase.
            local_step: The step interface.
            tick: The step's clients and minibatches.
            alone: Whether it has all of the step's clients.
            tree: The clients' state, the optimizer's, and learning rates.
            tensors: The minibatches' tensors.

        Returns:
            The new tree, and what was logged.
        """
        kept, optimizer = repeated.recording, local_step.optimizer
        pairs = zip(tick.minibatches, tensors, strict=True)
        minibatches = [one.on(given, self.device, not kept) for one, given in pairs]
        optimizer.place(tree["optimizer"], tree["rates"])
        self.engine.prefix.moved(tree["state"])
        if alone:
            optimizer.new_tick()
        local_step.begin(tick, local_step.step)
        listed = local_step.logs = ListedLogs(self.program.log)
        local_step.whole = repeated
        new = self._take(tree["state"], tick.rows, minibatches, active, local_step)
        local_step.logs = self.logs
        return tree | {"state": new, "optimizer": optimizer.placed()}, listed.listed

    def _local_step(
        self, active: ActivePhase, number: int, steps: int, whole: bool
    ) -> VectorizedLocalStep:
        engine, program = self.engine, self.program
        if self.travel is not None and not active.phase.evaluate_only:
            self.travel.begin(self.work.optimizer, active.phase.lr)
        if engine.traces.enabled:
            plain = program.augment is None and program.hooks is None
            recordable = engine.checks.recordable and plain and not whole
            context = (active.trainable, program, self._settings_in_any_round())
            engine.traces.enter(context if recordable else None)
        return VectorizedLocalStep(
            engine.settings,
            active,
            program,
            BatchedGradient(program, self.metrics, engine.transform, active.unreached),
            engine.traces,
            engine.prefix,
            ClientOptimizer(
                self.work.optimizer,
                engine.parameter_split,
                len(self.clients),
                active.phase.lr,
                schedule=self.work.options(active.phase, steps),
                recordings=None if whole else engine.optimizer_steps,
                capturable=whole and engine.graphs is not None,
            ),
            self.logs,
            None if self.keys is None else self.keys + (number << 32),
            lambda: self.noise_keys() + (number << 32),
            self.travel,
        )


def _put_back(leaf: Tensor, left: Tensor, done: Tensor) -> Tensor:
    """Write what a leaf of some clients was after their last step, when they went along."""
    if 0 in leaf.stride():
        # What clients share has hardly ever changed, and in a graph never.
        if leaf.device.type != "cpu" or torch.equal(leaf.index_select(0, done), left):
            return leaf
        leaf = leaf.clone(memory_format=torch.contiguous_format)
    return leaf.index_copy_(0, done, left)


def _stop(index: slice | Tensor) -> int | None:
    """Return the number of clients, if they are the first ones."""
    return index.stop if isinstance(index, slice) else None


def why_not_captured(
    engine: Shared, work: LocalWork, program: ClientProgram, recordable: bool
) -> str | None:
    """Describe why the steps of some clients can't be captured or recorded, or return None."""
    method = type(work.method).__name__
    if not recordable:
        return f"`client_step` of {method} isn't marked by `recordable`"
    if not engine.checks.recordable:
        return f"the code of {type(engine.module).__name__} may read what a recording wouldn't"
    for found, what in (
        (program.augment is not None, "samples are augmented"),
        (program.hooks is not None, "hooks change batches"),
        (work.schedule is not None, "a scheduler changes the optimizer in each step"),
        (work.method.measures_travel, f"{method} measures the way of each client"),
        (work.kept is not None, "the states of optimizers are kept"),
    ):
        if found:
            return what
    return None


def _write(state: Tree, part: Tree, new: Tree, index: slice | Tensor) -> Tree:
    """Write the new state of some clients into that of all."""

    def put(leaf: Tensor, base: Tensor, before: Tensor) -> Tensor:
        # Nothing to do for a view that was written in place, nor for a leaf that clients share.
        written = isinstance(index, slice) and _same_memory(leaf, base)
        if written or (leaf is before and is_expanded(leaf)):
            return base
        if is_expanded(base):
            base = base.clone(memory_format=torch.contiguous_format)
        base[index] = leaf
        return base

    return tmap(put, new, state, part)


def _same_memory(view: Tensor, base: Tensor) -> bool:
    return view.data_ptr() == base.data_ptr() and view.stride() == base.stride()
