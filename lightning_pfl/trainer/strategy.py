"""FederatedStrategy: what a federated run owns, inside an ordinary ``Trainer.fit``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl._lightning import WrappingCheckpointIO, read_optimizers, take_over
from lightning_pfl.contract.records import FitPlan
from lightning_pfl.core.parameters import ParameterSplit
from lightning_pfl.engine.select import EngineName, SelectedEngine
from lightning_pfl.federation.architectures import (
    Architecture,
    describe,
    make_architectures,
    modules_by_name,
    parameter_splits,
    table,
)
from lightning_pfl.federation.checkpoint import (
    check_parameter_split,
    check_settings,
    explain_read_errors,
    load_optimizer,
    require_federated,
    require_lightning,
    saved_optimizers,
)
from lightning_pfl.federation.client_states import choose_device
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.sampling import check_participation
from lightning_pfl.methods.base import Method
from lightning_pfl.methods.fedavg import FedAvg
from lightning_pfl.trainer import checks as flags
from lightning_pfl.trainer.checkpoint_io import AtomicCheckpointIO
from lightning_pfl.trainer.evaluation_loop import FederatedEvaluationLoop
from lightning_pfl.trainer.fit_loop import FederatedLoop
from lightning_pfl.trainer.prediction_loop import FederatedPredictionLoop
from lightning_pfl.trainer.processes import TIMEOUT, ProcessesStrategy, keep_metrics_apart
from lightning_pfl.trainer.setup import engine_settings

SPREAD = 2**30
"""Bytes of clients' memories that every process has after a run, to answer users' questions."""
ClientStateDevice = Literal["auto", "device", "host"]


class FederatedStrategy(Federation, ProcessesStrategy):
    """Trains one personalized model per client; a communication round is a Trainer epoch.

    Args:
        method: The federated method. None takes the one method among the Trainer's callbacks.
        participation: Clients per round: a fraction in (0, 1] (float), or a count (int).
        engine: ``"vectorized"`` runs a cohort as one batched program, ``"sequential"`` one client
            after another; ``"auto"`` takes the first that can run the module.
        seed: Seed of every random choice. None: that of ``seed_everything``, else one is drawn. A
            resumed run keeps its own.
        chunk_size: Clients per batched program. None: as many as fit the memory.
        max_update_norm: Uploads that differ from what was received by more than this Euclidean norm
            are left out of the round. None: no bound.
        feature_cache: Whether features of a frozen shared backbone are computed once per phase.
        bank: Where the clients' memories live: on the ``"device"``, on the ``"host"``, or
            ``"auto"``: on the device if they take at most a quarter of it.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As for
            every Lightning strategy; usually set by the Trainer's flags.
        process_group_backend, timeout: See
            :class:`~lightning_pfl.trainer.processes.ProcessesStrategy`.

    Attributes:
        engine: The engine in use. :class:`~lightning_pfl.federation.federation.Federation`
            describes the state.

    Raises:
        ValueError: If a setting is out of its range.

    Example:
        >>> from lightning_pfl.methods import FedRep
        >>> strategy = FederatedStrategy(FedRep(), participation=0.1)
        >>> trainer = L.Trainer(max_epochs=9, strategy=strategy, accelerator="cpu", logger=False)
        >>> trainer.strategy.participation
        0.1
    """

    strategy_name = "federated"

    def __init__(
        self,
        method: Method | None = None,
        participation: int | float = 1.0,
        engine: EngineName = "auto",
        seed: int | None = None,
        chunk_size: int | None = None,
        max_update_norm: float | None = None,
        feature_cache: bool = True,
        client_state_device: ClientStateDevice = "auto",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        Federation.__init__(self)
        ProcessesStrategy.__init__(
            self,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
        )
        flags.check_strategy(method, engine, seed, chunk_size, max_update_norm, client_state_device)
        self.participation = participation
        self.chunk_size, self.max_update_norm = chunk_size, max_update_norm
        self.feature_cache, self._given, self._engine_name = feature_cache, method, engine
        self._seed, self._client_state_device = seed, client_state_device
        self._default_method: type[Method] | None = None
        self._owner: tuple[Any, ...] = ()
        self._saved: Mapping[str, Any] | None = None
        self._saved_optimizers: list[tuple[str, dict[str, Any]]] = []
        self._undo: Callable[[], None] | None = None

    @property
    def participation(self) -> int | float:
        """Clients per round: a fraction, or a count; may be set between two fits."""
        return self._participation

    @participation.setter
    def participation(self, participation: int | float) -> None:
        self._participation = check_participation(participation)

    # --- Lightning's side -------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """How checkpoints are written; atomic unless the user gave another plugin."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif (
            isinstance(self._checkpoint_io, WrappingCheckpointIO)
            and self._checkpoint_io.checkpoint_io is None
        ):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def connect(self, model: L.LightningModule) -> None:
        """Take the module, and find the method among the callbacks."""
        super().connect(model)
        self.method = self._find_method(model.trainer)

    def setup(self, trainer: Any) -> None:
        """Install the federated loops; make or restore server, bank and engine."""
        flags.check_trainer(trainer)
        _install_loops(trainer)
        super().setup(trainer)
        self._undo = keep_metrics_apart(trainer.lightning_module)
        self._setup_federation(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers`` for the template that every client gets a fresh copy of."""
        loop = trainer.fit_loop
        loop.setup_data()
        # `estimated_stepping_batches` then counts rounds, which is what the schedulers step by.
        cohort, loop.max_batches = loop.max_batches, trainer.accumulate_grad_batches
        self.optimizers, self.lr_scheduler_configs = self._configure_optimizers()
        loop.max_batches = cohort
        flags.check_schedulers(self.lr_scheduler_configs)
        # Templates never step; without this, torch warns that a scheduler stepped first.
        for template in self.optimizers:
            template._opt_called = True  # type: ignore[attr-defined]

    def client_optimizer(self, architecture: Architecture) -> Optimizer:
        """The template outside of a fit, with the checkpoint's learning rates if it has any."""
        template = self._configure_optimizer(architecture.module)[0][0]
        if self._saved_optimizers:
            load_optimizer(
                template, *self._saved_optimizers[self.architectures.index(architecture)]
            )
        return template

    def _configure_optimizers(self) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
        """One template, and its schedulers, for every architecture."""
        optimizers, schedulers = [], []
        for module in modules_by_name(self.lightning_module).values():
            one, configs = self._configure_optimizer(module)
            optimizers += one
            schedulers += configs
        return optimizers, schedulers

    def _configure_optimizer(
        self, module: L.LightningModule
    ) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
        flags.check_module(module)
        configured = module.configure_optimizers()
        if configured is None:
            raise MisconfigurationException(
                "FederatedStrategy needs an optimizer for the clients, but `configure_optimizers` "
                "returned None. Return one, for example "
                "torch.optim.SGD(self.parameters(), lr=0.01)."
            )
        return read_optimizers(module, configured, flags.check_optimizers)

    def teardown(self) -> None:
        """Leave the device; server and bank move to the host, where users can ask for models."""
        if self._undo is not None:
            self._undo()
        self._undo = None
        if self._owner:
            # Who was interrupted can't count on the others.
            if self._owner[0].state.status != TrainerStatus.INTERRUPTED:
                for architecture in self.architectures:
                    architecture.client_states.gather_to_all_ranks(SPREAD)
            self.move("cpu", "cpu")
        super().teardown()

    # --- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Add the federation's state to Lightning's checkpoint and write it."""
        if self._owner:
            names = [type(template).__name__ for template in self.optimizers]
            checkpoint["federated"] = {**self.state_dict(), "optimizers": names}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; by default without running code from it (``weights_only=True``)."""
        # Lightning's own default is another one for remote paths.
        safely = True if weights_only is None else weights_only
        with explain_read_errors(checkpoint_path):
            checkpoint = super().load_checkpoint(checkpoint_path, safely)
        return require_lightning(checkpoint, checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module; the federation's state is kept until `setup` knows the clients."""
        assert self.lightning_module is not None
        saved = require_federated(checkpoint)
        check_parameter_split(saved, type(self.method).__name__, describe(self._parameter_splits()))
        check_settings(saved, self.method.settings(), self.method.state_settings)
        super().load_model_state_dict(checkpoint, strict)
        self._saved = saved
        self._saved_optimizers = saved_optimizers(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the settings of the clients' optimizers, as schedulers left them."""
        scheduled = bool(self.lr_scheduler_configs)
        for one, saved in zip(self.optimizers, saved_optimizers(checkpoint), strict=False):
            load_optimizer(one, *saved, scheduled)

    # --- the federation ---------------------------------------------------------------------------

    def _find_method(self, trainer: Any) -> Method:
        found = [callback for callback in trainer.callbacks if isinstance(callback, Method)]
        if not found and self._given is None and self._default_method is not None:
            self._given = self._default_method()
        if self._given is not None and self._given not in found:
            trainer.callbacks.insert(0, self._given)
            found.append(self._given)
        if len(found) != 1:
            names = ", ".join(type(method).__name__ for method in found) or "none"
            raise MisconfigurationException(
                f"Expected exactly one federated method, but found {names} "
                "(FederatedStrategy(method=...) and "
                "Trainer(callbacks=...) together). Pass one, for example "
                "FederatedStrategy(FedAvg()), or set `method:` in "
                "the recipe."
            )
        return found[0]

    def _parameter_splits(self) -> dict[str, ParameterSplit]:
        return parameter_splits(self.lightning_module, self.method)

    def _setup_federation(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        names, num_samples = self._clients(trainer)
        flags.check_same_clients(self.ranks.all_gather_objects(flags.digest(names, num_samples)))
        owner = (trainer, module, self.method, names)
        fresh = owner != self._owner
        if fresh or self._saved is not None:
            self.seed = self._choose_seed()
        split = self._parameter_splits()
        flags.check_one_process(len(split), self.ranks.size)
        place = partial(choose_device, self._client_state_device, self.root_device)
        if fresh:
            if trainer.state.fn == TrainerFn.FITTING and self._saved is None:
                flags.check_unused(trainer)
                flags.check_finite(module)
            architectures = make_architectures(module, split, names)
            self.begin(module, architectures, names, num_samples, place)
            self._owner = owner
        self.bind_method()
        if not fresh and self._saved is None and (changed := self.changed_outside()):
            rank_zero_warn(
                f"{type(module).__name__} was changed since its last round ({changed[0]}"
                f"{', ...' if len(changed) > 1 else ''}), but this Trainer goes on with what "
                "server and clients have. Use a new Trainer to start from the module."
            )
        for architecture in self.architectures:
            architecture.client_states.keep_shard()
        self.move(
            self.root_device,
            place(sum(architecture.client_states.nbytes() for architecture in self.architectures)),
        )
        if num_samples.any():
            self.num_samples = num_samples
        restored = self._saved is not None
        if self._saved is not None:
            self.load_state_dict(self._saved)
        self._saved = None
        self._setup_engine(trainer, fresh, restored)
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.fit_loop.find_learners()
            rank_zero_info(
                f"{type(self.method).__name__} with {self.num_clients} clients, "
                f"{trainer.num_training_batches} a round; "
                f"engine {self._engine_name}; seed {self.seed}. Parameters and "
                f"buffers:\n{table(self.architectures)}"
            )
            found = [
                (
                    *architecture.parameter_split.notes(),
                    *architecture.method.notes(architecture.parameter_split),
                )
                for architecture in self.architectures
            ]
            for note in dict.fromkeys(note for notes in found for note in notes):
                rank_zero_info(note)
            if problem := self.method.check_fit(_plan(trainer)):
                rank_zero_warn(problem)

    def _clients(self, trainer: Any) -> tuple[tuple[str, ...], Tensor]:
        """Names and training samples: of the training data, the checkpoint, or this split."""
        if trainer.state.fn == TrainerFn.FITTING:
            data = trainer.fit_loop.require_data()
            return tuple(data.names), data.num_samples
        if self._saved is not None:
            return tuple(self._saved["clients"]), self._saved["num_samples"]
        if self._owner and self._owner[:3] == (trainer, self.lightning_module, self.method):
            return self.client_names, self.num_samples
        data = (
            trainer.predict_loop.load() if trainer.predicting else trainer._evaluation_loop.load()
        )
        return tuple(data.names), torch.zeros(data.num_clients, dtype=torch.int64)

    def _choose_seed(self) -> int:
        saved = None if self._saved is None else int(self._saved["seed"])
        if saved is not None and self._seed not in (None, saved):
            rank_zero_warn(
                f"The run continues with the checkpoint's seed {saved}; seed={self._seed} is not "
                "used."
            )
        if saved is not None:
            return saved
        if self._seed is not None:
            return self._seed
        # What `seed_everything` leaves behind, as its documentation says.
        from_environment = os.environ.get("PL_GLOBAL_SEED")
        drawn = int(from_environment) if from_environment else secrets.randbits(31)
        return int(self.broadcast(drawn))

    def _setup_engine(self, trainer: Any, fresh: bool, restored: bool) -> None:
        settings = engine_settings(trainer, self.seed, self.chunk_size, self.feature_cache)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fresh or fitting:
            self.settings = settings
            for number, architecture in enumerate(self.architectures):
                template = self.optimizers[number] if fitting else None
                architecture.engine = SelectedEngine(
                    self._engine_name,
                    architecture.module,
                    architecture.parameter_split,
                    template,
                    settings,
                )
        else:  # the engines of the fit have chosen; they read the settings when they run
            vars(self.settings).update(vars(settings))
            if restored:
                for architecture in self.architectures:
                    architecture.engine.template = (
                        None  # `client_optimizer` then makes the checkpoint's
                    )


def _install_loops(trainer: Any) -> None:
    """Replace Lightning's loops by federated ones that keep what the Trainer configured."""
    if isinstance(trainer.fit_loop, FederatedLoop):
        return
    validation = trainer.fit_loop.epoch_loop.val_loop
    trainer.fit_loop = take_over(FederatedLoop, trainer.fit_loop)
    trainer.fit_loop.epoch_loop.val_loop = take_over(FederatedEvaluationLoop, validation)
    trainer.validate_loop = take_over(FederatedEvaluationLoop, trainer.validate_loop)
    trainer.test_loop = take_over(FederatedEvaluationLoop, trainer.test_loop)
    trainer.predict_loop = take_over(FederatedPredictionLoop, trainer.predict_loop)


def _plan(trainer: Any) -> FitPlan:
    """What a method may know of the fit that begins."""
    endless = trainer.max_epochs is None or trainer.max_epochs < 0
    rounds = None if endless else trainer.max_epochs
    return FitPlan(rounds, trainer.reload_dataloaders_every_n_epochs)


def with_default_method() -> FederatedStrategy:
    """The strategy behind ``Trainer(strategy="federated")``: FedAvg, if no callback is a method."""
    strategy = FederatedStrategy()
    strategy._default_method = FedAvg
    return strategy
