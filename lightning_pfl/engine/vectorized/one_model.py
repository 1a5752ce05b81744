"""Evaluation of one model on the samples of many clients, in minibatches of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LogOptions, OnClients
from lightning_pfl.core.errors import naming_clients
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.transfer import send
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.active_phase import is_unmodified, writable
from lightning_pfl.engine.apart import evaluates_apart
from lightning_pfl.engine.base import EngineSettings, EvaluationWork
from lightning_pfl.engine.checks import Checks
from lightning_pfl.engine.large_operators import LargeOperators
from lightning_pfl.engine.program import ClientProgram, NotVectorizableError
from lightning_pfl.engine.safety.global_rng import Elsewhere, watch_global_rng
from lightning_pfl.engine.safety.guard import guarded
from lightning_pfl.engine.steps import Limits, epoch_minibatches, samples_of_one_model
from lightning_pfl.engine.trace import Given, Traces
from lightning_pfl.engine.vectorized.evaluation import (
    ONE_BY_ONE,
    STAGES,
    evaluates_per_sample,
)
from lightning_pfl.models.base import nan_with_the_loss

ON_GPU = 48
"""How many times as many samples a GPU gets."""


def is_of_one_model(module: Any, settings: EngineSettings, work: EvaluationWork) -> bool:
    """Whether an evaluation is of one model on samples that may share minibatches."""
    return (
        evaluates_per_sample(module, work.step)
        and isinstance(work.data, FederatedTensorDataset)
        and settings.batch_hooks is None
        # Asked first, so that a probe that counts operations finds it answered.
        and evaluates_apart(module, settings, work.data, work.round)
        and work.is_of_one_model
    )


class OneModelEvaluation:
    """Runs the evaluation of a model that all clients have, where a step is a mean over samples.

    There is no client axis, so that all layers see large minibatches, which may have samples of
    several clients.

    Args:
        module: The user's module.
        settings: The Trainer's flags.
    """

    def __init__(self, module: Any, settings: EngineSettings) -> None:
        self.module, self.settings = module, settings
        self._checks: dict[str, Checks] = {}
        self._traces = Traces(enabled=is_unmodified(module))
        self._known: dict[str, ClientProgram] = {}

    def run(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Evaluate clients; see :class:`~lightning_pfl.engine.base.Engine`.

        Raises:
            NotVectorizableError: If the step draws random numbers.
        """
        data, clients, stage = work.data, work.clients, STAGES[work.step]
        assert isinstance(data, FederatedTensorDataset)
        checks = self._checks.setdefault(work.step, Checks(self.module, work.step))
        self._traces.begin_round(checks.due(), at_once=checks.known)
        program = self._program(work.step)
        self._traces.enter((program, checks.settings()))
        model = Given({name: leaf[0] for name, leaf in work.models.items()})
        counts = _counts(data, clients, work.limit)
        ends, found = counts.cumsum(0), list[dict[str, Tensor]]()
        begin = done = 0
        with (
            self._watched(work.step, checks.known) as elsewhere,
            torch.no_grad(),
            program.capturing(),
        ):
            for positions in self._minibatches(data, clients, counts):
                end = begin + len(positions)
                last = int(torch.searchsorted(ends, end, right=True))
                with naming_clients(
                    work.step, data.names, clients[done : last + 1], work.round, ONE_BY_ONE
                ):
                    samples = data.gather(positions)
                    values = self._traces.run(program.per_sample, model, samples)
                found.append({name: value.view(len(positions)) for name, value in values.items()})
                if on_clients is not None and on_clients([*range(done, last)]) is not False:
                    checks.look_after_hooks(self._traces)
                    self._traces.enter((program, checks.settings()))
                begin, done = end, last
        if elsewhere.moved_torch:
            raise NotVectorizableError("the step draws random numbers")
        if on_clients is not None and done < len(clients):  # the last of them without samples
            on_clients([*range(done, len(clients))])
        means = {
            name: _means(torch.cat([one[name] for one in found]), counts)
            for name in (found[0] if found else ())
        }
        means = nan_with_the_loss(means, means["loss"]) if means else {}
        values = {f"{stage}_{name}": mean for name, mean in means.items()}
        options = {key: LogOptions(key in self.module.shown) for key in values}
        return Evaluation(values, counts, options)

    def _program(self, step: str) -> ClientProgram:
        """Return the user's function, the same for steps that are replayed."""
        known = self._known.get(step)
        if known is None or not self._traces.enabled:
            modes = partial(self._kernels, step)
            known = self._known[step] = ClientProgram(self.module, self.settings, kernels=modes)
        known.throwaway = writable(self.module)
        return known

    def _kernels(self, step: str) -> LargeOperators:
        return LargeOperators(self._checks[step].placeless)

    def _watched(self, step: str, known: bool) -> AbstractContextManager[Elsewhere]:
        """Watch what a step may leave behind: of known ones that hold no tensors only draws."""
        if known and not self._checks[step].tensors:
            return watch_global_rng(None, torch_alone=True)
        return guarded(self.module, derive(self.settings.seed, "guard", step))

    def _minibatches(
        self, data: FederatedTensorDataset, clients: Tensor, counts: Tensor
    ) -> Iterator[Tensor]:
        """Iterate over positions in the pool, of the first samples of all clients."""
        padded = data.positions_of(clients)
        real = torch.arange(padded.shape[1]) < counts.unsqueeze(1)
        size = samples_of_one_model(data) * (ON_GPU if self.settings.device.type != "cpu" else 1)
        at = send(real.flatten().nonzero().flatten(), data.device)
        positions = padded.flatten().index_select(0, at)
        yield from torch.split(positions, size) if len(positions) else ()


def _counts(data: FederatedTensorDataset, clients: Tensor, limit: float | int) -> Tensor:
    """Count the samples of each client in its minibatches, int64 ``(clients,)``."""
    limits, size = Limits(1, limit), data.batch_size
    samples, which = data.num_samples[clients].unique(return_inverse=True)
    found = [
        min(count, size * limits.of_epoch(epoch_minibatches(count, size, data.drop_last)))
        for count in samples.tolist()
    ]
    return torch.tensor(found, dtype=torch.int64)[which]


def _means(values: Tensor, counts: Tensor) -> Tensor:
    """Average the values of each client's samples, float64 ``(clients,)``; NaN without samples."""
    lengths = send(counts, values.device)
    return torch.segment_reduce(values.double(), "sum", lengths=lengths) / lengths
