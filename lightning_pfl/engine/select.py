"""The engine that runs each step of the user's module, which a probe chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pfl.contract.records import Evaluation, LocalResult, OnClients
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.core.tree import rows
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.engine.active_phase import is_unmodified
from lightning_pfl.engine.base import EngineSettings, EvaluationWork, LocalWork, ModuleLoop
from lightning_pfl.engine.optimizer_options import why_not_elementwise
from lightning_pfl.engine.probe import Estimate, OperationCounter, Probe, results
from lightning_pfl.engine.safety.compare import is_out_of_memory, reason_of
from lightning_pfl.engine.safety.guard import DRAWS_ELSEWHERE, weights_unwritten
from lightning_pfl.engine.safety.snapshot import has_generators, hooks_of
from lightning_pfl.engine.sequential import SequentialEngine
from lightning_pfl.engine.vectorized.engine import VectorizedEngine
from lightning_pfl.engine.vectorized.evaluation import evaluates_per_sample
from lightning_pfl.engine.vectorized.gradient import Transform
from lightning_pfl.engine.vectorized.one_model import is_of_one_model
from lightning_pfl.methods.base import Phase

EngineName = Literal["auto", "timed", "vectorized", "sequential", "reference"]
UNPROBED = ("sequential", "reference")
"""Names with which no step is probed."""


def check_engine(engine: str) -> None:
    """Raise ValueError for an unknown engine name."""
    if engine not in get_args(EngineName):
        raise ValueError(
            f"Expected `engine` to be one of {', '.join(get_args(EngineName))}, but got "
            f"engine={engine!r}. Use 'auto' to run vectorized where possible."
        )


class SelectedEngine:
    """Runs each step with the engine that a probe of a real step has chosen.

    With ``"auto"`` a CPU trains one client after another where ``cost.py`` estimates that to be
    faster, by the operations of a client's step. Else the probe runs one step of two clients with
    the sequential engine and with the vectorized one (first ``vmap`` of the forward pass, then of
    the gradient), and takes the first that raises nothing, has no hidden loop and agrees with the
    sequential result; for an evaluation the estimate comes after that. The choice depends on
    the module, the minibatches and the method, never on timing. With ``"timed"`` the clock chooses
    (``timing.py``), and several processes take what the first one has found. A resumed run repeats
    the choice. Where hooks of layers or of the optimizer have come or gone, the probe runs again:
    what it has found before holds, unless a step can't run so now.

    ``validation_step``, ``test_step`` and ``predict_step`` are probed on their own, and where all
    clients have one model, whose samples then are one batch, once more.

    A step may do later what the probe didn't see (``.item()`` from round 5 on, a skipped minibatch,
    a list that it keeps). With ``"auto"``, clients for which the vectorized engine fails then run
    in the sequential one, in this call only, so that a round's result depends on the round alone;
    the log names the reason.

    Args:
        name: ``"auto"``, ``"timed"``, ``"vectorized"`` (an error if impossible),
            ``"sequential"``, or ``"reference"``, which is that without recorded steps.
        module: The user's module.
        parameter_split: Names of the module.
        settings: The Trainer's flags.
        loop: Lightning's own loop, for modules with code inside a step; None for others.
        found: What probes of an earlier run have found, of a checkpoint; None for nothing.
        group: The clients' architecture, which messages name; empty where all have the same.
        agree: Gets the place of a choice and what this process has found there, and returns what
            the first process has found; None with one process.

    Attributes:
        choices: Engine and reason per step (``"training_step"``, ...).
        found: What each probe has found, by device and step: a transform, or ``"sequential"``, and
            with ``"timed"`` the clients per program. A resumed run begins with it, as rounding on
            other minibatches, or another machine, may speak for another one.
        seconds: What ``"timed"`` has measured: seconds of a client's step of training, or of an
            evaluation, by step and by clients per program; 0 for one client after another.
        trial: Whether evaluations are of a few clients for now, as in a sanity check. Their times
            say nothing about those of all, so the clock chooses later.
    """

    def __init__(
        self,
        name: EngineName,
        module: Any,
        parameter_split: ParameterSplit,
        settings: EngineSettings,
        loop: ModuleLoop | None = None,
        found: Mapping[str, str] | None = None,
        group: str = "",
        agree: Callable[[str, str], str] | None = None,
    ) -> None:
        check_engine(name)
        self._agree = agree
        self._whose = f"{group}: " if group else ""
        self.name, self.module, self.parameter_split = name, module, parameter_split
        self.settings, self.found = settings, dict(found or {})
        self.choices: dict[str, str] = {}
        self.seconds: dict[str, dict[int, float]] = {}
        self.trial = False
        self._engines: dict[str, SequentialEngine | VectorizedEngine] = {}
        self._conditions: dict[str, tuple[str | None, list[Any]]] = {}
        self._checked: set[str] = set()
        self._said: set[str] = set()
        self._sequential = SequentialEngine(
            module, parameter_split, settings, loop, record=name != "reference"
        )
        self._probe = Probe(self._sequential)

    @property
    def loop(self) -> ModuleLoop | None:
        """Lightning's own loop, for modules with code inside a step; None for others."""
        return self._sequential.loop

    @loop.setter
    def loop(self, loop: ModuleLoop | None) -> None:
        self._sequential.loop = loop

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Count the optimizer steps of each client, int64 ``(clients,)``."""
        return self._sequential.count_steps(data, clients, phases)

    def train(self, work: LocalWork, on_clients: OnClients | None = None) -> LocalResult:
        """Train a cohort locally; see :class:`~lightning_pfl.engine.base.Engine`."""
        why_not = self._why_one_by_one(work)
        if self._is_open(work.step, why_not):
            if not int(work.info.steps.sum()):
                return self._sequential.train(work, on_clients)
            self._choose_together(work, why_not)
        engine, listener = self._engines[work.step], _Listener(on_clients)
        if engine is not self._sequential:
            with self._falling_back(work.step, listener):
                return engine.train(work, listener)
        with self._checking(work, work.step):
            return self._sequential.train(work, listener)

    def evaluate(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Run a validation, test or prediction step for each client."""
        kind = self._kind(work)
        later = self.trial and self.name == "timed" and not self._known(kind)[1]
        if not later and self._is_open(kind):
            self._choose_together(work)
        engine, listener = self._engines.get(kind, self._sequential), _Listener(on_clients)
        if engine is not self._sequential:
            with self._falling_back(work.step, listener):
                return engine.evaluate(work, listener)
        with self._checking(work, kind):
            return self._sequential.evaluate(work, listener)

    def groups(self, work: EvaluationWork) -> Tensor | None:
        """Find which clients one program evaluates together, where the same gives the same again.

        Only then an evaluation may be left out, of whole groups, as a value's last bits depend on
        the shapes of a program. It is known for tensors in memory and the steps of a
        ``PersonalizedModule`` that have never drawn random numbers, without hooks.

        Args:
            work: The evaluation; its models aren't read.

        Returns:
            The number of each client's group, int64 ``(clients,)``; None where it isn't known.
        """
        engine, step = self._engines.get(work.step), work.step
        if (
            engine is None
            or self._said
            or self.settings.batch_hooks is not None
            or not isinstance(work.data, FederatedTensorDataset)
            or not is_unmodified(self.module)
            or not evaluates_per_sample(self.module, step)
            or not engine.quiet.get(step, False)
            or has_generators(self.module)
            or hooks_of(self.module)
        ):
            return None
        return engine.groups(work)

    def _kind(self, work: LocalWork | EvaluationWork) -> str:
        """Name the step, and whether all clients have one model, which is chosen for by itself."""
        if isinstance(work, EvaluationWork) and is_of_one_model(self.module, self.settings, work):
            return f"{work.step}{OF_ONE_MODEL}"
        return work.step

    @contextmanager
    def _falling_back(self, step: str, listener: _Listener) -> Iterator[None]:
        """Go on where the vectorized engine fails, so that the sequential one runs the step."""
        try:
            yield
        # Any exception of a user's module under vmap; true errors recur in the other engine.
        except Exception as error:
            if self.name == "vectorized" or listener.failed or is_out_of_memory(error):
                raise
            why = f"{self._whose}{step} runs sequential here: {reason_of(error)}."
            if why not in self._said:
                self._said.add(why)
                rank_zero_info(why)

    def _why_one_by_one(self, work: LocalWork) -> str | None:
        """Describe why clients have to train one after another in this round, whatever the step."""
        why_not = why_not_elementwise(work.optimizer) if self.loop is None else self.loop.why
        if work.kept is not None and any(not p.ndim for p in self.module.parameters()):
            why_not = why_not or "optimizer states are kept, and a parameter has no axes"
        return why_not

    def _is_open(self, kind: str, why_not: str | None = None) -> bool:
        """Whether an engine has to be chosen, as none was or under other conditions.

        A hook may be a loop over samples, or do nothing under ``vmap``, as those of gradients.
        """
        known = self.name in UNPROBED or self._conditions.get(kind) == self._now(why_not)
        return kind not in self._engines or not known

    def _now(self, why_not: str | None) -> tuple[str | None, list[Any]]:
        """Return what a choice depends on and may be otherwise in each round."""
        return why_not, hooks_of(self.module)

    def _checking(
        self, work: LocalWork | EvaluationWork, kind: str
    ) -> AbstractContextManager[None]:
        """Check, the first time, whether a step writes to tensors that clients share."""
        if kind in self._checked:
            return nullcontext()
        self._checked.add(kind)
        return weights_unwritten(self.module, rows(work.sent, slice(0, 1)), work.step)

    # --- the choice ---

    def _choose_together(
        self, work: LocalWork | EvaluationWork, why_not: str | None = None
    ) -> None:
        """Choose, and if another process has found something else before, choose that."""
        self._choose(work, why_not)
        self._conditions[self._kind(work)] = self._now(why_not)
        # What is so in a round alone is so for all processes.
        if self._agree is None or self.name in UNPROBED or why_not is not None:
            return
        place = self._place(self._kind(work))
        mine = self.found.get(place, self._one_by_one)
        if (first := self._agree(place, mine)) != mine:
            self.found[place] = first
            self._choose(work, why_not, "another process")

    def _place(self, step: str) -> str:
        return f"{self.settings.device.type} {step}"

    def _known(self, step: str) -> tuple[str, str]:
        """Return the transform that was found before, and the clients per program, if any."""
        transform, _, size = self.found.get(self._place(step), "").partition(" ")
        return transform, size

    @property
    def _one_by_one(self) -> str:
        """The entry of :attr:`found` for one client after another."""
        return f"{self._sequential.name} 0" if self.name == "timed" else self._sequential.name

    def _choose(
        self,
        work: LocalWork | EvaluationWork,
        why_not: str | None = None,
        finder: str = "the checkpoint's run",
    ) -> None:
        """Settle which engine runs a step, by running it on a short piece of work.

        Args:
            work: What is to be run.
            why_not: Why the vectorized engine can't run it, if that is known.
            finder: Who has found what is known of the step before.
        """
        step = self._kind(work)
        if self.name in UNPROBED:
            how = ", without recordings" if self.name == "reference" else ""
            self._settle(step, self._sequential, f"as asked{how}")
            return
        before, size = self._known(step)
        if self.name == "timed" and not size:
            before = ""  # an estimate's choice
        if before == self._sequential.name and self.name in ("auto", "timed") and why_not is None:
            self._settle(step, self._sequential, f"as in {finder}")
            return
        if why_not is None:
            why_not = self._try_at_once(work, before, size, finder)
        if why_not is None:
            return
        if self.name == "vectorized":
            raise ValueError(
                f"Expected `{work.step}` of {type(self.module).__name__} to run for many clients "
                f"at once with engine='vectorized', but it can't: {why_not}. Use engine='auto' or "
                "engine='sequential'."
            )
        self._settle(step, self._sequential, why_not)

    def _try_at_once(
        self, work: LocalWork | EvaluationWork, before: str, size: str, finder: str
    ) -> str | None:
        """Settle on what is faster, if many clients at once can run a step; return why they can't.

        Args:
            work: What is to be run.
            before: The transform that was found before; empty for none.
            size: The clients per program that were found with it.
            finder: Who has found these.

        Returns:
            The reason, or None if the step is settled.
        """
        step, piece = self._kind(work), self._probe.piece(work)
        estimates = self.name == "auto" and self.settings.device.type == "cpu" and not before
        estimate: Estimate | None = None
        if estimates and isinstance(work, LocalWork):
            with self._probe.undisturbed(), self._checking(piece, self._kind(piece)):
                estimate = self._probe.training_estimate(work, piece)
            if not estimate.pays:
                self._settle_alone(work, estimate)
                return None
        with self._probe.undisturbed(), self._checking(piece, self._kind(piece)):
            expected = results(self._sequential, piece)
        reasons, differs = [], False
        if getattr(self._sequential, "draws_elsewhere", False):
            reasons.append(DRAWS_ELSEWHERE)
        alike = step != work.step  # there is nothing to map over
        transforms: tuple[Transform, ...] = ("forward",) if alike else ("forward", "grad")
        transforms = tuple(sorted(transforms, key=lambda transform: transform != before))
        for transform in transforms if not reasons else ():
            engine, counter = self._probe.at_once(transform), OperationCounter()
            counts = estimates and estimate is None
            mode: AbstractContextManager[Any] = counter if counts else nullcontext()
            # What a run has begun with is taken anyway.
            doubted = before != transform
            problem = self._probe.problem(engine, piece, expected, mode, doubted)
            if problem is None or (not doubted and problem.rounding):
                if counts:
                    estimate = self._probe.evaluation_estimate(work, piece, engine, counter)
                if self.name == "timed" and not before:
                    self._settle_fastest(work, engine)
                elif estimate is not None and not estimate.pays:
                    self._settle_alone(work, estimate)
                elif estimate is not None:
                    self._settle_at_once(work, engine, more=_counted(work, estimate))
                else:
                    again = "" if doubted else f", as in {finder}"
                    self._settle_at_once(work, engine, size, again)
                return None
            reasons.append(f"{self._how(work, transform)}: {problem.reason}")
            differs |= not doubted and not problem.raised
        if not before:
            self.found[self._place(step)] = self._one_by_one
        elif not differs and step not in self._engines and self.name != "vectorized":
            # That run fell back in this call alone, as steps may draw in some rounds.
            self._settle_at_once(
                work, self._probe.at_once(transforms[0]), size, f", as in {finder}"
            )
            return None
        return "; ".join(dict.fromkeys(reasons))

    def _settle_alone(self, work: LocalWork | EvaluationWork, estimate: Estimate) -> None:
        """Let one client after another run a step, which is estimated to be faster."""
        kind = self._kind(work)
        self.found[self._place(kind)] = self._sequential.name
        self._settle(kind, self._sequential, f"{SLOWER}{_counted(work, estimate)}")

    def _settle_at_once(
        self,
        work: LocalWork | EvaluationWork,
        engine: VectorizedEngine,
        size: str = "",
        more: str = "",
    ) -> None:
        """Let the vectorized engine run a step.

        Args:
            work: What is to be run.
            engine: The vectorized engine.
            size: The clients per program, if a clock has found them.
            more: What the log says besides.
        """
        engine.chunk_size = int(size) if size else None
        kind, how = self._kind(work), self._how(work, engine.transform)
        self.found[self._place(kind)] = f"{engine.transform} {size}".strip()
        # A sanity check is of a few of the clients.
        few = self.trial and isinstance(work, EvaluationWork)
        counts = kind == work.step and not few
        many = f", {engine.together(work)} at once" if counts else ""
        self._settle(kind, engine, f"{how}{many}{more}")

    def _how(self, work: LocalWork | EvaluationWork, transform: Transform) -> str:
        """Describe how the vectorized engine runs work."""
        alike = self._kind(work) != work.step
        return ONE_BATCH if alike else f"vmap over the {_WHAT[transform]}"

    def _settle_fastest(self, work: LocalWork | EvaluationWork, engine: VectorizedEngine) -> None:
        """Settle which engine runs a step, and with how many clients per program, by the clock.

        Args:
            work: What is to be run.
            engine: The vectorized engine, which can run it.
        """
        kind = self._kind(work)
        seconds = self.seconds[kind] = self._probe.seconds(work, engine)
        best = min(seconds, key=seconds.__getitem__, default=0)
        times = ", ".join(
            f"{took * 1e3:.3g} ms {f'with {many} at once' if many else 'one after another'}"
            for many, took in sorted(seconds.items(), key=lambda item: item[1])
        )
        unit = "client" if isinstance(work, EvaluationWork) else "client's step"
        self.found[self._place(kind)] = f"{engine.transform} {best}"
        if not best:
            self.found[self._place(kind)] = self._one_by_one
            self._settle(kind, self._sequential, f"a {unit} takes {times}")
            return
        engine.chunk_size = best
        self._settle(kind, engine, f"{best} clients at once; a {unit} takes {times}")

    def _settle(self, step: str, engine: SequentialEngine | VectorizedEngine, why: str) -> None:
        self._engines[step] = engine
        self.choices[step] = f"{engine.name} ({why})"
        if self.name not in UNPROBED:
            rank_zero_info(f"{self._whose}{step} runs {engine.name}: {why}.")


SLOWER = "many clients at once would be slower for such a network and data"
OF_ONE_MODEL = " with one model"
"""Added to the name of a step of an evaluation in which all clients have the same model."""
ONE_BATCH = "samples of many clients as one batch"
_WHAT = {"forward": "forward pass", "grad": "gradient"}


def _counted(work: LocalWork | EvaluationWork, estimate: Estimate) -> str:
    """Say what an estimate has counted."""
    unit = "minibatch" if isinstance(work, EvaluationWork) else "gradient"
    million = estimate.operations / 1e6
    counted = f"{million:,.0f}" if million >= 100 else f"{million:.3g}"
    return f", {counted} million operations a {unit}"


class _Listener:
    """Passes on which clients are done, and records whether that failed.

    Then the error is a callback's, not the step's.
    """

    def __init__(self, on_clients: OnClients | None) -> None:
        self.on_clients = on_clients
        self.failed = False

    def __call__(
        self, positions: list[int], losses: Callable[[], Tensor] | None = None
    ) -> bool | None:
        if self.on_clients is None:
            return False
        self.failed = True
        ran = self.on_clients(positions, losses)
        self.failed = False
        return ran
