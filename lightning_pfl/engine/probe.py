"""A short piece of a run's work, which both engines do: whether they agree, and which is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_pfl.core.tree import Tree
from lightning_pfl.data.datasets import DropLast, FederatedTensorDataset
from lightning_pfl.engine.active_phase import ActivePhase
from lightning_pfl.engine.base import EvaluationWork, LocalWork
from lightning_pfl.engine.cost import Gradient, Share, batching_pays, evaluating_pays
from lightning_pfl.engine.operators import ONEDNN_PRODUCT, OperatorMode, prefers_onednn
from lightning_pfl.engine.program import batchable_kernels
from lightning_pfl.engine.safety.compare import (
    OTHER_NUMBERS,
    difference,
    evaluation_trees,
    hidden_loops_are_errors,
    is_alike,
    reason_of,
    together,
    training_trees,
)
from lightning_pfl.engine.safety.double import in_double
from lightning_pfl.engine.safety.loggers import Refusing, Silent, loggers_replaced
from lightning_pfl.engine.safety.snapshot import restore, snapshot
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.steps import clients_served, phase_budget
from lightning_pfl.engine.timing import (
    CACHED,
    chunk_sizes,
    clock,
    time_evaluation,
    time_training,
)
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.engine.vectorized.gradient import Transform
from lightning_pfl.engine.vectorized.one_model import is_of_one_model
from lightning_pfl.methods.base import Phase

PROBED_CLIENTS = 2
PROBED_SAMPLES = 8
CONVOLUTION = torch.ops.aten.convolution
RECURRENT = torch.ops.aten.mkldnn_rnn_layer
RECURRENT_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward
PER_CLIENT_PRODUCTS = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class OperationCounter(OperatorMode):
    """Counts floating-point operations by torch's formulas.

    torch's own counter does more, and takes five times as long as most operators of a small step.

    Attributes:
        counts: The operations of each operator, without its overloads.
        convolutions: The number of convolutions, without their gradients.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.convolutions = Counter[Any](), 0
        self._formulas: dict[Any, Callable[..., int]] = {**flop_registry, **_FORMULAS}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, packet = kwargs or {}, getattr(func, "overloadpacket", None)
        formula = self._formulas.get(packet)
        # In inference mode operators come here that consist of others.
        if formula is None and packet is not None and func not in _WHOLE:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
            _WHOLE.add(func)
        found = func(*args, **kwargs)
        if formula is not None:
            self.convolutions += packet is CONVOLUTION
            self.counts[packet] += int(formula(*args, **kwargs, out_val=found))
        return found

    @property
    def operations(self) -> int:
        """All operations."""
        return self.counts.total()

    @property
    def recurrent(self) -> int:
        """Those in recurrent layers."""
        return self.counts[RECURRENT] + self.counts[RECURRENT_BACKWARD]

    @property
    def shared(self) -> float:
        """The fraction of the operations that isn't in products of each client's own weights."""
        own = sum(self.counts[packet] for packet in PER_CLIENT_PRODUCTS)
        return (self.operations - own) / self.operations if self.operations else 0.0


_WHOLE = set[Any]()
"""Operators that are known to consist of no others."""


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Count the operations of ``(rows, inner)`` times ``(columns, inner)``."""
    return 2 * a.numel() * len(b)


def _recurrent(words: Tensor, inner: Tensor, own: Tensor, *_: Any, **__: Any) -> int:
    """Count the products of words ``(steps, samples, inputs)`` and of states in an LSTM's layer."""
    return 2 * words.shape[0] * words.shape[1] * (inner.numel() + own.numel())


def _recurrent_backward(*tensors: Any, **_: Any) -> int:
    """Count those of its backward pass: by the weights, and by the words and the states."""
    return 2 * _recurrent(*tensors)


_FORMULAS: dict[Any, Callable[..., int]] = {
    RECURRENT: _recurrent,
    RECURRENT_BACKWARD: _recurrent_backward,
    **({ONEDNN_PRODUCT: _product} if ONEDNN_PRODUCT is not None else {}),
}
"""Formulas that torch hasn't."""


class CallCounter(OperatorMode):
    """Counts the operators that are called, but for views, which recordings make once.

    Attributes:
        number: Their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Problem:
    """Why the vectorized engine can't run a piece of work.

    Attributes:
        reason: In words.
        rounding: Whether its results may be others by rounding alone; values of an evaluation
            always.
        raised: Whether it has none, but an error.
    """

    reason: str
    rounding: bool = False
    raised: bool = False


class Estimate(NamedTuple):
    """An estimate of which engine is faster.

    Attributes:
        operations: Floating-point operations of a client's gradient, or evaluated minibatch.
        pays: Whether clients run faster together.
    """

    operations: float
    pays: bool


class Probe:
    """Compares the vectorized engine with the sequential one, on short pieces of work.

    Args:
        sequential: The sequential engine.
    """

    def __init__(self, sequential: SequentialEngine) -> None:
        self.sequential = sequential
        self.module, self.settings = sequential.module, sequential.settings

    def alone(
        self, record: bool, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> SequentialEngine:
        """Make another sequential engine.

        Args:
            record: Whether it may record steps.
            around: Makes what is around each step that isn't replayed.
        """
        split, loop = self.sequential.parameter_split, None
        return SequentialEngine(self.module, split, self.settings, loop, record, around)

    def at_once(self, transform: Transform) -> VectorizedEngine:
        """Make a vectorized engine.

        Args:
            transform: What runs under ``vmap``.
        """
        split = self.sequential.parameter_split
        return VectorizedEngine(self.module, split, self.settings, transform)

    def piece(self, work: LocalWork | EvaluationWork) -> LocalWork | EvaluationWork:
        """Cut work to what both engines do: one step of a few clients."""
        if isinstance(work, EvaluationWork):
            return _first_minibatch(work)
        return _first_step(work, self.module)

    def problem(
        self,
        engine: VectorizedEngine,
        piece: LocalWork | EvaluationWork,
        expected: Tree,
        counter: AbstractContextManager[Any],
        doubted: bool,
    ) -> Problem | None:
        """Describe why the vectorized engine can't be used, or return None.

        Args:
            engine: The vectorized engine.
            piece: As of :meth:`piece`.
            expected: The results of the sequential engine.
            counter: Counts the operations that it runs, or does nothing.
            doubted: Whether a result that rounding may explain is tried in double precision.
        """
        try:
            with self.undisturbed(Refusing), hidden_loops_are_errors(), counter:
                found = results(engine, piece)
        # Any exception of a user's module under vmap; true errors recur in the other engine.
        except Exception as error:
            return Problem(reason_of(error), raised=True)
        before: Tree = (
            {"uploads": piece.received, "own": piece.client_state}
            if isinstance(piece, LocalWork)
            else {}
        )
        why = difference(expected, found, before, mixed=self.settings.autocast is not None)
        if why is None:
            return None
        rounding = OTHER_NUMBERS in why and is_alike(expected, found, before)
        if rounding and isinstance(piece, LocalWork) and doubted:
            return None if self._agrees_in_double(engine, piece) else Problem(why, rounding)
        return Problem(why, rounding)

    def _agrees_in_double(self, engine: VectorizedEngine, piece: LocalWork) -> bool:
        """Whether a step is the same in double precision, as far as that can be tried."""
        settings, double = self.settings, in_double(piece)
        if double is None or settings.autocast is not None or settings.default_dtype is not None:
            return False
        one_by_one = self.alone(record=False)
        at_once = self.at_once(engine.transform)
        try:
            with self.undisturbed():
                expected, found = (results(each, double) for each in (one_by_one, at_once))
        # A module may have tensors that are neither parameters nor buffers.
        except Exception:
            return False
        before = {"uploads": double.received, "own": double.client_state}
        return difference(expected, found, before, mixed=False) is None

    @contextmanager
    def undisturbed(self, logger: type[Silent] = Silent) -> Iterator[None]:
        """Restore the user's modules and torchmetrics objects after a piece.

        Args:
            logger: What takes the place of the Trainer's loggers.
        """
        before = snapshot(self.module)
        try:
            with loggers_replaced(self.module, logger):
                yield
        finally:
            restore(self.module, before)

    def training_estimate(self, work: LocalWork, piece: LocalWork | EvaluationWork) -> Estimate:
        """Estimate whether clients train faster together than one after another, on a CPU.

        Operations are counted in steps of one client, as those of many cost seconds for networks
        that are too large for them.

        Args:
            work: What is to be run.
            piece: As of :meth:`piece`.
        """
        assert isinstance(piece, LocalWork)
        counter, calls = OperationCounter(), CallCounter()
        alone = self.alone(record=True, around=lambda: calls)
        # Attention as products, which are counted.
        with batchable_kernels("forward"), counter:
            alone.train(piece.rows(slice(0, 1)))
        number = max(alone.gradients, 1)
        gradient = Gradient(
            counter.operations / number,
            calls.number / number,
            counter.convolutions / number,
            counter.recurrent / number,
            sum(parameter.numel() for parameter in self.module.parameters()),
        )
        shares = self._shares(work, self.at_once("forward"), alone.keeps_features)
        threads, by_onednn = torch.get_num_threads(), prefers_onednn()
        pays = batching_pays(gradient, shares, alone.replays(work), threads, by_onednn)
        return Estimate(gradient.operations, pays)

    def evaluation_estimate(
        self,
        work: LocalWork | EvaluationWork,
        piece: LocalWork | EvaluationWork,
        engine: VectorizedEngine,
        counter: OperationCounter,
    ) -> Estimate:
        """Estimate whether clients are evaluated faster together, on a CPU.

        Args:
            work: What is to be run.
            piece: As of :meth:`piece`.
            engine: The vectorized engine.
            counter: The operations that it has run for the piece.
        """
        assert isinstance(work, EvaluationWork)
        assert isinstance(piece, EvaluationWork)
        operations = counter.operations / len(piece.clients)
        if isinstance(work.data, FederatedTensorDataset):
            operations *= max(1.0, _full_minibatch(work) / PROBED_SAMPLES)
        if is_of_one_model(self.module, self.settings, work):  # large minibatches of all clients
            return Estimate(operations, True)
        load = engine.load(work)
        replayed = self.sequential.may_replay(work.step)
        each = operations / _full_minibatch(work)
        # Under a gradient all layers have a client axis.
        shared = counter.shared if engine.transform == "forward" else 0.0
        copied = replayed and self.sequential.calls_metrics(work.step)
        pays = evaluating_pays(each, load, replayed, counter.convolutions, shared, copied)
        return Estimate(operations, pays)

    def _shares(self, work: LocalWork, engine: VectorizedEngine, too: bool) -> list[Share]:
        """Count the gradients of each phase; a cohort's first client stands for all.

        Args:
            work: What is to be run.
            engine: The vectorized engine.
            too: Whether one client after another may keep features, too.
        """
        first, index = work.data.names[int(work.info.index[0])], work.info.index[:1]
        shares = []
        for phase in work.phases:
            gradients = int(engine.count_steps(work.data, index, (phase,)))
            passes = phase_budget(phase).of(first).passes
            active = ActivePhase(phase, self.sequential.parameter_split)
            cached = passes > 1 and engine.prefix.expects(active, work.data)
            with active.modes():
                served, grouped = _clients_served(work, phase, engine)
            kept = cached, passes if cached else 1, cached and too
            shares.append(Share(gradients, served, grouped, *kept))
        return shares

    def seconds(
        self, work: LocalWork | EvaluationWork, engine: VectorizedEngine
    ) -> dict[int, float]:
        """Time both engines, by clients per program; 0 for one after another.

        They are other objects than those that will run, which learn nothing from pieces.

        Args:
            work: What is to be run.
            engine: The vectorized engine.
        """
        now = partial(clock, self.settings.device)
        if isinstance(work, EvaluationWork):
            alone, several = self.alone(record=True), self.at_once(engine.transform)
            groups = several.groups(work)
            with self.undisturbed():
                return time_evaluation(work, alone.evaluate, several.evaluate, groups, now)

        most, known = engine.most(), self.settings.chunk_size
        if self.settings.device.type == "cpu":
            most = min(most, max(1, CACHED // max(1, engine.model_nbytes())))
        sizes = [known] if known else chunk_sizes(len(work.info), most)

        def make(size: int) -> SequentialEngine | VectorizedEngine:
            if not size:
                return self.alone(record=True)
            made = self.at_once(engine.transform)
            made.chunk_size = size
            return made

        with self.undisturbed():
            return time_training(work, make, sizes, engine.limits, now)


def _first_step(work: LocalWork, module: nn.Module) -> LocalWork:
    """Cut the work to one step of every phase, of two clients.

    By plain SGD: Adam's first step, a sign, magnifies rounding without bound.
    """
    some = torch.argsort(work.info.steps, descending=True, stable=True)[:PROBED_CLIENTS]
    few = work.rows(together(work.data, work.info.index, some))
    phases = tuple(replace(phase, epochs=None, steps=1, lr=None) for phase in work.phases)
    steps = torch.full_like(few.info.steps, len(phases))
    sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)
    info = replace(few.info, steps=steps)
    return replace(few, info=info, phases=phases, optimizer=sgd, schedule=None, kept=None)


def results(engine: SequentialEngine | VectorizedEngine, work: LocalWork | EvaluationWork) -> Tree:
    """Run the work and return its results as a tree to compare.

    Its steps aren't recorded, as none of the run is like them: their clients are few, and their
    optimizer is another one.
    """
    if isinstance(work, LocalWork):
        with engine.traces.resting(), engine.whole.resting():
            return training_trees(engine.train(work))
    return evaluation_trees(engine.evaluate(work), work.models)


def _clients_served(work: LocalWork, phase: Phase, engine: VectorizedEngine) -> tuple[float, bool]:
    """Count the clients that one program serves, and whether those of a step need several."""
    data, cohort = work.data, work.cohort or len(work.info)
    together = engine.at_once(cohort)  # each process has a part of the cohort
    kinds: set[tuple[int | None, DropLast]]
    if isinstance(data, FederatedTensorDataset):
        kinds = {(data.batch_size, data.drop_last)}
    else:
        kinds = {(loader.batch_size, loader.drop_last) for loader in data.loaders}
    batch_size, drop_last = kinds.pop()
    if kinds or batch_size is None:  # DataLoaders with other sizes each, or a sampler of batches
        return float(together), False
    # Clients of all sizes, as many as a cohort has.
    every = data.num_samples.sort().values.tolist()
    sizes = [every[at * len(every) // cohort] for at in range(cohort)]
    if phase.full_batch:
        batch_size, drop_last = max(1, *sizes), False
    counted = sizes, batch_size, drop_last, together
    served, several = clients_served(*counted)
    if several and isinstance(data, FederatedTensorDataset):
        program, settings = engine.program(data.augment), engine.checks.settings()
        if engine.survey(work, phase, program, settings).pads:
            return clients_served(*counted, padded=True)
    return served, several


def _full_minibatch(work: EvaluationWork) -> int:
    """Count the samples of the largest minibatch of all clients."""
    most, data = max(1, int(work.data.num_samples.max())), work.data
    return min(data.batch_size, most) if isinstance(data, FederatedTensorDataset) else most


def _first_minibatch(work: EvaluationWork) -> EvaluationWork:
    """Cut the work to one minibatch of two clients."""
    data = work.data
    order = torch.argsort(data.num_samples[work.clients], descending=True, stable=True)
    if not isinstance(data, FederatedTensorDataset):
        return replace(work.rows(together(data, work.clients, order[:PROBED_CLIENTS])), limit=1)
    few = work.rows(order[:PROBED_CLIENTS])
    # Of these alone, as there may be many others.
    data, everyone = data.subset(few.clients.tolist()), torch.arange(len(few.clients))
    data = data.take(PROBED_SAMPLES, seed=0)
    probed = together(data, everyone, everyone)
    return replace(few.rows(probed), data=data, clients=probed, limit=1)
