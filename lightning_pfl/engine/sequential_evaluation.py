"""Evaluation of one client after another, by replayed steps where they may be recorded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_pfl.contract.records import Evaluation, OnClients
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.mixture import is_mixed
from lightning_pfl.core.randomness import derive, put_generators_back, restoring_once, seeded
from lightning_pfl.core.tree import Model
from lightning_pfl.data.batch import batch_length
from lightning_pfl.engine.active_phase import writable
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.client_logs import LogsInTurn, LogsOfSteps
from lightning_pfl.engine.epoch import Epoch
from lightning_pfl.engine.large_operators import LargeOperators
from lightning_pfl.engine.logs import computed_metrics, sorted_out, tensors_in
from lightning_pfl.engine.minibatches import evaluation_minibatches
from lightning_pfl.engine.noted_metrics import NotedMetrics, made, makes_calls, put_back
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.safety.global_rng import Elsewhere, watch_global_rng
from lightning_pfl.engine.safety.snapshot import (
    Snapshot,
    changed,
    has_generators,
    snapshot,
)
from lightning_pfl.engine.steps import Limits
from lightning_pfl.engine.trace import Given, Traces

EVALUATING = ("validation_step", "test_step")
"""Steps whose results are what they log."""
_Logged = tuple[list[str], list[Tensor], dict[str, Tensor], dict[str, Metric], int]
"""What a step logs: names, values as one tensor, arguments of torchmetrics objects, these, how."""


@dataclass
class _Step:
    """A step of the module's.

    Attributes:
        checks: What its code reads.
        traces: Its recordings.
        program: The step as a function.
    """

    checks: Checks
    traces: Traces
    program: ClientProgram | None = None


class SequentialEvaluation:
    """Runs evaluation steps.

    Args:
        module: The user's module.
        settings: The Trainer's flags.
        record: Whether steps may be recorded and replayed.
        quiet: Filled with whether a step has never drawn nor, the first time, written to an
            attribute, by its name.

    Attributes:
        draws_elsewhere: Whether a step of the last evaluation used Python's or NumPy's global
            generator, or of the first one by such a step, where that isn't watched any more.
    """

    def __init__(
        self, module: Any, settings: EngineSettings, record: bool, quiet: dict[str, bool]
    ) -> None:
        self.module, self.settings, self.record, self.quiet = module, settings, record, quiet
        self.draws_elsewhere = False
        self._elsewhere: dict[str, bool] = {}
        self._noted = NotedMetrics(module)
        self._steps: dict[str, _Step] = {}

    def run(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Evaluate clients; see :class:`~lightning_pfl.engine.base.Engine`."""
        step = self._step(work.step)
        step.traces.begin_round(step.checks.due())
        if self._is_quiet(work, step):
            known = step.checks.known
            key = None if known else derive(self.settings.seed, "guard", work.step)
            states = self._noted.states() if step.checks.calls_metrics else []
            with watch_global_rng(key, known) as found:
                evaluation = self._unwatched(work, on_clients, step)
            if not (found.moved or found.moved_torch):
                return evaluation
            put_back(states)
            on_clients = None  # they have heard of it
        elif self._is_known(work, step):
            self.draws_elsewhere = False
            return self._unwatched(work, on_clients, step, draws=True)
        evaluation, moved = self._watched(work, on_clients, step)
        self.quiet[work.step] = not moved and self.quiet.get(work.step, True)
        return evaluation

    def may_replay(self, name: str) -> bool:
        """Whether steps are replayed, by what their code reads now and whether any has drawn."""
        step = self._step(name)
        step.checks.look()
        return self._is_replayed(name, step) and (step.checks.known or self.quiet.get(name, True))

    def calls_metrics(self, name: str) -> bool:
        """Whether steps that are replayed call torchmetrics objects."""
        step = self._step(name)
        step.checks.look()
        return step.checks.calls_metrics

    def _step(self, name: str) -> _Step:
        if name not in self._steps:
            checks = Checks(self.module, name, makes_calls(self.settings))
            epoch = Epoch(self.module, checks.reads_epoch)
            traces = Traces(self.record, self._noted.alone, epoch)
            self._steps[name] = _Step(checks, traces)
        return self._steps[name]

    def _is_replayed(self, name: str, step: _Step) -> bool:
        hooked = self.settings.batch_hooks is not None
        return step.traces.enabled and step.checks.recordable and not hooked and name in EVALUATING

    def _is_quiet(self, work: EvaluationWork, step: _Step) -> bool:
        replayed = self._is_replayed(work.step, step) and not has_generators(self.module)
        return replayed and self.quiet.get(work.step, False) and not is_mixed(work.models)

    def _is_known(self, work: EvaluationWork, step: _Step) -> bool:
        """Whether steps draw from no generators but torch's global ones, and write nothing."""
        replayed = self._is_replayed(work.step, step) and step.checks.known
        return replayed and work.step in self.quiet and not is_mixed(work.models)

    def _unwatched(
        self,
        work: EvaluationWork,
        on_clients: OnClients | None,
        step: _Step,
        draws: bool = False,
    ) -> Evaluation:
        """Evaluate without watching random generators in each step, which may be replayed.

        Args:
            work: The evaluation.
            on_clients: Listens.
            step: The step.
            draws: Whether steps may draw from torch's global generators, which are seeded for each.
        """
        program = self._program(work, step)
        steps = _ReplayedSteps(program, step, work, self.settings, self._noted, draws)
        steps.enter()
        logs, counts = LogsInTurn(len(work.clients), self.settings.device), [0] * len(work.clients)

        def given(row: int) -> Given:
            return Given({name: leaf[row] for name, leaf in work.models.items()})

        shared = given(0) if work.is_of_one_model and len(work.clients) else None
        clients = work.clients.tolist()
        of_all = evaluation_minibatches(work.data, clients, Limits(1, work.limit), self.settings)
        sharing = restoring_once() if step.checks.known else nullcontext()
        with sharing, torch.no_grad(), program.capturing(work.step):
            for row, (client, minibatches) in enumerate(zip(clients, of_all, strict=True)):
                model = shared or given(row)
                logged, metrics, counts[row] = steps.of_client(client, model, minibatches)
                logs.add(row, logged)
                if metrics:
                    with naming_clients(work.step, work.data.names, [client], work.round):
                        logs.add_computed(row, computed_metrics(metrics))
                if on_clients is not None and on_clients([row]) is not False:
                    step.checks.look_after_hooks(step.traces)
                    steps.enter()
        # Nothing is predicted here.
        options, orders = dict(program.log.options), frozenset(program.log.orders)
        return Evaluation(logs.compute(), torch.tensor(counts), options, orders=orders)

    def _program(self, work: EvaluationWork, step: _Step) -> ClientProgram:
        """Return the user's step, cached where it is replayed, without its calls of ``log``."""
        known = step.program
        if known is None or not self._is_replayed(work.step, step):
            modes = partial(self._kernels, work.step, step) if self.record else nullcontext
            known = step.program = ClientProgram(self.module, self.settings, kernels=modes)
        known.throwaway, known.predict = writable(self.module), work.predict
        known.dataloader_idx = work.dataloader_idx
        return known

    def _kernels(self, name: str, step: _Step) -> AbstractContextManager[Any]:
        # Also in steps without a recording, so that all of a round have the same bits.
        if not step.checks.recordable:
            return nullcontext()
        # Predictions are the user's, in whose hands they lie where they always do.
        return LargeOperators(name in EVALUATING and step.checks.placeless)

    def _watched(
        self, work: EvaluationWork, on_clients: OnClients | None, step: _Step
    ) -> tuple[Evaluation, bool]:
        """Evaluate with the global generators seeded for each minibatch.

        Returns:
            The evaluation, and whether any drew or, the first time, a step wrote to an attribute.
        """
        clients, name = work.clients.tolist(), work.step
        program = self._program(work, step)
        # Later only where a step may be found to draw that was taken for one that doesn't.
        watched = name not in self.quiet or (step.checks.recordable and self.quiet[name])
        steps = _WatchedSteps(program, work, self.settings, watched)
        logs, counts = LogsInTurn(len(clients), self.settings.device), [0] * len(clients)
        predictions: list[list[Any]] = []
        of_all = evaluation_minibatches(work.data, clients, Limits(1, work.limit), self.settings)
        # Where steps write to attributes, they differ from their recordings.
        others = not step.checks.known  # than what its code is known to write to
        before, wrote = None if name in self.quiet else snapshot(self.module, others), False

        def writes(before: Snapshot | None) -> bool:
            return before is not None and changed(self.module, before, others) is not None

        with restoring_once(), torch.no_grad(), program.capturing(name):
            for row, (client, minibatches) in enumerate(zip(clients, of_all, strict=True)):
                model = {name: leaf[row] for name, leaf in work.models.items()}
                logged, metrics, outputs, counts[row] = steps.of_client(client, model, minibatches)
                predictions += [outputs] if name == "predict_step" else []
                logs.add(row, logged)
                if metrics:
                    put_generators_back()
                    with naming_clients(name, work.data.names, [client], work.round):
                        logs.add_computed(row, computed_metrics(metrics))
                if on_clients is not None:
                    wrote |= writes(before)
                    hooked = on_clients([row]) is not False
                    again = hooked and before is not None
                    before = snapshot(self.module, others) if again else None
        wrote |= writes(before)
        if watched:
            self._elsewhere[name] = steps.elsewhere
        self.draws_elsewhere = self._elsewhere.get(name, False)
        options, orders = dict(program.log.options), frozenset(program.log.orders)
        counted = torch.tensor(counts)
        found = Evaluation(logs.compute(), counted, options, predictions, orders)
        return found, wrote or steps.moved


class _WatchedSteps:
    """Steps of an evaluation that run with the global generators seeded for each minibatch.

    Args:
        program: The step as a function.
        work: The evaluation.
        settings: The Trainer's flags.
        watched: Whether to notice whether they draw.

    Attributes:
        moved: Whether one drew.
        elsewhere: Whether one drew from Python's or NumPy's generator.
    """

    def __init__(
        self, program: ClientProgram, work: EvaluationWork, settings: EngineSettings, watched: bool
    ) -> None:
        self.program, self.work, self.settings, self.watched = program, work, settings, watched
        self.moved = self.elsewhere = False

    def of_client(
        self, client: int, model: Model, minibatches: Iterable[tuple[int, Any]]
    ) -> tuple[LogsOfSteps, dict[str, Metric], list[Any], int]:
        """Run the steps of a client.

        Returns:
            What they have logged, torchmetrics objects that are still to be computed, their
            outputs, if these are predictions, and the number of samples.
        """
        work, log, samples, outputs = self.work, self.program.log, 0, list[Any]()
        metrics, of_steps = dict[str, Metric](), LogsOfSteps()
        for number, batch in minibatches:
            size = batch_length(batch)
            with (
                self._drawing(client, number) as found,
                naming_clients(work.step, work.data.names, [client], work.round),
            ):
                out, logged = self.program.evaluation_step(model, work.step, batch, number)
                values, objects = sorted_out(None, logged)
            if found is not None:
                self.elsewhere |= found.moved
                self.moved |= found.moved or found.moved_torch
            metrics |= objects
            samples += size
            of_steps.add(values, size, None, log.reductions)
            if work.step == "predict_step":
                outputs.append(apply_to_collection(out, Tensor, lambda leaf: leaf.cpu()))
        return of_steps, metrics, outputs, samples

    def _drawing(self, client: int, number: int) -> AbstractContextManager[Elsewhere | None]:
        key = derive(self.settings.seed, self.work.step, client, number)
        return watch_global_rng(key) if self.watched else seeded(key, everything=True)


class _ReplayedSteps:
    """Steps of an evaluation that may be replayed.

    Args:
        program: The step as a function.
        step: What its code reads, and its recordings.
        work: The evaluation.
        settings: The Trainer's flags.
        noted: The torchmetrics objects that steps call.
        draws: Whether steps may draw from torch's global generators, which are seeded for each.
    """

    def __init__(
        self,
        program: ClientProgram,
        step: _Step,
        work: EvaluationWork,
        settings: EngineSettings,
        noted: NotedMetrics,
        draws: bool,
    ) -> None:
        self.program, self.checks, self.traces = program, step.checks, step.traces
        self.work, self.settings = work, settings
        self._noted, self._draws, self._known = noted, draws, step.checks.known

    @property
    def _unsure(self) -> bool:
        """Whether a hook has made a step unknown whose code was known before."""
        return self._known and not self.checks.known

    def enter(self) -> None:
        """Choose the recordings by what steps read of the module now."""
        if self._unsure:
            self.traces.enter(None)
        else:
            read = self.checks.settings(any_epoch=True)
            self.traces.enter((self.program, self.work.dataloader_idx, read))

    def of_client(
        self, client: int, model: Given, minibatches: Iterable[tuple[int, Any]]
    ) -> tuple[LogsOfSteps, dict[str, Metric], int]:
        """Run the steps of a client.

        Returns:
            What they have logged, torchmetrics objects that are still to be computed, and the
            number of samples.
        """
        work, log, samples = self.work, self.program.log, 0
        metrics, of_steps = dict[str, Metric](), LogsOfSteps()
        for number, batch in minibatches:
            size = batch_length(batch)
            with (
                naming_clients(work.step, work.data.names, [client], work.round),
                self._drawing(client, number),
            ):
                names, joined, given, objects, way = self.traces.run(
                    partial(self._run, number), model, batch, kind=self.traces.kind(number)
                )
                log.replayed(way)
                if log.calls is not None:
                    own, objects = made(log.calls, given, self.program.module)
                    of_steps.add(own, size, None, log.reductions)
            metrics |= objects
            samples += size
            of_steps.add_joined(names, joined, size, log.reductions)
        return of_steps, metrics, samples

    def _drawing(self, client: int, number: int) -> AbstractContextManager[None]:
        if not (self._draws or self._unsure):
            return nullcontext()
        key = derive(self.settings.seed, self.work.step, client, number)
        return seeded(key, everything=self._unsure)

    def _run(self, number: int, model: Model, batch: Any) -> _Logged:
        """Run a step, whose operators are recorded."""
        self._noted.begin()
        seen, log = self.traces.seen(number), self.program.log
        logged = self.program.evaluation_step(model, self.work.step, batch, seen)[1]
        given: dict[str, Tensor] = {}
        # A replay has one result less to copy for each value.
        values, device = tensors_in(logged), self.settings.device
        each = [value.to(device, torch.float64) for value in values.values()]
        joined = [torch.stack(each)] if each else []
        metrics = {name: one for name, one in logged.items() if isinstance(one, Metric)}
        if self._noted.active:
            log.calls, given = self._noted.taken(logged), self._noted.given()
            metrics = {}
        return list(values), joined, given, metrics, log.way()
