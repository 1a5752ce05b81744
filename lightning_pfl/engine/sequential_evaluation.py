"""Evaluation of one client after another, by replayed steps where they may be recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_pfl.contract.records import Evaluation, OnClients
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.mixture import is_mixed
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import Model
from lightning_pfl.data.batch import batch_length
from lightning_pfl.engine import kernels
from lightning_pfl.engine.active_phase import is_unmodified, writable
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.logs import ClientLogs, computed_metrics, plain_values
from lightning_pfl.engine.minibatches import evaluation_minibatches
from lightning_pfl.engine.program import ClientProgram
from lightning_pfl.engine.safety.global_rng import watch_global_rng
from lightning_pfl.engine.safety.snapshot import changed, snapshot
from lightning_pfl.engine.steps import Limits
from lightning_pfl.engine.trace import Given, Traces
from lightning_pfl.models.base import PersonalizedModule


class SequentialEvaluation:
    """Runs evaluation steps.

    Args:
        module: The user's module.
        settings: The Trainer's flags.
        traces: Where steps are recorded.
        fast: Whether large products are oneDNN's, as in steps that are replayed.
        quiet: Filled with whether a step has never drawn nor, the first time, written to an
            attribute, by its name.

    Attributes:
        draws_elsewhere: Whether a step of the last evaluation used Python's or NumPy's global
            generator.
    """

    def __init__(
        self,
        module: Any,
        settings: EngineSettings,
        traces: Traces,
        fast: bool,
        quiet: dict[str, bool],
    ) -> None:
        self.module, self.settings, self.traces, self.fast = module, settings, traces, fast
        self.draws_elsewhere = False
        self._evaluators: dict[str, ClientProgram] = {}
        self.quiet = quiet
        self._checks: dict[str, Checks] = {}

    def run(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Evaluate clients; see :class:`~lightning_pfl.engine.base.Engine`."""
        checks = self._checks.setdefault(work.step, Checks(self.module, work.step))
        check = checks.due()
        if self._is_quiet(work):
            key = None if checks.known else derive(self.settings.seed, "guard", work.step)
            with watch_global_rng(key, checks.known) as found:
                evaluation = self._unwatched(work, on_clients, checks, check)
            if not (found.moved or found.moved_torch):
                return evaluation
            on_clients = None  # they have heard of it
        # Where steps write to attributes, they differ from their recordings.
        before = {} if work.step in self.quiet else snapshot(self.module)
        evaluation, moved = self._watched(work, on_clients)
        moved |= bool(before) and changed(self.module, before) is not None
        self.quiet[work.step] = not moved and self.quiet.get(work.step, True)
        return evaluation

    def may_replay(self, step: str) -> bool:
        """Whether steps of an evaluation may be recorded: those of ``PersonalizedModule`` alone."""
        return self.traces.enabled and self._is_known(step)

    def _is_known(self, step: str) -> bool:
        """Whether a step logs means over samples, and nothing else that is collected."""
        return (
            is_unmodified(self.module)
            and self.settings.batch_hooks is None
            and step in ("validation_step", "test_step")
            and getattr(type(self.module), step) is getattr(PersonalizedModule, step)
        )

    def _is_quiet(self, work: EvaluationWork) -> bool:
        drawn = not self.quiet.get(work.step, False)
        return self._is_known(work.step) and not drawn and not is_mixed(work.models)

    def _unwatched(
        self, work: EvaluationWork, on_clients: OnClients | None, checks: Checks, check: bool
    ) -> Evaluation:
        """Evaluate without watching random generators in each step, which may be replayed.

        Args:
            work: The evaluation.
            on_clients: As in :meth:`run`.
            checks: What the step's code reads.
            check: Whether a recording is compared with its step.
        """
        program = self._evaluator(work)
        self.traces.begin_round(check)
        self.traces.enter((work.step, program, checks.settings()))
        logs = ClientLogs(len(work.clients), self.settings.device)
        counts = torch.zeros(len(work.clients), dtype=torch.int64)
        # By the minibatch's number, so that all clients' values of one are added at once.
        found: dict[int, list[tuple[int, int, dict[str, Tensor]]]] = {}

        def run(number: int, model: Model, batch: Any) -> dict[str, Tensor]:
            return program.evaluation_step(model, work.step, batch, number)[1]

        with torch.no_grad(), program.capturing():
            for row, client in enumerate(work.clients.tolist()):
                model = Given({name: leaf[row] for name, leaf in work.models.items()})
                for number, batch in evaluation_minibatches(
                    work.data, client, Limits(1, work.limit), self.settings
                ):
                    size = batch_length(batch)
                    with naming_clients(work.step, work.data.names, [client], work.round):
                        values = self.traces.run(partial(run, number), model, batch)
                    counts[row] += size
                    found.setdefault(number, []).append((row, size, values))
                if on_clients is not None and on_clients([row]) is not False:
                    checks.look_after_hooks(self.traces)
                    self.traces.enter((work.step, program, checks.settings()))
        for results in found.values():
            at, sizes, values = zip(*results, strict=True)
            stacked = {name: torch.stack([one[name] for one in values]) for name in values[0]}
            logs.add(stacked, torch.tensor(sizes), torch.tensor(at), program.log.reductions)
        # Nothing is predicted here.
        return Evaluation(logs.compute(), counts, dict(program.log.options))

    def _evaluator(self, work: EvaluationWork) -> ClientProgram:
        """Return the user's step, cached where it is replayed, without its calls of ``log``."""
        known = self._evaluators.get(work.step)
        if known is None or not self.may_replay(work.step):
            modes = partial(self._kernels, work.step) if self.fast else nullcontext
            known = ClientProgram(self.module, self.settings, kernels=modes)
            self._evaluators[work.step] = known
        known.throwaway, known.predict = writable(self.module), work.predict
        known.dataloader_idx = work.dataloader_idx
        return known

    def _kernels(self, step: str) -> AbstractContextManager[None]:
        # Predictions are the user's, in whose hands they lie where they always do.
        return kernels.alone(step != "predict_step" and self._checks[step].placeless)

    def _watched(
        self, work: EvaluationWork, on_clients: OnClients | None
    ) -> tuple[Evaluation, bool]:
        """Evaluate with the global generators seeded for each minibatch; whether any drew."""
        clients, data, step = work.clients, work.data, work.step
        program = self._evaluator(work)
        logs = ClientLogs(len(clients), self.settings.device)
        counts = torch.zeros(len(clients), dtype=torch.int64)
        predicts = range(len(clients)) if step == "predict_step" else ()
        predictions: list[list[Any]] = [[] for _ in predicts]
        limits = Limits(1, work.limit)
        self.draws_elsewhere = moved = False
        with torch.no_grad(), program.capturing():
            for row, client in enumerate(clients.tolist()):
                model = {name: leaf[row] for name, leaf in work.models.items()}
                metrics: dict[str, Metric] = {}
                at = torch.tensor([row])
                minibatches = evaluation_minibatches(data, client, limits, self.settings)
                for number, batch in minibatches:
                    size = torch.tensor([batch_length(batch)])
                    with (
                        watch_global_rng(
                            derive(self.settings.seed, step, client, number)
                        ) as elsewhere,
                        naming_clients(step, data.names, [client], work.round),
                    ):
                        out, logged = program.evaluation_step(model, step, batch, number)
                    self.draws_elsewhere |= elsewhere.moved
                    moved |= elsewhere.moved or elsewhere.moved_torch
                    counts[row] += size[0]
                    metrics |= {n: v for n, v in logged.items() if isinstance(v, Metric)}
                    logs.add(plain_values(logged), size, at, program.log.reductions)
                    if step == "predict_step":
                        predictions[row].append(
                            apply_to_collection(out, Tensor, lambda leaf: leaf.cpu())
                        )
                with naming_clients(step, data.names, [client], work.round):
                    logs.add(computed_metrics(metrics), torch.ones(1), at)
                if on_clients is not None:
                    on_clients([row])
        options = dict(program.log.options)
        return Evaluation(logs.compute(), counts, options, predictions), moved
