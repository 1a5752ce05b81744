"""Lightning's own loop over the minibatches of one client at a time.

For modules, callbacks and precisions with code inside an optimizer step, and for steps that read
counters of the Trainer: while a client trains, the Trainer has its module, optimizers, schedulers
and counters, and Lightning runs the step. So hooks, ``self.optimizers()``, ``manual_backward``,
``toggle_optimizer`` and ``trainer.global_step`` mean what they always mean, for this client.

A client begins with fresh optimizers, and with schedulers as the round before left them. They go on
from where the client with most steps ends.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl._lightning import (
    TrainingEpochLoop,
    call_module_hook,
    connected,
    is_overridden,
    optimizer_steps,
    overrides,
)
from lightning_pfl.contract.records import SlotStates
from lightning_pfl.federation.hooks import STEP_HOOKS, counters_read, estimates_in, overridden
from lightning_pfl.trainer.step_schedule import StepSchedule

CALLBACK_STEP_HOOKS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
"""Hooks of a callback that are called in every step of every client."""

AROUND_MINIBATCH = "on_train_batch_start", "on_train_batch_end"
"""Hooks of the module that this loop calls; Lightning's parts call the others."""


def needs_loop(
    trainer: L.Trainer, module: L.LightningModule, schedulers: Sequence[LRSchedulerConfig]
) -> str | None:
    """Describe what needs Lightning's own loop for each client, or return None."""
    name = type(module).__name__
    found = [] if module.automatic_optimization else [f"{name} sets automatic_optimization=False"]
    found += [f"{name} overrides `{hook}`" for hook in overridden(module, STEP_HOOKS)]
    found += [f"{name} reads `{counter}` in its step" for counter in counters_read(module)]
    for callback in connected(trainer).callbacks:
        kind = type(callback).__name__
        hooks = [hook for hook in CALLBACK_STEP_HOOKS if overrides(callback, hook, Callback)]
        found += [f"{kind} overrides `{hook}`" for hook in hooks]
    by_step = [config for config in schedulers if config.interval == "step"]
    found += [
        f"{type(config.scheduler).__name__} monitors a value in each step"
        for config in by_step
        if config.reduce_on_plateau
    ]
    if by_step and is_overridden("lr_scheduler_step", module):
        found += [f"{name} overrides `lr_scheduler_step`"]
    if scaler_of(trainer) is not None:
        found += [f"precision={trainer.precision!r} scales the loss"]
    return ", ".join(found) or None


def scaler_of(trainer: L.Trainer) -> Any:
    """Return the loss scaler of mixed precision; None without one."""
    plugin = trainer.precision_plugin
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None


class ClientTraining:
    """The optimizers of an architecture's clients.

    Args:
        trainer: The Trainer, with the federated loops.
        module: The module of the clients.
        optimizers: What ``configure_optimizers`` returned: templates, which never step, unless
            :attr:`loop` runs the steps.
        schedulers: Their schedulers.

    Attributes:
        loop: Lightning's own loop, if something needs it.
        counts_steps: Whether a scheduler counts the clients' steps, and not rounds.
        estimates_steps: Whether ``estimated_stepping_batches`` does, in ``configure_optimizers``:
            with such a scheduler, or without one where steps of Lightning's loop count themselves.
        schedule: The optimizer's options at each step, if a scheduler counts steps outside of
            Lightning's loop.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRSchedulerConfig],
    ) -> None:
        self.optimizers, self.schedulers = list(optimizers), list(schedulers)
        why = needs_loop(trainer, module, schedulers)
        self.loop = None if why is None else ClientLoop(trainer, module, self, why)
        by_step = any(config.interval == "step" for config in self.schedulers)
        self.counts_steps = by_step or (not module.automatic_optimization and bool(self.schedulers))
        alone = self.loop is not None and not self.schedulers
        self.estimates_steps = self.counts_steps or (alone and bool(estimates_in(module)))
        alone = by_step and self.loop is None
        self.schedule = StepSchedule(self.optimizers[0], self.schedulers) if alone else None

    def end_round(self, steps: int, gather: Callable[[Any], list[Any]]) -> None:
        """Let schedules go on by the steps of the client with most steps.

        Args:
            steps: Their number in its longest phase.
            gather: Gathers an object of every process.
        """
        if self.loop is not None:
            self.loop.end_round(gather)
        if self.schedule is not None:
            self.schedule.end_round(steps)

    @property
    def steps(self) -> int:
        """Optimizer steps of the client with most steps, in all rounds before."""
        return 0 if self.loop is None else self.loop.steps_before

    @steps.setter
    def steps(self, steps: int) -> None:
        if self.loop is not None:
            self.loop.steps_before = steps


class ClientLoop(TrainingEpochLoop):
    """Takes the place of the Trainer's epoch loop while a client trains.

    Args:
        trainer: The Trainer, with the federated loops.
        module: The module of the clients.
        training: Its optimizers and schedulers.
        why: What needs this loop, for messages.

    Attributes:
        steps_before: Optimizer steps of the client with most steps, in all rounds before.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        training: ClientTraining,
        why: str,
    ) -> None:
        super().__init__(trainer)
        self.module, self.why, self.manual = module, why, not module.automatic_optimization
        self.client_optimizers, self.configs = training.optimizers, training.schedulers
        self.steps_before = 0
        self._wrapped: list[LightningOptimizer] = []
        self._accumulating = self._applied = False
        self._slots: dict[str, list[Any]] = {}
        self._furthest: tuple[int, Any] = 0, None
        self._overridden: list[str] = []
        self._read: tuple[Any, bool] | None = None

    # --- a client ---

    @contextmanager
    def phase(
        self,
        trainable: Collection[str],
        lr: float | None,
        minibatches: int,
        kept: SlotStates | None = None,
    ) -> Iterator[None]:
        """Begin a phase of a client; see :class:`~lightning_pfl.engine.base.ModuleLoop`."""
        if lr is not None and any(config.interval == "step" for config in self.configs):
            raise MisconfigurationException(
                "Expected phases with the learning rate of `configure_optimizers`, as a scheduler "
                f"changes it in each step, but got a phase with {lr=}. Leave out its rate, or the "
                "scheduler."
            )
        with ExitStack() as stack:
            stack.enter_context(self._installed(minibatches))
            stack.enter_context(self._trained(frozenset(trainable)))
            stack.enter_context(self._states(kept))
            if lr is not None:
                for group in self._groups():
                    group["lr"] = lr
            yield
            steps = self.global_step - self.steps_before
            if self.trainer.training and steps > self._furthest[0]:
                self._furthest = steps, self._schedule()

    @contextmanager
    def _installed(self, minibatches: int) -> Iterator[None]:
        """Let the Trainer have this module, these optimizers and this loop."""
        trainer: Any = self.trainer
        strategy, fit = trainer.strategy, trainer.fit_loop
        if not self._wrapped:
            self._wrapped = [
                LightningOptimizer._to_lightning_optimizer(one, strategy)
                for one in self.client_optimizers
            ]
        self._overridden = overridden(self.module, AROUND_MINIBATCH)
        self.val_loop, self._results = fit.epoch_loop.val_loop, fit.epoch_loop._results
        for counter in optimizer_steps(self):
            counter.total.ready = counter.total.completed = self.steps_before
        with (
            _replaced(
                strategy,
                _lightning_module=self.module,
                model=self.module,
                _optimizers=self.client_optimizers,
                _lightning_optimizers=self._wrapped,
                lr_scheduler_configs=self.configs,
            ),
            _replaced(fit, epoch_loop=self, max_batches=minibatches),
        ):
            yield

    @contextmanager
    def _trained(self, names: frozenset[str]) -> Iterator[None]:
        """Freeze the parameters that don't train in this phase."""
        frozen = [
            leaf
            for name, leaf in self.module.named_parameters()
            if leaf.requires_grad and name not in names
        ]
        for leaf in frozen:
            leaf.requires_grad_(False)
        try:
            yield
        finally:
            for leaf in frozen:
                leaf.requires_grad_(True)

    @contextmanager
    def _states(self, kept: SlotStates | None) -> Iterator[None]:
        """Begin with the initial states or those that are kept; put everything back at the end."""
        before, scaler = self._schedule(), scaler_of(self.trainer)
        scale = deepcopy(scaler.state_dict()) if scaler is not None else None
        states = [one.state for one in self.client_optimizers]
        self._slots = {"model": [_copied(state) for state in states]}
        leaves = dict(self.module.named_parameters())
        for key, of_names in (kept or {}).items():
            slot, place = key.rsplit(" ", 1)
            self._take_states(slot)
            for name, entries in of_names.items():
                self._slots[slot][int(place)] |= _copied({leaves[name]: entries})
        self._take_states("model")
        try:
            yield
            if kept is not None:
                names = {leaf: name for name, leaf in leaves.items()}
                for slot, each in self._slots.items():
                    for number, state in enumerate(each):
                        kept[f"{slot} {number}"] = {names[k]: dict(v) for k, v in state.items()}
        finally:
            self._restore(before)
            for one, state in zip(self.client_optimizers, states, strict=True):
                one.state = state
            if scaler is not None:
                scaler.load_state_dict(scale)

    def _take_states(self, slot: str) -> None:
        if slot not in self._slots:
            self._slots[slot] = [defaultdict(dict) for _ in self.client_optimizers]
        for one, state in zip(self.client_optimizers, self._slots[slot], strict=True):
            one.state = state

    # --- a step ---

    def run(self, batch: Any, number: int, accumulate: bool, is_last: bool) -> Tensor | None:  # type: ignore[override]
        """Run a minibatch; see :class:`~lightning_pfl.engine.base.ModuleLoop`."""
        self._begin(number, accumulate, is_last)
        step = self._start(batch, number)
        if self.manual:
            output = self.manual_optimization.run(step)
        else:
            output = self.automatic_optimization.run(self.client_optimizers[0], number, step)
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
        self._hook("on_train_batch_end", output, batch, number)
        if not self.manual:
            self.update_lr_schedulers("step", update_plateau_schedulers=True)
        loss = output.get("loss")
        # Lightning divides what it returns by the minibatches of a step.
        return loss if self.manual or loss is None else loss * self._per_step

    def gradient(self, batch: Any, number: int) -> Tensor | None:
        """Compute a minibatch's gradient; see :class:`~lightning_pfl.engine.base.ModuleLoop`."""
        if scaler_of(self.trainer) is not None:
            raise MisconfigurationException(
                f"Expected a method whose steps are those of the optimizer for "
                f"precision={self.trainer.precision!r}, which scales the gradients, but this "
                "method changes them. Use precision='bf16-mixed'."
            )
        self._begin(number, accumulate=True, is_last=False)
        step = self._start(batch, number)
        output = self.automatic_optimization.run(self.client_optimizers[0], number, step)
        self._hook("on_train_batch_end", output, batch, number)
        loss = output.get("loss")
        return None if loss is None else loss * self._per_step

    def apply(self, number: int, loss: Tensor | None, slot: str) -> None:
        """Step the optimizer; see :class:`~lightning_pfl.engine.base.ModuleLoop`."""
        self._take_states(slot)
        self._begin(number, accumulate=False, is_last=False)
        self.automatic_optimization._optimizer_step(number, lambda: loss)
        self._applied = True

    def end_step(self) -> None:
        """Step schedulers, once for all models that a method's step has updated."""
        if self._applied:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
        self._applied = False

    @contextmanager
    def without_schedules(self) -> Iterator[None]:
        """Let schedulers that count steps stay; see :class:`~lightning_pfl.engine.base.ModuleLoop`.

        Those of a module that optimizes by hand are its own to step.
        """
        kept = [one for one in self.configs if self.manual or one.interval != "step"]
        with _replaced(self, configs=kept):
            yield

    @property
    def _per_step(self) -> int:
        return int(self.trainer.accumulate_grad_batches)

    def _begin(self, number: int, accumulate: bool, is_last: bool) -> None:
        self._accumulating = accumulate
        progress = self.batch_progress
        progress.current.ready = number + 1
        progress.is_last_batch = is_last

    def _should_accumulate(self) -> bool:
        return self._accumulating

    def _start(self, batch: Any, number: int) -> OrderedDict[str, Any]:
        """Call the hook before a minibatch, and collect the arguments of ``training_step``."""
        if self._hook("on_train_batch_start", batch, number) == -1:
            raise MisconfigurationException(
                "FederatedStrategy can't skip the rest of an epoch, but `on_train_batch_start` of "
                f"{type(self.module).__name__} returned -1. Lower `limit_train_batches`, or return "
                "None from `training_step` to skip a minibatch."
            )
        return self._build_kwargs(OrderedDict(), batch, number)

    def _build_kwargs(
        self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int
    ) -> OrderedDict[str, Any]:
        """Collect the arguments of ``training_step``, whose signature is read once."""
        step: Any = self.module.training_step
        function = getattr(step, "__func__", step)
        if self._read is None or self._read[0] is not function:
            found = super()._build_kwargs(OrderedDict(), batch, batch_idx)
            self._read = function, "batch_idx" in found
        kwargs["batch"] = batch
        if self._read[1]:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    def _hook(self, name: str, *args: Any) -> Any:
        return call_module_hook(self.trainer, name, *args) if name in self._overridden else None

    # --- from round to round ---

    def _groups(self) -> Iterator[dict[str, Any]]:
        for one in self.client_optimizers:
            yield from one.param_groups

    def _schedule(self) -> tuple[list[dict[str, Any]], list[Any]]:
        """Copy the options of all groups and the schedulers' states."""
        options = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self._groups()
        ]
        return options, [deepcopy(config.scheduler.state_dict()) for config in self.configs]

    def _restore(self, schedule: tuple[list[dict[str, Any]], list[Any]]) -> None:
        options, states = schedule
        for group, values in zip(self._groups(), options, strict=True):
            group.update(values)
        for config, state in zip(self.configs, states, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))

    def end_round(self, gather: Callable[[Any], list[Any]]) -> None:
        """Let schedules go on from where the client with most steps has left them.

        Args:
            gather: Gathers an object of every process.
        """
        steps, schedule = max(gather(self._furthest), key=lambda one: one[0])
        self._furthest = 0, None
        if steps:
            self._restore(schedule)
            self.steps_before += steps


def _copied(state: Any) -> Any:
    """Copy an optimizer's state, by parameter."""
    return defaultdict(
        dict,
        {
            leaf: {k: v.clone() if isinstance(v, Tensor) else deepcopy(v) for k, v in kept.items()}
            for leaf, kept in state.items()
        },
    )


@contextmanager
def _replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside a ``with`` block."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
