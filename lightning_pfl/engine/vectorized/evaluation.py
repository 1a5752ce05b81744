"""Evaluation of many clients as one program, with one large batch for shared layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LogOptions, OnClients
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.tree import Model, rows
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import couples_samples, writable
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.kernels import FastKernels
from lightning_pfl.engine.logs import ClientLogs
from lightning_pfl.engine.program import ClientProgram, NotVectorizableError, batchable_kernels
from lightning_pfl.engine.safety.guard import guarded
from lightning_pfl.engine.steps import Budget, Limits
from lightning_pfl.engine.vectorized.gradient import inside_gradient, unbatch
from lightning_pfl.engine.vectorized.loaders import Batches, LoaderBatches
from lightning_pfl.engine.vectorized.metrics import ClientMetrics
from lightning_pfl.engine.vectorized.resident import ResidentBatches
from lightning_pfl.engine.vectorized.ticks import Minibatch, Tick
from lightning_pfl.models.base import PersonalizedModule

SAMPLES = 768
"""Samples per program on a CPU: enough for two cores, few enough for their caches."""
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
    clients: list[int],
    settings: EngineSettings,
    limit: float | int,
    pad: bool,
    batch_size: int,
) -> Batches:
    """Iterate once over the clients' samples, unshuffled."""
    limits = Limits(1, limit)
    if isinstance(data, FederatedTensorDataset):
        return ResidentBatches(
            data, clients, Budget(1, None), limits, None, pad, batch_size=batch_size
        )

    def key(client: int, epoch: int) -> int:
        return derive(settings.seed, "evaluation order", client, epoch)

    return LoaderBatches(data, clients, Budget(1, None), limits, key, settings.device)


class VectorizedEvaluation:
    """Runs one evaluation step for chunks of clients.

    Args:
        module: The user's module.
        settings: The Trainer's flags.
        transform: ``"forward"``: plain ``vmap``; ``"grad"``: inside an unused gradient, because
            torch decomposes some layers (LSTM, GRU) into batchable operators only then.
    """

    def __init__(self, module: Any, settings: EngineSettings, transform: str = "forward") -> None:
        self.module, self.settings, self.transform = module, settings, transform
        kernels = FastKernels if transform == "forward" else nullcontext
        self.program = ClientProgram(module, settings, kernels=kernels)
        self.program.throwaway = writable(module)

    def run(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Evaluate clients; see :class:`~lightning_pfl.engine.base.Engine`."""
        clients, data, step = work.clients, work.data, work.step
        self.program.predict, self.program.dataloader_idx = work.predict, work.dataloader_idx
        samples = data.num_samples[clients]
        # A hook may do anything with the samples of a batch.
        independent = self.program.hooks is None and not couples_samples(self.module, False)
        per_sample = independent and evaluates_per_sample(self.module, step)
        width = self._width(data, samples, per_sample, work.limit)
        order = torch.argsort(samples, descending=True, stable=True)
        logs = ClientLogs(len(clients), self.settings.device)
        counts = torch.zeros(len(clients), dtype=torch.int64, device=self.settings.device)
        predictions: list[list[Any]] = [[] for _ in clients]
        metrics = ClientMetrics(self.module, len(clients), self.settings.device)
        with (
            torch.no_grad(),
            batchable_kernels(self.transform),
            self.program.capturing(),
            metrics.deferring(),
        ):
            for positions in order.split(max(1, SAMPLES // width)):
                ids = clients[positions]
                with guarded(self.module, derive(self.settings.seed, "guard", step)):
                    batches = evaluation_batches(
                        data, ids.tolist(), self.settings, work.limit, per_sample, width
                    )
                    here, ids = (t.to(self.settings.device) for t in (positions, ids))
                    part = rows(work.models, here)
                    for number in range(int(batches.steps.max()) if len(ids) else 0):
                        for tick in batches.at(number):
                            some = slice(None) if tick.rows is None else tick.rows
                            at = here[some]
                            sizes = tick.minibatches[0].sizes.to(counts)
                            counts[at] += sizes
                            with naming_clients(
                                step, data.names, ids[some], work.round, ONE_BY_ONE
                            ):
                                output, values = self._tick(part, tick, step, per_sample, metrics)
                                values = metrics.update(values, at)
                                logs.add(values, sizes, at, self.program.log.reductions)
                            if step == "predict_step":
                                _store_outputs(predictions, output, at)
                if on_clients is not None:
                    on_clients(positions.tolist())
        values = {**logs.compute(), **metrics.compute()}
        return Evaluation(values, counts.cpu(), dict(self.program.log.options), predictions)

    def _width(
        self, data: FederatedDataset, samples: Tensor, per_sample: bool, limit: float | int
    ) -> int:
        if not isinstance(data, FederatedTensorDataset):
            return max(int(samples.max()) if len(samples) else 1, 1)
        # A limit and drop_last refer to the user's batches; the int 1 is one batch, and equals the
        # float 1.0.
        whole = isinstance(limit, float) and limit == 1.0 and not data.drop_last
        if per_sample and whole:
            return max(1, min(SAMPLES, int(samples.max()) if len(samples) else 1))
        return data.batch_size

    def _tick(
        self, models: Model, tick: Tick, step: str, per_sample: bool, metrics: ClientMetrics
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run the step; return its output and logged values."""
        part = models if tick.rows is None else rows(models, tick.rows)
        minibatch = tick.minibatches[0]
        if per_sample:
            return None, self._per_sample(part, minibatch, STAGES[step])
        return self._step(part, minibatch, step, metrics)

    def _per_sample(self, models: Model, minibatch: Minibatch, stage: str) -> dict[str, Tensor]:
        values = self._vmap(models, minibatch.data, self.program.per_sample)
        for name in values:  # as in the step
            key = f"{stage}_{name}"
            self.program.log.options.setdefault(key, LogOptions(key in self.module.shown))
        if minibatch.mask is None:
            return {f"{stage}_{name}": value.mean(1) for name, value in values.items()}
        mask = minibatch.mask
        # where, not a product: a padded sample may be NaN or Inf.
        return {
            f"{stage}_{name}": value.where(mask > 0, 0).sum(1) / mask.sum(1)
            for name, value in values.items()
        }

    def _step(
        self, models: Model, minibatch: Minibatch, step: str, metrics: ClientMetrics
    ) -> tuple[Any, dict[str, Tensor]]:
        def run(model: Model, batch: Any) -> tuple[Any, dict[str, Tensor]]:
            metrics.begin()
            out, logged = self.program.evaluation_step(model, step, batch, minibatch.number)
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


def _store_outputs(predictions: list[list[Any]], outputs: Any, at: Tensor) -> None:
    for row, client in enumerate(at.tolist()):
        predictions[client].append(
            apply_to_collection(outputs, Tensor, lambda leaf, row=row: leaf[row].cpu())
        )
