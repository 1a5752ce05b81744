"""Evaluation of many clients as one program, with one large batch for shared layers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LogOptions, OnClients
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Model, rows
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import is_unmodified, writable
from lightning_pfl.engine.apart import evaluates_apart
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.client_logs import ClientLogs
from lightning_pfl.engine.cost import Load
from lightning_pfl.engine.epoch import Epoch
from lightning_pfl.engine.logs import LogCapture
from lightning_pfl.engine.program import ClientProgram, NotVectorizableError, batchable_kernels
from lightning_pfl.engine.safety.global_rng import Elsewhere
from lightning_pfl.engine.safety.guard import guarded
from lightning_pfl.engine.steps import Budget, Limits, fitting_samples
from lightning_pfl.engine.trace import Traces
from lightning_pfl.engine.vectorized.gradient import inside_gradient, unbatch
from lightning_pfl.engine.vectorized.kernels import FastKernels
from lightning_pfl.engine.vectorized.loaders import LoaderBatches
from lightning_pfl.engine.vectorized.metrics import ClientMetrics
from lightning_pfl.engine.vectorized.ordered import OrderedBatches
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick
from lightning_pfl.models.base import PersonalizedModule, nan_with_the_loss

SAMPLES, MOST = 768, 3072
"""Samples per program on a CPU, of greyscale images of 28 x 28 numbers and at most: enough for two
cores, few enough for their caches."""
COUNTED = 64
"""Largest number of chunks of which the estimate counts what they run, as there may be many."""
ON_GPU = 16
"""How many times as many samples a GPU gets, whose programs take as long to start as to run."""
ONE_BY_ONE = (
    "Run with FederatedStrategy(engine='sequential') to stop at the first client, or if the step "
    "can't run for many clients at once."
)
STAGES = {"validation_step": "val", "test_step": "test"}


def evaluates_per_sample(module: Any, step: str) -> bool:
    """Whether the step logs the means of ``per_sample`` for certain, in any batches."""
    return (
        step in STAGES
        and isinstance(module, PersonalizedModule)
        and getattr(type(module), step) is getattr(PersonalizedModule, step)
        and type(module)._step is PersonalizedModule._step
    )


def evaluation_batches(
    data: FederatedDataset,
    clients: Tensor,
    settings: EngineSettings,
    limit: float | int,
    pad: bool,
    batch_size: int,
) -> OrderedBatches | LoaderBatches:
    """Iterate once over the clients' samples, unshuffled."""
    limits = Limits(1, limit)
    if isinstance(data, FederatedTensorDataset):
        return OrderedBatches(data, clients, limits, pad, batch_size)

    def key(client: int, epoch: int) -> int:
        return derive(settings.seed, "evaluation order", client, epoch)

    return LoaderBatches(data, clients.tolist(), Budget(1, None), limits, key, settings.device)


def samples_at_once(data: FederatedDataset) -> int:
    """Choose the samples per program on a CPU; ids, which an embedding makes larger, are images."""
    return fitting_samples(data, SAMPLES, MOST, SAMPLES)


@dataclass
class _Step:
    """An evaluation step of the module's.

    Attributes:
        checks: What its code reads.
        traces: Its recordings.
        log: Notes what it logs, and the ways in which it has, of which recordings name one.
    """

    checks: Checks
    traces: Traces
    log: LogCapture = field(default_factory=LogCapture)


class _Results:
    """Values that an evaluation finds of its clients.

    Args:
        module: The user's module.
        work: The evaluation.
        device: Where the clients are evaluated.
    """

    def __init__(self, module: Any, work: EvaluationWork, device: torch.device) -> None:
        count = len(work.clients)
        self.logs, self.metrics = ClientLogs(count, device), ClientMetrics(module, count, device)
        self.counts = torch.zeros(count, dtype=torch.int64, device=device)
        predicts = range(count) if work.step == "predict_step" else ()
        self.predictions: list[list[Any]] = [[] for _ in predicts]

    def evaluation(self, log: LogCapture) -> Evaluation:
        """Compute the values, after all clients."""
        values = {**self.logs.compute(), **self.metrics.compute()}
        options, orders = dict(log.options), frozenset(log.orders)
        return Evaluation(values, self.counts, options, self.predictions, orders)


class VectorizedEvaluation:
    """Runs evaluation steps for chunks of clients.

    Args:
        module: The user's module.
        settings: The Trainer's flags.
        transform: ``"forward"``: plain ``vmap``; ``"grad"``: inside an unused gradient, because
            torch decomposes some layers (LSTM, GRU) into batchable operators only then.
        quiet: Whether the steps that are ``PersonalizedModule``'s own have never drawn random
            numbers; written by each run. Of these, one chunk in each run is checked.
    """

    def __init__(
        self,
        module: Any,
        settings: EngineSettings,
        transform: str = "forward",
        quiet: dict[str, bool] | None = None,
    ) -> None:
        self.module, self.settings, self.transform = module, settings, transform
        self.quiet = {} if quiet is None else quiet
        self.program: ClientProgram
        self._steps: dict[str, _Step] = {}

    def run(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Evaluate clients; see :class:`~lightning_pfl.engine.base.Engine`."""
        step, per_sample = work.step, self._per_sample_alone(work)
        recorded = self._step(step) if step in STAGES else None
        self.program = self._program(work, recorded)
        width = self._width(work, per_sample)
        known = per_sample and is_unmodified(self.module)
        checked, quiet = False, self.quiet.get(step, True)
        found = _Results(self.module, work, self.settings.device)
        with (
            torch.no_grad(),
            batchable_kernels(self.transform),
            self.program.capturing(step),
            found.metrics.deferring(),
        ):
            replayed = self._look(work, recorded, per_sample, found.metrics)
            for positions in self._chunks(work, width):
                # What a step of the package's has left alone in all chunks once, it leaves alone.
                trusted = known and checked and quiet and step in self.quiet
                with (
                    nullcontext(Elsewhere())
                    if trusted
                    else guarded(
                        self.module,
                        derive(self.settings.seed, "guard", step),
                        None if replayed is None else replayed.checks.tensors,
                    )
                ) as elsewhere:
                    self._chunk(work, positions, width, per_sample, replayed, found)
                checked, quiet = True, quiet and not elsewhere.moved_torch
                if on_clients is not None:
                    hooked = on_clients(positions.tolist()) is not False
                    if hooked and recorded is not None:
                        recorded.checks.look_after_hooks(recorded.traces)
                        replayed = self._look(work, recorded, per_sample, found.metrics)
        self.quiet[step] = quiet and known
        return found.evaluation(self.program.log)

    def _look(
        self, work: EvaluationWork, step: _Step | None, per_sample: bool, metrics: ClientMetrics
    ) -> _Step | None:
        """Return a step if it may be replayed, by what its code reads of the module now."""
        if step is None or not (step.checks.known and self._gathers(work.data)):
            return None
        if metrics.objects:
            return None
        settings = step.checks.settings(any_epoch=True)
        step.traces.enter((work.dataloader_idx, per_sample, settings))
        return step

    def _chunk(
        self,
        work: EvaluationWork,
        positions: Tensor,
        width: int,
        per_sample: bool,
        replayed: _Step | None,
        found: _Results,
    ) -> None:
        """Evaluate a chunk of clients, ``positions`` in those of the work."""
        data, ids = work.data, work.clients[positions]
        batches = evaluation_batches(data, ids, self.settings, work.limit, per_sample, width)
        here, ids = (send(each, self.settings.device) for each in (positions, ids))
        part = rows(work.models, here)
        for number in range(int(batches.steps.max()) if len(ids) else 0):
            for tick in batches.at(number):
                some = slice(None) if tick.rows is None else tick.rows
                at, sizes = here[some], send(tick.minibatches[0].sizes, found.counts.device)
                found.counts[at] += sizes
                with naming_clients(work.step, data.names, ids[some], work.round, ONE_BY_ONE):
                    output, values = self._tick(
                        part, tick, work.step, per_sample, found.metrics, replayed
                    )
                    values = found.metrics.update(values, at)
                    found.logs.add(values, sizes, at, self.program.log.reductions)
                if work.step == "predict_step":
                    _store_outputs(found.predictions, output, at)

    def _step(self, name: str) -> _Step:
        """Begin an evaluation by a step, of which recordings are kept."""
        if name not in self._steps:
            checks = Checks(self.module, name)
            epoch = Epoch(self.module, checks.reads_epoch)
            self._steps[name] = _Step(checks, Traces(enabled=True, epoch=epoch))
        step = self._steps[name]
        step.traces.begin_round(step.checks.due())
        return step

    def _program(self, work: EvaluationWork, step: _Step | None) -> ClientProgram:
        """Return the user's step as a function."""
        kernels = FastKernels if self.transform == "forward" else nullcontext
        program = ClientProgram(self.module, self.settings, kernels=kernels)
        program.throwaway = writable(self.module)
        program.predict, program.dataloader_idx = work.predict, work.dataloader_idx
        if step is not None:
            program.log = step.log
        return program

    def _gathers(self, data: FederatedDataset) -> bool:
        """Whether nothing of a user's makes minibatches of the data."""
        in_memory = isinstance(data, FederatedTensorDataset) and data.transform is None
        return in_memory and self.settings.batch_hooks is None

    def groups(self, work: EvaluationWork) -> Tensor:
        """Number the chunk of each client, int64 ``(clients,)``."""
        found = torch.empty(len(work.clients), dtype=torch.int64)
        width = self._width(work, self._per_sample_alone(work))
        for number, positions in enumerate(self._chunks(work, width)):
            found[positions] = number
        return found

    def load(self, work: EvaluationWork) -> Load:
        """Count what an evaluation consists of, for clients of all sizes in the data."""
        data, per_sample = work.data, self._per_sample_alone(work)
        everyone = replace(work, clients=torch.arange(len(data.num_samples)))
        width = self._width(everyone, per_sample)
        size = data.batch_size if isinstance(data, FederatedTensorDataset) else width
        chunks = self._chunks(everyone, width)
        total = Load(0, 0, 0, 0, 0)
        for positions in chunks[:: -(-len(chunks) // COUNTED)]:
            counts = data.num_samples[positions].tolist()
            total += _load_padded(counts, width) if per_sample else _load_in_groups(counts, size)
            total += Load(sum(-(-count // size) for count in counts), 0, 0, sum(counts), 0)
        return total

    def _chunks(self, work: EvaluationWork, width: int) -> tuple[Tensor, ...]:
        """Cut the clients into chunks: their positions, those with the most samples first."""
        samples = work.data.num_samples[work.clients]
        order = torch.argsort(samples, descending=True, stable=True)
        most = min(width, max(1, int(work.data.num_samples.max())))
        # torch.split: the stubs leave the method untyped.
        return torch.split(order, max(1, self._samples(work.data) // most))

    def _per_sample_alone(self, work: EvaluationWork) -> bool:
        """Whether values of samples are all that a step computes, in whichever minibatches."""
        # A hook may do anything with the samples of a batch.
        hooked = self.settings.batch_hooks is not None
        if hooked or not evaluates_per_sample(self.module, work.step):
            return False
        return evaluates_apart(self.module, self.settings, work.data, work.round)

    def _width(self, work: EvaluationWork, per_sample: bool) -> int:
        """Choose the samples of a minibatch, the same for whichever clients of the data."""
        data, limit = work.data, work.limit
        if not isinstance(data, FederatedTensorDataset):
            samples = data.num_samples[work.clients]
            return max(int(samples.max()) if len(samples) else 1, 1)
        # A limit and drop_last refer to the user's batches; the int 1 is one batch, and equals the
        # float 1.0.
        whole = isinstance(limit, float) and limit == 1.0 and not data.drop_last
        if per_sample and whole:
            return max(1, min(self._samples(data), int(data.num_samples.max())))
        return data.batch_size

    def _samples(self, data: FederatedDataset) -> int:
        return samples_at_once(data) * (ON_GPU if self.settings.device.type != "cpu" else 1)

    def _tick(
        self,
        models: Model,
        tick: Tick,
        step: str,
        per_sample: bool,
        metrics: ClientMetrics,
        replayed: _Step | None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run the step, or replay it; return its output and logged values."""
        part = models if tick.rows is None else rows(models, tick.rows)
        minibatch = tick.minibatches[0]
        if per_sample:
            means = partial(self._per_sample, STAGES[step])
            given = part, minibatch.data, minibatch.mask
            return None, means(*given) if replayed is None else replayed.traces.run(means, *given)
        if replayed is None:
            return self._run_step(part, minibatch, minibatch.number, step, metrics)
        traces, log = replayed.traces, self.program.log

        def run(models: Model, data: Any) -> tuple[dict[str, Tensor], int]:
            number = traces.seen(minibatch.number)
            batch = replace(minibatch, data=data)
            return self._run_step(models, batch, number, step, metrics)[1], log.way()

        kind = traces.kind(minibatch.number)
        values, way = traces.run(run, part, minibatch.data, kind=kind)
        log.replayed(way)
        return None, values

    def _per_sample(
        self, stage: str, models: Model, data: Any, mask: Tensor | None
    ) -> dict[str, Tensor]:
        values = self._vmap(models, data, self.program.per_sample)
        for name in values:  # as in the step
            key = f"{stage}_{name}"
            self.program.log.options.setdefault(key, LogOptions(key in self.module.shown))
        means = {
            # where, not a product: a padded sample may be NaN or Inf.
            name: value.mean(1) if mask is None else value.where(mask > 0, 0).sum(1) / mask.sum(1)
            for name, value in values.items()
        }
        means = nan_with_the_loss(means, means["loss"])
        return {f"{stage}_{name}": mean for name, mean in means.items()}

    def _run_step(
        self, models: Model, minibatch: Minibatch, number: Any, step: str, metrics: ClientMetrics
    ) -> tuple[Any, dict[str, Tensor]]:
        def run(model: Model, batch: Any) -> tuple[Any, dict[str, Tensor]]:
            metrics.begin()
            out, logged = self.program.evaluation_step(model, step, batch, number)
            logged = metrics.take(logged)
            if step != "predict_step":
                return torch.zeros(()), logged
            if not isinstance(out, (Tensor, tuple, list, dict)):
                raise NotVectorizableError("predict_step doesn't return tensors")
            return out, logged

        outputs: tuple[Any, dict[str, Tensor]] = self._vmap(models, minibatch.data, run)
        return outputs

    def _vmap(self, models: Model, data: Any, function: Any) -> Any:
        if self.transform == "grad":
            # Recurrent layers write in place into results of their weights, which therefore need
            # the client axis.
            return torch.vmap(inside_gradient(function))(models, data)
        plain, dims = unbatch(models)
        return torch.vmap(function, in_dims=(dims, 0))(plain, data)


def _load_padded(counts: list[int], width: int) -> Load:
    """Count programs in which all clients of a chunk have minibatches of one size."""
    total = Load(0, 0, 0, 0, 0)
    for begin in range(0, max(counts, default=0), width):
        here = [min(width, count - begin) for count in counts if count > begin]
        total += Load(0, 1, len(here), 0, len(here) * max(here))
    return total


def _load_in_groups(counts: list[int], size: int) -> Load:
    """Count programs for each size that minibatches of a number have: full ones, and the rest."""
    full = max(count // size for count in counts)
    rests = len({count for count in counts if count % size})
    parts = sum(-(-count // size) for count in counts)
    return Load(0, full + rests, parts, 0, sum(counts))


def _store_outputs(predictions: list[list[Any]], outputs: Any, at: Tensor) -> None:
    for row, client in enumerate(at.tolist()):
        predictions[client].append(
            apply_to_collection(outputs, Tensor, lambda leaf, row=row: leaf[row].cpu())
        )
