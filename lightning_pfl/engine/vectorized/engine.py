"""The fast engine: the clients of a chunk as one batched program.

Where it gains, besides the batching itself: ``feature_cache.py`` computes the features of a frozen,
shared backbone once per phase; ``evaluation.py`` gives shared layers all clients' samples as one
batch; ``whole_steps.py`` replays steps whose code is known without Python, and ``trace.py``
gradients where the rest of a step can't be recorded; ``kernels.py`` has faster convolutions and
pooling for CPUs. Listeners are called when a chunk is done: ``chunk_size`` clients, or else at most
128 on a CPU and 512 on a GPU, so progress bars move by chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LocalResult, OnClients
from lightning_pfl.core.draws import random_keys
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.kept_memory import KeptMemory
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import (
    Stacked,
    Tree,
    is_expanded,
    rows,
    tmap,
    total_nbytes,
)
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import (
    ActivePhase,
    couples_samples,
    is_sample_wise,
    is_unmodified,
)
from lightning_pfl.engine.base import (
    EngineSettings,
    EvaluationWork,
    LocalWork,
    begin,
    end,
    require_same_entries,
)
from lightning_pfl.engine.checks import Checks, may_be_recorded
from lightning_pfl.engine.cuda_graphs import StepGraphs
from lightning_pfl.engine.kernels import FastKernels
from lightning_pfl.engine.logs import LOSS, ClientLogs, ListedLogs
from lightning_pfl.engine.optimizer import ClientOptimizer, Recordings, counters, options_of
from lightning_pfl.engine.program import ClientProgram, batchable_kernels
from lightning_pfl.engine.safety.guard import guarded
from lightning_pfl.engine.steps import (
    Limits,
    order_key,
    phase_budget,
    phase_limits,
    phase_steps,
    split_draws,
)
from lightning_pfl.engine.trace import Same, Traces, fingerprint, of_object
from lightning_pfl.engine.travel import Travel
from lightning_pfl.engine.vectorized.evaluation import ONE_BY_ONE, VectorizedEvaluation
from lightning_pfl.engine.vectorized.feature_cache import PrefixCache
from lightning_pfl.engine.vectorized.gradient import BatchedGradient, Transform
from lightning_pfl.engine.vectorized.loaders import Batches, LoaderBatches
from lightning_pfl.engine.vectorized.local import VectorizedLocalStep
from lightning_pfl.engine.vectorized.metrics import ClientMetrics
from lightning_pfl.engine.vectorized.one_model import OneModelEvaluation, is_of_one_model
from lightning_pfl.engine.vectorized.resident import ResidentBatches
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick
from lightning_pfl.engine.whole_steps import WholeSteps, recorded_settings
from lightning_pfl.methods.base import Phase

COPIES = 5
"""Copies of a client's model in training: parameters, gradients, two moments, received model."""
MOST_ON_CPU, FEW_ON_CPU = 128, 16
"""Largest and smallest number of clients per chunk, as many as have models of :data:`CACHED`."""
CACHED = 2**23
"""Size in bytes of a chunk's models beyond which a CPU's caches don't hold what a step needs."""
LARGE, OF_LARGE = 2**21, 4
"""From this size in bytes of a model on, so few clients per chunk are fastest."""
MOST_ON_GPU = 512


class VectorizedEngine:
    """Runs a chunk of clients as one program.

    It uses ``vmap`` over the user's step, one backward pass and one optimizer step.

    Args:
        module: The user's module.
        parameter_split: Names of the module.
        settings: The Trainer's flags.
        transform: ``"forward"``: ``vmap`` of the forward pass and one ordinary backward pass;
            ``"grad"``: ``vmap`` of the gradient, for layers without a batching rule for autograd
            (LSTM, GRU).
        stochastic: Whether the training step makes random calls; False avoids intercepting every
            torch function.

    Attributes:
        records: Whether steps of training are recorded, where they may be in a round.
        quiet: Steps of evaluations that are the package's own, and whether they have never drawn.
        chunk_size: Clients per program, where the settings leave it open; None fits the memory.
    """

    name = "vectorized"

    def __init__(
        self,
        module: Any,
        parameter_split: ParameterSplit,
        settings: EngineSettings,
        transform: Transform = "forward",
        stochastic: bool = True,
    ) -> None:
        self.module, self.parameter_split = module, parameter_split
        self.settings, self.transform = settings, transform
        self.limits = Limits(
            settings.accumulate, settings.limit_train_batches, settings.overfit_batches
        )
        self.prefix = PrefixCache(parameter_split, enabled=settings.feature_cache)
        self.records = may_be_recorded(module)
        self.traces = Traces(enabled=self.records)
        self.graphs = StepGraphs(settings.device) if settings.cuda_graphs else None
        self.whole, self.checks = WholeSteps(expanded=True), Checks(module)
        self._memory = KeptMemory()
        self.optimizer_steps: Recordings = {}
        self._program: ClientProgram | None = None
        self.stochastic = stochastic or not is_unmodified(module)
        self._settled = fingerprint(module)
        self.quiet: dict[str, bool] = {}
        self._of_one_model = OneModelEvaluation(module, settings)
        self.chunk_size: int | None = None

    @property
    def gradients(self) -> int:
        """Number of gradients of a client so far, without those of replayed steps."""
        return 0 if self._program is None else self._program.gradients

    def needs_keys(self) -> bool:
        """Whether steps may make random calls.

        One step without random calls settles it only for modules that provably do the same in
        every step, while their settings, such as a dropout rate, stay the same.
        """
        known = self.settings.batch_hooks is None and fingerprint(self.module) == self._settled
        return self.stochastic or not known

    def pads(self, random: bool) -> bool:
        """Whether minibatches of unequal sizes are padded, and so run together.

        Args:
            random: Whether steps may make random calls.
        """
        # A dropout mask is a function of the shape: a padded batch could get another one than the
        # client alone where samples aren't the first axis.
        plain = not random and not couples_samples(self.module, True)
        return is_sample_wise(self.module) and plain

    def program(self, augment: Callable[[Any], Any] | None) -> ClientProgram:
        """Return the user's step, cached since a replayed step doesn't log its options again."""
        hooks, known = self.settings.batch_hooks, self._program
        if known is None or known.augment is not augment or known.hooks is not hooks:
            fast = partial(FastKernels, recorded=self.records)
            kernels = fast if self.transform == "forward" else nullcontext
            known = ClientProgram(self.module, self.settings, augment, kernels)
            self._program = known
        return known

    def _fitting(self) -> int:
        """Compute the clients per chunk: those that fit the memory, and a CPU's caches."""
        if self.settings.device.type == "cuda":
            return min(MOST_ON_GPU, self.most())
        model = max(1, self.model_nbytes())
        fast = max(FEW_ON_CPU, min(MOST_ON_CPU, CACHED // model)) if model < LARGE else OF_LARGE
        return min(fast, self.most())

    def _cut(self, clients: Tensor) -> tuple[Tensor, ...]:
        """Cut clients into chunks; of about equal sizes if `chunk_size` is None."""
        size = self.settings.chunk_size or self.chunk_size
        if size is None:
            parts = -(-len(clients) // self._fitting())
            size = -(-len(clients) // max(1, parts))
        return torch.split(clients, max(1, size))

    def most(self) -> int:
        """Compute the clients whose models, gradients and moments fill a quarter of the memory.

        It uses the machine's total memory, not the free one: a resumed run must cut equally, since
        a batched product may round differently for another number of clients.
        """
        device = self.settings.device
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
        else:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return max(1, total // 4 // (COPIES * max(self.model_nbytes(), 1)))

    def model_nbytes(self) -> int:
        """Compute the size of a client's model in bytes."""
        return total_nbytes(self.parameter_split.model())

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Count the optimizer steps of each client, int64 ``(clients,)``."""
        return phase_steps(data, clients, phases, self.limits)

    def train(self, work: LocalWork, on_clients: OnClients | None = None) -> LocalResult:
        """Train a cohort locally; see :class:`~lightning_pfl.engine.base.Engine`."""
        check = self.checks.due((work.method, *recorded_settings(work.method).values()))
        self.traces.begin_round(check)
        self.whole.begin_round(check, at_once=self.checks.known)
        self._memory.begin_round()
        if self.graphs is not None:
            self.graphs.begin_round()
        # Longest first, so that the clients still active at a step are the first rows of a chunk.
        order = torch.argsort(work.info.steps, descending=True, stable=True)
        results = []
        uploads, client_state = (Stacked(len(order), self._memory) for _ in range(2))
        parts = [order] if work.kept is None else self._alike(work, order)
        for positions in [some for part in parts for some in self._cut(part)]:
            with guarded(self.module, derive(self.settings.seed, "guard", work.info.round)):
                found = Chunk(self, work.rows(positions)).run()
            # Copies, as the next chunk's steps change what they are in.
            at = positions.to(self.settings.device)
            uploads.put(at, found.uploads)
            client_state.put(at, found.client_state)
            results.append(replace(found, uploads={}, client_state={}))
            if on_clients is not None:
                ran = on_clients(positions.tolist(), results[-1].loss)
                if ran is not False:
                    self.checks.look_after_hooks(self.traces, self.whole)
        order = torch.cat(parts) if len(order) else order
        position = torch.argsort(order).to(self.settings.device)
        return _in_order(results, uploads, client_state, position)

    def _alike(self, work: LocalWork, order: Tensor) -> list[Tensor]:
        """Split clients by the steps that their optimizers have taken and will take.

        An optimizer of many clients has one counter of steps.
        """
        assert work.kept is not None
        counts = [self.count_steps(work.data, work.info.index, (each,)) for each in work.phases]
        groups: dict[Any, list[int]] = {}
        for row in order.tolist():
            steps = tuple(int(count[row]) for count in counts)
            groups.setdefault((steps, counters(work.kept[row])), []).append(row)
        return [torch.tensor(rows) for rows in groups.values()]

    def evaluate(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Run a validation, test or prediction step for each client."""
        if is_of_one_model(self.module, self.settings, work):
            return self._of_one_model.run(work, on_clients)
        return self._evaluation().run(work, on_clients)

    def groups(self, work: EvaluationWork) -> Tensor:
        """Number the program that evaluates each client, int64 ``(clients,)``."""
        return self._evaluation().groups(work)

    def together(self, work: LocalWork | EvaluationWork) -> int:
        """Count the clients of the largest program for this work."""
        if isinstance(work, EvaluationWork):
            return int(self.groups(work).bincount(minlength=1).max())
        return len(self._cut(work.info.index)[0])

    def _evaluation(self) -> VectorizedEvaluation:
        return VectorizedEvaluation(self.module, self.settings, self.transform, self.quiet)


class Chunk:
    """One chunk of a cohort through all phases of a round."""

    def __init__(self, engine: VectorizedEngine, work: LocalWork) -> None:
        self.engine, self.work = engine, work
        self.method, self.data, self.info = work.method, work.data, work.info
        self.device = engine.settings.device
        self.clients = [int(client) for client in self.info.index]
        self.program = engine.program(getattr(self.data, "augment", None))
        self.logs = ClientLogs(len(self.clients), self.device)
        self.keys = self.noise_keys() if engine.needs_keys() else None
        self.metrics = ClientMetrics(engine.module, len(self.clients), self.device)
        measured = self.method.measures_travel
        self.travel = Travel(len(self.clients), self.device) if measured else None
        self.kept = None if work.kept is None else [dict(state) for state in work.kept]

    def noise_keys(self) -> Tensor:
        """Return a key for each client, int64 ``(clients,)``, also for steps without draws."""
        seed, work = self.engine.settings.seed, self.work
        return random_keys(seed, work.stream, work.info.round, self.clients).to(self.device)

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
                batches = self._batches(phase, active, first_epochs)
                self.engine.prefix.attach(batches, active, state, self.program)
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

    def _batches(self, phase: Phase, active: ActivePhase, first_epochs: list[int]) -> Batches:
        def key(client: int, epoch: int) -> int:
            return order_key(
                self.engine.settings.seed, self.work.stream, self.info.round, client, epoch
            )

        budget, limits = phase_budget(phase), phase_limits(phase, self.engine.limits)
        data = self.work.split(phase)
        if isinstance(data, FederatedTensorDataset):
            pad = self.engine.pads(self.keys is not None)
            return ResidentBatches(data, self.clients, budget, limits, key, pad, first_epochs)
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
                (phase.name, phase.lr, phase.data, phase.evaluate_only, phase.batches_per_step),
                (Same(program), engine.checks.settings()),
                options_of(work.optimizer),
            )
        )

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
        repeated.load(context, {"state": state, "optimizer": optimizer.placed()})
        ends: list[tuple[Tensor, Tree]] = []

        def take(tick: Tick, alone: bool, tree: Tree, tensors: list[Any]) -> tuple[Tree, Any]:
            kept = repeated.recording
            pairs = zip(tick.minibatches, tensors, strict=True)
            minibatches = [one.on(given, self.device, not kept) for one, given in pairs]
            optimizer.place(tree["optimizer"])
            self.engine.prefix.moved(tree["state"])
            if alone:
                optimizer.new_tick()
            local_step.begin(tick, local_step.step)
            listed = local_step.logs = ListedLogs(self.program.log)
            local_step.numbered = not kept
            new = self._take(tree["state"], tick.rows, minibatches, active, local_step)
            local_step.logs = self.logs
            return {"state": new, "optimizer": optimizer.placed()}, listed.listed

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
                kind = first if alone else None
                listed = repeated.step(partial(take, tick, alone), tensors, kind)
                for values, sizes, way in listed:
                    self.program.log.replayed(way)
                    counted = sizes if tick.counted is None else tick.counted
                    self.logs.add(values, counted, tick.rows, self.program.log.reductions)
        tree = repeated.unload()
        optimizer.place(tree["optimizer"])
        new: Tree = tree["state"]
        for done, left in ends:
            new = tmap(partial(_put_back, done=done), new, left)
        return new

    def _local_step(
        self, active: ActivePhase, number: int, steps: int, whole: bool
    ) -> VectorizedLocalStep:
        engine, program = self.engine, self.program
        if self.travel is not None and not active.phase.evaluate_only:
            self.travel.begin(self.work.optimizer, active.phase.lr)
        if engine.traces.enabled:
            plain = program.augment is None and program.hooks is None
            recordable = engine.checks.recordable and plain and not whole
            settings = engine.checks.settings() if recordable else None
            engine.traces.enter((active.trainable, program, settings) if recordable else None)
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
    engine: VectorizedEngine, work: LocalWork, program: ClientProgram, recordable: bool
) -> str | None:
    """Describe why the steps of some clients can't be captured or recorded, or return None."""
    method = type(work.method).__name__
    if not recordable:
        return f"`client_step` of {method} isn't marked by `recordable`"
    if not (engine.records and engine.checks.recordable):
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


def _in_order(
    results: list[LocalResult], uploads: Stacked, client_state: Stacked, position: Tensor
) -> LocalResult:
    """Join the chunks' results in the order of the cohort, in which the trees are already."""
    states = [state for result in results for state in result.optimizers]
    names = dict.fromkeys(name for result in results for name in result.logs)
    missing = [torch.full_like(result.loss, torch.nan) for result in results]
    logs = {
        name: torch.cat([r.logs.get(name, gap) for r, gap in zip(results, missing, strict=True)])[
            position
        ]
        for name in names
    }
    return LocalResult(
        uploads.tree(),
        client_state.tree(),
        logs,
        {name: option for result in results for name, option in result.options.items()},
        torch.cat([result.loss for result in results])[position],
        [states[row] for row in position.tolist()] if states else [],
    )
