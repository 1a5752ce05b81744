"""The choice of the engine for each step of the user's module, by a probe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.records import ClientInfo, Evaluation, LocalResult, OnClients
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import Model, Tree, rows
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.optimizer import check_optimizer, why_not_elementwise
from lightning_pfl.engine.safety.compare import (
    difference,
    evaluation_trees,
    hidden_loops_are_errors,
    is_out_of_memory,
    reason_of,
    together,
    training_trees,
)
from lightning_pfl.engine.safety.guard import DRAWS_ELSEWHERE, weights_unwritten
from lightning_pfl.engine.safety.snapshot import restore, snapshot
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.engine.vectorized.gradient import Transform
from lightning_pfl.methods.base import Method, Phase

EngineName = Literal["auto", "vectorized", "sequential"]
Result = TypeVar("Result")
PROBED_CLIENTS = 2
PROBED_SAMPLES = 8


def check_engine(engine: str) -> None:
    """Raise ValueError for an unknown engine name."""
    if engine not in get_args(EngineName):
        raise ValueError(
            f"Expected `engine` to be one of {', '.join(get_args(EngineName))}, but got "
            f"engine={engine!r}. Use 'auto' to run vectorized where possible."
        )


class SelectedEngine:
    """Runs each step with the engine that a probe of a real step has chosen.

    The probe runs one step of two clients with the sequential engine and with the vectorized one
    (first ``vmap`` of the forward pass, then of the gradient), and takes the first that raises
    nothing, has no hidden loop and agrees with the sequential result. The choice depends on the
    module alone, never on timing, so that a resumed run repeats it.

    With ``"auto"``, clients for which the vectorized engine fails later run in the sequential one,
    in this call only, so that a round's result depends on the round alone.

    Args:
        name: ``"auto"``, ``"vectorized"`` (an error if impossible) or ``"sequential"``.
        module: The user's module.
        parameter_split: Names of the module.
        template: The optimizer that ``configure_optimizers`` returned.
        settings: The Trainer's flags.

    Attributes:
        choices: Engine and reason per step (``"training_step"``, ...).
    """

    def __init__(
        self,
        name: EngineName,
        module: Any,
        parameter_split: ParameterSplit,
        template: Optimizer | None,
        settings: EngineSettings,
    ) -> None:
        check_engine(name)
        self.name, self.module, self.parameter_split = name, module, parameter_split
        self.settings = settings
        self.choices: dict[str, str] = {}
        self._engines: dict[str, SequentialEngine | VectorizedEngine] = {}
        self._checked: set[str] = set()
        self._said: set[str] = set()
        # Evaluation needs no optimizer.
        self._sequential = SequentialEngine(module, parameter_split, template, settings)  # type: ignore[arg-type]
        self.template = template

    @property
    def template(self) -> Optimizer | None:
        """The optimizer that clients get fresh copies of; None without training."""
        return self._optimizer

    @template.setter
    def template(self, template: Optimizer | None) -> None:
        if template is not None:
            check_optimizer(template)
        self._optimizer = template
        for engine in (self._sequential, *self._engines.values()):
            engine.template = template  # type: ignore[assignment]

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Count the optimizer steps of each client, int64 ``(clients,)``."""
        return self._sequential.count_steps(data, clients, phases)

    def train(
        self,
        method: Method,
        received: Tree,
        client_state: Tree,
        info: ClientInfo,
        data: FederatedDataset,
        phases: tuple[Phase, ...],
        on_clients: OnClients | None = None,
        stream: str = "local",
    ) -> LocalResult:
        """Train a cohort locally; see :class:`~lightning_pfl.engine.base.Engine`."""
        step = "training_step"
        if step not in self._engines and not int(info.steps.sum()):
            return self._sequential.train(
                method, received, client_state, info, data, phases, on_clients, stream
            )
        if step not in self._engines:
            some = torch.argsort(info.steps, descending=True, stable=True)[:PROBED_CLIENTS]
            some = together(data, info.index, some)
            on_device = some.to(self.settings.device)
            short = tuple(replace(phase, epochs=None, steps=1, lr=None) for phase in phases)
            few = replace(info.rows(some), steps=torch.full((len(some),), len(short)))
            args = (
                method,
                rows(received, on_device),
                rows(client_state, on_device),
                few,
                data,
                short,
            )
            before = {"uploads": args[1], "own": args[2]}
            with self._plain_sgd():
                self._choose(
                    step, lambda engine: training_trees(engine.train(*args)), before, args[1]
                )
        listener = _Listener(on_clients)
        all_of_it = (method, received, client_state, info, data, phases, listener, stream)
        return self._run(step, lambda engine: engine.train(*all_of_it), listener, received)

    def evaluate(
        self,
        models: Model,
        clients: Tensor,
        data: FederatedDataset,
        step: str,
        on_clients: OnClients | None = None,
        round: int | None = None,
    ) -> Evaluation:
        """Run a validation, test or prediction step for each client."""
        if step not in self._engines:
            some = torch.argsort(data.num_samples[clients], descending=True, stable=True)
            few: FederatedDataset = data
            if isinstance(data, FederatedTensorDataset):
                few = data.take(PROBED_SAMPLES, seed=0)
            some = together(few, clients, some[:PROBED_CLIENTS])
            part = rows(models, some.to(self.settings.device))
            settings = replace(self.settings, limit_eval_batches=1)
            self._choose(
                step,
                lambda engine: evaluation_trees(
                    _with(engine, settings).evaluate(part, clients[some], few, step, None, round),
                    part,
                ),
                {},
                part,
            )
        listener = _Listener(on_clients)
        all_of_it = (models, clients, data, step, listener, round)
        return self._run(step, lambda engine: engine.evaluate(*all_of_it), listener, models)

    def _run(
        self,
        step: str,
        run: Callable[[SequentialEngine | VectorizedEngine], Result],
        listener: _Listener,
        trees: Tree,
    ) -> Result:
        """Run the chosen engine, or the sequential one where the vectorized one fails."""
        engine = self._engines[step]
        if engine is not self._sequential:
            try:
                return run(engine)
            # Any exception of a user's module under vmap; true errors recur in the other engine.
            except Exception as error:
                if self.name == "vectorized" or listener.failed or is_out_of_memory(error):
                    raise
                why = f"{step} runs sequential here: {reason_of(error)}."
            if why not in self._said:
                self._said.add(why)
                rank_zero_info(why)
        with self._checking(step, trees):
            return run(self._sequential)

    def _checking(self, step: str, trees: Tree) -> AbstractContextManager[None]:
        """Check, the first time, whether a step writes to tensors that clients share."""
        if step in self._checked:
            return nullcontext()
        self._checked.add(step)
        return weights_unwritten(self.module, rows(trees, slice(0, 1)), step)

    # --- the probe ---

    def _choose(
        self,
        step: str,
        run: Callable[[SequentialEngine | VectorizedEngine], Tree],
        before: Tree,
        trees: Tree,
    ) -> None:
        if self.name == "sequential":
            self._settle(step, self._sequential, "as asked")
            return
        reasons = []
        why_not = why_not_elementwise(self._template()) if step == "training_step" else None
        if why_not is not None:
            reasons.append(why_not)
        else:
            with self._undisturbed(), self._checking(step, trees):
                expected = run(self._sequential)
            if getattr(self._sequential, "draws_elsewhere", False):
                reasons.append(DRAWS_ELSEWHERE)
            stochastic = self._sequential.random_calls > 0
            transforms: tuple[Transform, ...] = ("forward", "grad")
            for transform in transforms if not reasons else ():
                engine = self._vectorized(transform, stochastic)
                reason = self._problem(engine, run, expected, before)
                if reason is None:
                    self._settle(step, engine, f"vmap over the {_WHAT[transform]}")
                    return
                reasons.append(f"vmap over the {_WHAT[transform]}: {reason}")
        why = "; ".join(dict.fromkeys(reasons))
        if self.name == "vectorized":
            raise ValueError(
                f"Expected `{step}` of {type(self.module).__name__} to run for many clients at "
                f"once with engine='vectorized', but it can't: {why}. Use engine='auto' or "
                "engine='sequential'."
            )
        self._settle(step, self._sequential, why)

    def _problem(
        self, engine: VectorizedEngine, run: Callable[..., Tree], expected: Tree, before: Tree
    ) -> str | None:
        """Describe why the vectorized engine can't be used, or return None."""
        try:
            with self._undisturbed(), hidden_loops_are_errors():
                found = run(engine)
        # Any exception of a user's module under vmap; true errors recur in the other engine.
        except Exception as error:
            return reason_of(error)
        return difference(expected, found, before, mixed=self.settings.autocast is not None)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Restore the user's modules and torchmetrics objects after a probe."""
        before = snapshot(self.module)
        try:
            yield
        finally:
            restore(self.module, before)

    @contextmanager
    def _plain_sgd(self) -> Iterator[None]:
        """Step by plain SGD: Adam's first step, a sign, magnifies rounding without bound."""
        probe = torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], lr=1.0)
        self._sequential.template = probe
        try:
            yield
        finally:
            self._sequential.template = self._template()
            for engine in self._engines.values():
                engine.template = self._template()

    def _vectorized(self, transform: Transform, stochastic: bool) -> VectorizedEngine:
        return VectorizedEngine(
            self.module,
            self.parameter_split,
            self._sequential.template,
            self.settings,
            transform,
            stochastic,
        )

    def _template(self) -> Optimizer:
        assert self.template is not None
        return self.template

    def _settle(self, step: str, engine: SequentialEngine | VectorizedEngine, why: str) -> None:
        self._engines[step] = engine
        self.choices[step] = f"{engine.name} ({why})"
        rank_zero_info(f"{step} runs {engine.name}: {why}.")


_WHAT = {"forward": "forward pass", "grad": "gradient"}


class _Listener:
    """Passes on which clients are done, and records whether that failed.

    Then the error is a callback's, not the step's.
    """

    def __init__(self, on_clients: OnClients | None) -> None:
        self.on_clients = on_clients
        self.failed = False

    def __call__(self, positions: list[int]) -> None:
        if self.on_clients is None:
            return
        self.failed = True
        self.on_clients(positions)
        self.failed = False


def _with(
    engine: SequentialEngine | VectorizedEngine, settings: EngineSettings
) -> SequentialEngine | VectorizedEngine:
    changed = copy.copy(engine)
    changed.settings = settings
    return changed
