"""The fast engine: the clients of a chunk as one batched program.

Where it gains, besides the batching itself: ``engine/feature_cache.py`` computes features of a
frozen, shared backbone once per phase; ``evaluation.py`` gives shared layers all clients' samples
as one batch; ``engine/whole_steps.py`` replays steps of known code, and ``engine/trace.py``
gradients where the rest of a step can't be recorded; ``kernels.py`` has faster convolutions and
pooling for CPUs. Listeners are called when a chunk is done: ``chunk_size`` clients, or else at most
128 on a CPU and 512 on a GPU, so progress bars move by chunks.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LocalResult, OnClients
from lightning_pfl.core.kept_memory import KeptMemory
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.randomness import derive
from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import Stacked, total_nbytes
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.base import EngineSettings, EvaluationWork, LocalWork
from lightning_pfl.engine.cost import Load
from lightning_pfl.engine.optimizer import counters
from lightning_pfl.engine.safety.guard import guarded
from lightning_pfl.engine.steps import phase_steps
from lightning_pfl.engine.vectorized.chunk import Chunk
from lightning_pfl.engine.vectorized.evaluation import VectorizedEvaluation
from lightning_pfl.engine.vectorized.gradient import Transform
from lightning_pfl.engine.vectorized.one_model import OneModelEvaluation, is_of_one_model
from lightning_pfl.engine.vectorized.shared import Shared
from lightning_pfl.engine.whole_steps import recorded_settings
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


class VectorizedEngine(Shared):
    """Runs a chunk of clients as one program.

    It uses ``vmap`` over the user's step, one backward pass and one optimizer step.

    Args:
        module: The user's module.
        parameter_split: Names of the module.
        settings: The Trainer's flags.
        transform: As of :class:`~lightning_pfl.engine.vectorized.shared.Shared`.

    Attributes:
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
    ) -> None:
        super().__init__(module, parameter_split, settings, transform)
        self._memory = KeptMemory()
        self.quiet: dict[str, bool] = {}
        self._of_one_model = OneModelEvaluation(module, settings)
        self._evaluation = VectorizedEvaluation(module, settings, transform, self.quiet)
        self.chunk_size: int | None = None

    def _fitting(self) -> int:
        """Compute the clients per chunk: those that fit the memory, and a CPU's caches."""
        if self.settings.device.type == "cuda":
            return min(MOST_ON_GPU, self.most())
        model = max(1, self.model_nbytes())
        fast = max(FEW_ON_CPU, min(MOST_ON_CPU, CACHED // model)) if model < LARGE else OF_LARGE
        return min(fast, self.most())

    def at_once(self, clients: int) -> int:
        """Count the clients of a chunk; they are of about equal sizes if `chunk_size` is None."""
        size = self.settings.chunk_size or self.chunk_size
        if size is None:
            parts = -(-clients // self._fitting())
            size = -(-clients // max(1, parts))
        return max(1, size)

    def _cut(self, clients: Tensor) -> tuple[Tensor, ...]:
        """Cut clients into chunks."""
        return torch.split(clients, self.at_once(len(clients)))

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
        self.look()
        self._memory.begin_round()
        if self.graphs is not None:
            self.graphs.begin_round()
        # Longest first, so that the clients still active at a step are the first rows of a chunk.
        order = torch.argsort(work.info.steps, descending=True, stable=True)
        results = []
        uploads, client_state = (Stacked(len(order), self._memory) for _ in range(2))
        parts = [order] if work.kept is None else self._alike(work, order)
        for positions in [some for part in parts for some in self._cut(part)]:
            key = derive(self.settings.seed, "guard", work.info.round)
            known = self.checks.tensors if self._runs_known_code(work) else None
            with guarded(self.module, key, known):
                found = Chunk(self, work.rows(positions)).run()
            # Copies, as the next chunk's steps change what they are in.
            at = send(positions, self.settings.device)
            uploads.put(at, found.uploads)
            client_state.put(at, found.client_state)
            results.append(replace(found, uploads={}, client_state={}))
            if on_clients is not None:
                ran = on_clients(positions.tolist(), partial(getattr, found, "loss"))
                if ran is not False:
                    self.checks.look_after_hooks(self.traces, self.whole)
                    self.look()
        order = torch.cat(parts) if len(order) else order
        position = send(torch.argsort(order), self.settings.device)
        return _in_order(results, uploads, client_state, position)

    def _runs_known_code(self, work: LocalWork) -> bool:
        """Whether nothing of a user's runs in training but steps whose code is known."""
        functions = (
            getattr(data, name, None)
            for data in (work.data, work.validation)
            for name in ("augment", "transform")
        )
        alone = self.settings.batch_hooks is None and work.public is None
        return self.checks.known and alone and not any(functions)

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
        return self._evaluation.run(work, on_clients)

    def groups(self, work: EvaluationWork) -> Tensor:
        """Number the program that evaluates each client, int64 ``(clients,)``."""
        return self._evaluation.groups(work)

    def load(self, work: EvaluationWork) -> Load:
        """Count what an evaluation consists of, for clients of all sizes in the data."""
        return self._evaluation.load(work)

    def together(self, work: LocalWork | EvaluationWork) -> int:
        """Count the clients of the largest program for this work."""
        if isinstance(work, EvaluationWork):
            return int(self.groups(work).bincount(minlength=1).max())
        return len(self._cut(work.info.index)[0])


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
