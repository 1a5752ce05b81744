"""Which engine runs a step of the user's module.

What was asked for, if a probe shows that it can.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.callback import ClientInfo
from lightning_pfl.data.clients import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.base import EngineSettings, Evaluation, LocalResult, OnClients
from lightning_pfl.engine.gradient import Transform
from lightning_pfl.engine.optimizer import check_optimizer, is_elementwise
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.snapshot import changed, restore, snapshot
from lightning_pfl.engine.vectorized import VectorizedEngine
from lightning_pfl.errors import ClientError
from lightning_pfl.layout import Layout
from lightning_pfl.methods.base import Method, Phase
from lightning_pfl.tree import Model, Tree, leaves, rows

EngineName = Literal["auto", "vectorized", "sequential"]
PROBED_CLIENTS = 2
PROBED_SAMPLES = 8
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference between the engines after one step, relative to a tensor's largest entry."""
MIXED_TOLERANCE = 0.1


def check_engine(engine: str) -> None:
    """Require a known engine name."""
    if engine not in get_args(EngineName):
        raise ValueError(
            f"Expected `engine` to be one of {', '.join(get_args(EngineName))}, but got "
            f"engine={engine!r}. Use 'auto' to run vectorized where the module allows it."
        )


class SelectedEngine:
    """Runs each step with the engine that fits it, decided once by a probe of a real step.

    The probe runs the sequential engine and the vectorized one (first ``vmap`` of the forward pass,
    then ``vmap`` of the gradient) on two clients for one step, and takes the first that raises
    nothing, needs no hidden loop and agrees with the sequential result. The choice depends on the
    module alone, never on timing, so that a resumed run makes it again.

    Args:
        name: ``"auto"``; ``"vectorized"``: an error if the module can't; ``"sequential"``.
        module: The user's module.
        layout: Its names.
        template: The optimizer that ``configure_optimizers`` returned.
        settings: The Trainer's flags.

    Attributes:
        choices: Per step (``"training_step"``, ...) what runs it and why.
    """

    def __init__(
        self,
        name: EngineName,
        module: Any,
        layout: Layout,
        template: Optimizer | None,
        settings: EngineSettings,
    ) -> None:
        check_engine(name)
        self.name, self.module, self.layout = name, module, layout
        self.settings = settings
        self.choices: dict[str, str] = {}
        self._engines: dict[str, SequentialEngine | VectorizedEngine] = {}
        # Evaluation needs no optimizer.
        self._sequential = SequentialEngine(module, layout, template, settings)  # type: ignore[arg-type]
        self.template = template

    @property
    def template(self) -> Optimizer | None:
        """The optimizer that clients get fresh copies of; None where nothing is trained."""
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
        """Optimizer steps that each client will take, int64 ``(clients,)``."""
        return self._sequential.count_steps(data, clients, phases)

    def train(
        self,
        method: Method,
        received: Tree,
        own: Tree,
        info: ClientInfo,
        data: FederatedDataset,
        phases: tuple[Phase, ...],
        on_clients: OnClients | None = None,
        stream: str = "local",
    ) -> LocalResult:
        """Local training of a cohort; see :class:`~lightning_pfl.engine.base.Engine`."""
        step = "training_step"
        if step not in self._engines and not int(info.steps.sum()):
            return self._sequential.train(
                method, received, own, info, data, phases, on_clients, stream
            )
        if step not in self._engines:
            some = torch.argsort(info.steps, descending=True, stable=True)[:PROBED_CLIENTS]
            on_device = some.to(self.settings.device)
            short = tuple(replace(phase, epochs=None, steps=1, lr=None) for phase in phases)
            few = replace(info.rows(some), steps=torch.full((len(some),), len(short)))
            args = (method, rows(received, on_device), rows(own, on_device), few, data, short)
            with self._plain_sgd():
                self._choose(step, lambda engine: _training_trees(engine.train(*args)))
        return self._engines[step].train(
            method, received, own, info, data, phases, on_clients, stream
        )

    def evaluate(
        self,
        models: Model,
        clients: Tensor,
        data: FederatedDataset,
        step: str,
        on_clients: OnClients | None = None,
    ) -> Evaluation:
        """Run a validation, test or prediction step for each client."""
        if step not in self._engines:
            some = torch.argsort(data.num_samples[clients], descending=True, stable=True)
            some = some[:PROBED_CLIENTS]
            few: FederatedDataset = data
            if isinstance(data, FederatedTensorDataset):
                few = data.take(PROBED_SAMPLES, seed=0)
            part = rows(models, some.to(self.settings.device))
            settings = replace(self.settings, limit_eval_batches=1)
            self._choose(
                step,
                lambda engine: _evaluation_trees(
                    _with(engine, settings).evaluate(part, clients[some], few, step), part
                ),
            )
        return self._engines[step].evaluate(models, clients, data, step, on_clients)

    # --- the probe ---

    def _choose(
        self, step: str, run: Callable[[SequentialEngine | VectorizedEngine], Tree]
    ) -> None:
        if self.name == "sequential":
            self._settle(step, self._sequential, "as asked")
            return
        reasons = []
        if step == "training_step" and not is_elementwise(self._template()):
            reasons.append(f"{type(self._template()).__name__} is not known to be elementwise")
        else:
            with self._undisturbed():
                expected = run(self._sequential)
            if getattr(self._sequential, "draws_elsewhere", False):
                reasons.append("the step draws from Python's or NumPy's random generator")
            stochastic = self._sequential.random_calls > 0
            transforms: tuple[Transform, ...] = ("forward", "grad")
            for transform in transforms if not reasons else ():
                engine = self._vectorized(transform, stochastic)
                reason = self._problem(engine, run, expected)
                if reason is None:
                    self._settle(step, engine, f"vmap over the {_WHAT[transform]}")
                    return
                reasons.append(f"vmap over the {_WHAT[transform]}: {reason}")
        why = "; ".join(dict.fromkeys(reasons))
        if self.name == "vectorized":
            raise ValueError(
                f"Expected `{step}` of {type(self.module).__name__} to run for many clients at "
                f"once, as engine='vectorized' says, but it can't: {why}. Use engine='auto' or "
                "engine='sequential'."
            )
        self._settle(step, self._sequential, why)

    def _problem(
        self, engine: VectorizedEngine, run: Callable[..., Tree], expected: Tree
    ) -> str | None:
        """Why the vectorized engine can't be used; None if it can."""
        try:
            with self._undisturbed(), _hidden_loops_are_errors():
                before = snapshot(self.module)
                found = run(engine)
                if (stored := changed(self.module, before)) is not None:
                    # It would keep dead tensors, or one value where each client has one.
                    return f"the step changes `{stored}`, which all clients share"
        # Whatever a user's module does under vmap: the reason is reported, and the sequential
        # engine tells true errors.
        except Exception as error:
            cause = error.__cause__ if isinstance(error, ClientError) else error
            return _summary(cause if isinstance(cause, Exception) else error)
        return _difference(expected, found, mixed=self.settings.autocast is not None)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """A probe must leave no trace in the user's modules and torchmetrics objects."""
        before = snapshot(self.module)
        try:
            yield
        finally:
            restore(self.module, before)

    @contextmanager
    def _plain_sgd(self) -> Iterator[None]:
        """Step along the bare gradient.

        Adam's first step is its sign, which magnifies rounding without bound.
        """
        probe = torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], lr=1.0)
        self._sequential.template = probe
        try:
            yield
        finally:
            self._sequential.template = self._template()
            for engine in self._engines.values():
                engine.template = self._template()

    def _vectorized(self, transform: Transform, stochastic: bool) -> VectorizedEngine:
        # What the probe didn't train, as in a head phase, a later phase may reach.
        unreached = self._sequential.asked - self._sequential.reached
        return VectorizedEngine(
            self.module,
            self.layout,
            self._sequential.template,
            self.settings,
            transform,
            stochastic,
            frozenset(self.layout.trainable) - unreached,
        )

    def _template(self) -> Optimizer:
        assert self.template is not None
        return self.template

    def _settle(self, step: str, engine: SequentialEngine | VectorizedEngine, why: str) -> None:
        self._engines[step] = engine
        self.choices[step] = f"{engine.name} ({why})"
        rank_zero_info(f"{step} runs {engine.name}: {why}.")


_WHAT = {"forward": "forward pass", "grad": "gradient"}


def _with(
    engine: SequentialEngine | VectorizedEngine, settings: EngineSettings
) -> SequentialEngine | VectorizedEngine:
    changed = copy.copy(engine)
    changed.settings = settings
    return changed


def _summary(error: Exception) -> str:
    """The first sentence of an error; torch's advice to file an issue helps nobody here."""
    rule = re.search(
        r"batching rule (?:for|not implemented for) (\S+?)[.;]? ", f"{error} ", re.IGNORECASE
    )
    if rule:
        return f"{rule.group(1)} has no batching rule"
    lines = str(error).strip().splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__


def _training_trees(result: LocalResult) -> Tree:
    return {
        "uploads": result.uploads,
        "own": result.own,
        "logs": result.logs,
        "loss": result.loss,
    }


def _evaluation_trees(evaluation: Evaluation, models: Model) -> Tree:
    """The values, with the models for the precision that they can have."""
    return {"values": evaluation.values, "counts": evaluation.counts, "models": models}


@contextmanager
def _hidden_loops_are_errors() -> Iterator[None]:
    """An operator without batching rule runs in a slow loop inside ``vmap``; torch warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*batching rule.*")
        yield


def _difference(expected: Tree, found: Tree, mixed: bool) -> str | None:
    """Say where two results differ by more than rounding; None if they agree."""
    names, others = list(leaves(expected)), list(leaves(found))
    if len(names) != len(others):
        return "it logs other values than the sequential engine"
    # Logged values are float64 averages of values that are as coarse as the model.
    coarsest = max(
        (TOLERANCE.get(leaf.dtype, 1e-2) for leaf in names if leaf.is_floating_point()), default=0
    )
    tolerance = MIXED_TOLERANCE if mixed else coarsest
    for want, got in zip(names, others, strict=True):
        if want.shape != got.shape:
            return "it gives other shapes than the sequential engine"
        if not want.is_floating_point() or not want.numel():
            continue
        scale = want.nan_to_num().abs().max().clamp_min(1e-6)
        if ((want - got).abs() > tolerance * scale).any() or (want.isnan() != got.isnan()).any():
            return "its result differs from the sequential engine's by more than rounding"
    return None
