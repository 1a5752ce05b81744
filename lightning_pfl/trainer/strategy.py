"""FederatedStrategy: the strategy that makes ``Trainer.fit`` federated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_pfl._lightning import (
    WrappingCheckpointIO,
    is_interrupt,
    path_of_last,
    read_optimizers,
)
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_choice
from lightning_pfl.core.tree import Tree
from lightning_pfl.engine.program import read_loss
from lightning_pfl.engine.select import EngineName
from lightning_pfl.federation.architectures import (
    Architecture,
    describe,
    modules_by_name,
    parameter_splits,
)
from lightning_pfl.federation.checkpoint import (
    check_file,
    check_parameter_split,
    check_settings,
    explain_read_errors,
    federated_part,
    load_optimizer,
    require_lightning,
    saved_optimizers,
)
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.gate import MaxNorm
from lightning_pfl.federation.shards import read_shards, require_checkpoint, write_shards
from lightning_pfl.methods.base import Method
from lightning_pfl.methods.fedavg import FedAvg
from lightning_pfl.trainer import checks
from lightning_pfl.trainer.checkpoint_io import AtomicCheckpointIO
from lightning_pfl.trainer.client_loop import ClientTraining
from lightning_pfl.trainer.fit_loop import STORING
from lightning_pfl.trainer.parts import find_method, fit_loop, install_loops
from lightning_pfl.trainer.processes import TIMEOUT, ProcessesStrategy, keep_metrics_apart
from lightning_pfl.trainer.setup import ClientStateDevice, StageSetup

KEPT_ON_ALL_RANKS = 2**30
"""Largest size in bytes of client states that every process gets after a run."""


class FederatedStrategy(ProcessesStrategy):
    """Trains one personalized model per client; a communication round is a Trainer epoch.

    Args:
        method: The federated method. None takes the one method among the Trainer's callbacks.
        participation: Clients per round: a fraction in (0, 1] (float), or a count (int). All in
            rounds of a method that needs all, such as ``LocalOnly``; the log says so.
        engine: ``"vectorized"`` runs a cohort as one batched program, ``"sequential"`` one client
            after another; ``"auto"`` takes the first that can run the module, on a CPU the second
            where an estimate (``engine/cost.py``) finds that faster. ``"timed"`` takes what a clock
            finds faster (``engine/timing.py``), with as many clients per program, and repeats it
            when resumed: two runs may choose differently. ``"reference"`` runs one client after
            another without recording steps, to check the others. The choice is logged. Results
            depend on it in their last bits only.
        seed: Seed of every random choice. None: that of ``seed_everything``, else one is drawn. A
            resumed run keeps its own.
        chunk_size: Clients per batched program. None: as many as fit the memory, at most 512 on a
            GPU and 128 on a CPU, fewer of larger models, which leave its caches.
        max_update_norm: Uploads that differ from what was received by more than this Euclidean norm
            are left out of the round. ``"auto"``: those more than 100 times as large as the median
            of the round. None: no bound; such clients are named all the same.
        feature_cache: Whether features of a frozen shared backbone are computed once per phase.
        keep_optimizer_state: Whether a client begins a round with the state of its optimizer, such
            as momentum, at the end of its last one; it is part of checkpoints. False: with a fresh
            one, as in the papers. With True, only clients that have taken equally many steps run
            as one program.
        evaluated_clients: Clients that a validation of a fit evaluates: a fraction in (0, 1]
            (float), or a count (int), in turns that see all of them. Logged statistics are then
            estimates, with ``val_acc/standard_error``. ``trainer.validate`` and ``trainer.test``
            evaluate all.
        overlap_evaluation: Whether a GPU goes on from a round's validation to the next round's
            training without waiting for Python to read and log the values, which happens once that
            training is launched. They are logged as values of their own round; a checkpoint reads
            them first. A GPU only, and not with what decides by them: ``EarlyStopping``,
            ``ModelCheckpoint(monitor=...)``, ``ReduceLROnPlateau``.
        cuda_graphs: Whether steps of many clients are captured as CUDA graphs, so that the CPU has
            not to launch their kernels one by one. For a ``PersonalizedModule`` and methods whose
            steps may be recorded; the log says why others run as usual. A GPU only, and not with
            ``engine="sequential"`` or ``"reference"``.
        client_state_device: Where the client states live: on the ``"device"``, on the ``"host"``,
            or ``"auto"``: on the device if they take at most a quarter of it.
        state_dict_type: What a checkpoint is: ``"full"``, one file with the states of all clients,
            for which process 0 needs the memory; ``"sharded"``, a folder in which each process
            writes those of its own clients. Both resume with any number of processes.
        split_data: Whether each of several processes keeps the samples of its own clients alone,
            and trains these. True takes a part of the memory; False deals each cohort evenly: of
            10 clients out of 100, one of two processes otherwise gets 6.2 in the mean.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As for
            every Lightning strategy; usually set by the Trainer's flags.
        process_group_backend, timeout: See
            :class:`~lightning_pfl.trainer.processes.ProcessesStrategy`.

    Attributes:
        federation: The state of the run: server, client states, engines, history; a
            :class:`~lightning_pfl.federation.federation.Federation`.

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
    federation_class: ClassVar[type[Federation]] = Federation

    def __init__(
        self,
        method: Method | None = None,
        participation: int | float = 1.0,
        engine: EngineName = "auto",
        seed: int | None = None,
        chunk_size: int | None = None,
        max_update_norm: MaxNorm = None,
        feature_cache: bool = True,
        keep_optimizer_state: bool = False,
        evaluated_clients: int | float = 1.0,
        client_state_device: ClientStateDevice = "auto",
        split_data: bool = False,
        overlap_evaluation: bool = False,
        cuda_graphs: bool = False,
        state_dict_type: Literal["full", "sharded"] = "full",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
        )
        checks.check_imports()
        checks.check_strategy(
            method, engine, seed, chunk_size, max_update_norm, client_state_device, cuda_graphs
        )
        plain = {
            "feature_cache": feature_cache,
            "keep_optimizer_state": keep_optimizer_state,
            "split_data": split_data,
            "overlap_evaluation": overlap_evaluation,
            "cuda_graphs": cuda_graphs,
            "process_group_backend": process_group_backend,
        }
        check_types(FederatedStrategy.__init__, plain)
        check_choice("state_dict_type", state_dict_type, ("full", "sharded"), "Use 'full'.")
        self.state_dict_type = state_dict_type
        self.federation = self.federation_class()
        self.federation.client_optimizer = self._client_optimizer
        self.federation.max_update_norm = max_update_norm
        self.federation.keeps_optimizers = keep_optimizer_state
        self.federation.splits_data = split_data
        self.federation.overlaps_evaluation = overlap_evaluation
        self.participation, self.evaluated_clients = participation, evaluated_clients
        self._stage = StageSetup(
            self.federation,
            engine,
            seed,
            chunk_size,
            feature_cache,
            client_state_device,
            cuda_graphs,
        )
        self._given = method
        self._default_method: type[Method] | None = None
        self._saved_optimizers: list[tuple[str, dict[str, Any]]] = []
        self._undo: Callable[[], None] | None = None
        self._client_training: list[ClientTraining] = []

    def __repr__(self) -> str:
        """Name the import, as a Trainer of pytorch_lightning shows it where it refuses this."""
        return f"{type(self).__name__} of `import lightning`, not of `import pytorch_lightning`"

    # --- what users ask for -----------------------------------------------------------------------

    @property
    def participation(self) -> int | float:
        """Clients per round: a fraction or a count; can be set between two fits."""
        return self.federation.participation

    @participation.setter
    def participation(self, participation: int | float) -> None:
        self.federation.participation = participation

    @property
    def evaluated_clients(self) -> int | float:
        """Clients that a validation evaluates: a fraction or a count; can be set between fits."""
        return self.federation.evaluated_clients

    @evaluated_clients.setter
    def evaluated_clients(self, share: int | float) -> None:
        self.federation.evaluated_clients = share

    @property
    def method(self) -> Method:
        """The method in use."""
        return self.federation.method

    @property
    def server(self) -> Tree:
        """The server's tree."""
        return self.federation.server

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients, in the order of their ids."""
        return self.federation.client_names

    def client_metrics(self, split: str | None = None) -> dict[str, dict[str, float]]:
        """Return what the last evaluation found for every client, also without a logger.

        See :meth:`~lightning_pfl.federation.federation.Federation.client_metrics`.
        """
        return self.federation.client_metrics(split)

    def client_state_dict(self, client: int | str) -> dict[str, Any]:
        """Return a client's personal model as a ``state_dict`` of the user's module.

        See :meth:`~lightning_pfl.federation.federation.Federation.client_state_dict`.
        """
        return self.federation.client_state_dict(client)

    def client_module(self, client: int | str) -> L.LightningModule:
        """Return a client's personal model as a copy of the module: in eval mode, no Trainer."""
        return self.federation.client_module(client)

    def global_state_dict(self) -> dict[str, Any]:
        """Return the global model as a ``state_dict`` of the user's module.

        See :meth:`~lightning_pfl.federation.federation.Federation.global_state_dict`.
        """
        return self.federation.global_state_dict()

    # --- Lightning's side -------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The checkpoint plugin; atomic unless the user chose another one."""
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
        """Connect the module, and find the method among the callbacks."""
        super().connect(model)
        if model.trainer.state.fn == TrainerFn.FITTING:  # before the module's `setup`
            for module in modules_by_name(model).values():
                checks.check_estimates(module)
        self.federation.method = find_method(model.trainer, self._given, self._default_method)

    def setup(self, trainer: L.Trainer) -> None:
        """Install the federated loops, and make or restore server, client states and engines."""
        checks.check_trainer(trainer)
        if self.state_dict_type == "sharded":
            checks.check_writes_shards(self.checkpoint_io)
        self.federation.ranks, self.federation.knows_owners = self.ranks, False
        install_loops(trainer, self.federation)
        self._stage.lock_folder(trainer)
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        self._undo = keep_metrics_apart(module)
        self._stage.begin(trainer, module, self.root_device, self._client_training)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and any(one.estimates_steps for one in self._client_training):
            # Only now it is known how many steps a round has.
            self._configure(trainer, self._stage.local_steps(trainer))
            self._stage.use(self._client_training)
        if fitting and self.federation.overlaps_evaluation:
            checks.check_overlap(trainer, self.root_device)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Call ``configure_optimizers`` for the templates of the clients' optimizers."""
        # `estimated_stepping_batches` then counts rounds, the unit of schedulers.
        self._configure(trainer, steps=1)

    def _configure(self, trainer: L.Trainer, steps: int) -> None:
        """Call ``configure_optimizers``.

        Args:
            trainer: The Trainer.
            steps: What ``estimated_stepping_batches`` counts in a round.
        """
        loop = fit_loop(trainer)
        loop.setup_data()
        cohort, loop.max_batches = loop.max_batches, steps * trainer.accumulate_grad_batches
        modules = modules_by_name(self.lightning_module).values()
        self._client_training = [self._configure_optimizer(module) for module in modules]
        loop.max_batches = cohort
        checks.check_architectures([one.optimizers for one in self._client_training])
        self.optimizers = [each for one in self._client_training for each in one.optimizers]
        self.lr_scheduler_configs = [
            each for one in self._client_training for each in one.schedulers
        ]
        # Templates never step; without this, torch warns that a scheduler stepped first.
        for template in self.optimizers:
            template._opt_called = True  # type: ignore[attr-defined]

    def _client_optimizer(self, architecture: Architecture) -> Optimizer:
        """Make the template outside of a fit, with the checkpoint's learning rates if any."""
        training = self._configure_optimizer(architecture.module)
        first = self.federation.architectures.index(architecture)
        for number, template in enumerate(training.optimizers if self._saved_optimizers else ()):
            load_optimizer(template, *self._saved_optimizers[first + number])
        architecture.engine.loop = training.loop
        return training.optimizers[0]

    def _configure_optimizer(self, module: L.LightningModule) -> ClientTraining:
        """Make the templates and the schedulers of one architecture."""
        configured = module.configure_optimizers()
        if configured is None:
            raise MisconfigurationException(
                "FederatedStrategy needs an optimizer for the clients, but `configure_optimizers` "
                "returned None. Return one, for example "
                "torch.optim.SGD(self.parameters(), lr=0.01)."
            )
        optimizers, schedulers = read_optimizers(module, configured, checks.check_optimizers)
        checks.check_trains(module, optimizers)
        for group in (g for each in optimizers for g in each.param_groups if schedulers):
            group.setdefault("initial_lr", group["lr"])  # ReduceLROnPlateau doesn't
        assert self.lightning_module is not None
        return ClientTraining(self.lightning_module.trainer, module, optimizers, schedulers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a minibatch of Lightning's own loop, and require a loss of it.

        A module that steps its optimizers itself needs none.
        """
        out = super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            read_loss(out)
        return out

    def on_exception(self, exception: BaseException) -> None:
        """Save a fit that was interrupted by SIGINT or SIGTERM, and say how to go on."""
        super().on_exception(exception)
        trainer = self._stage.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if trainer.sanity_checking or not is_interrupt(exception):
            return
        path, loop = path_of_last(trainer), fit_loop(trainer)
        # After Ctrl-C the other processes may not answer; SIGTERM ends all after the same round.
        alone = self.federation.ranks.size == 1 or not isinstance(exception, KeyboardInterrupt)
        if path is None or not alone or loop.stage == STORING:
            rank_zero_info(
                f"The run was interrupted after {self.federation.rounds} rounds and isn't saved. "
                "Go on from its last checkpoint, if it has one, with `ckpt_path`."
            )
            return
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(
            f"The run was interrupted after {self.federation.rounds} rounds and is saved to "
            f"{str(path)!r}. Go on with `ckpt_path={str(path)!r}`; in the same folder "
            "`ckpt_path='last'` finds it."
        )

    def teardown(self) -> None:
        """Leave the device; the federation moves to the host, where its models stay available."""
        if self._undo is not None:
            self._undo()
        self._undo = None
        self._stage.lock.release()
        self.federation.fitting = False
        if (trainer := self._stage.trainer) is not None:
            # After an interrupt the other processes may not answer.
            if trainer.state.status != TrainerStatus.INTERRUPTED:
                self.federation.gather_to_all_ranks(KEPT_ON_ALL_RANKS)
            self.federation.move("cpu", "cpu")
        super().teardown()

    # --- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Add the federation's state to Lightning's checkpoint and write it."""
        if self._stage.trainer is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        federation, sharded = self.federation, self.state_dict_type == "sharded"
        checkpoint["federated"] = {
            **(federation.shared_state() if sharded else federation.state_dict()),
            "optimizers": [type(template).__name__ for template in self.optimizers],
            "run": self._stage.run_settings(self._stage.trainer),
            "local_steps": [one.steps for one in self._client_training],
            "partition": self._stage.partition,
        }
        if sharded:
            checks.check_sharded(filepath, storage_options)
            write_shards(Path(filepath), checkpoint, federation.own_state(), self.ranks)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, by default without running code from it (``weights_only=True``)."""
        # Lightning's default differs for remote paths.
        safely = True if weights_only is None else weights_only
        if Path(checkpoint_path).is_dir():
            require_checkpoint(checkpoint_path)
            return require_lightning(read_shards(checkpoint_path, safely), checkpoint_path)
        check_file(checkpoint_path)
        with explain_read_errors(checkpoint_path):
            try:
                checkpoint = super().load_checkpoint(checkpoint_path, safely)
            except FileNotFoundError:
                if "://" not in str(checkpoint_path):  # A URL is of another machine.
                    require_checkpoint(checkpoint_path)
                raise
        return require_lightning(checkpoint, checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module, and keep the federation's state until `setup` knows the clients."""
        assert self.lightning_module is not None
        saved, method = federated_part(checkpoint), self.federation.method
        split = parameter_splits(self.lightning_module, method)
        check_parameter_split(saved, type(method).__name__, describe(split))
        check_settings(saved, method.settings(), method.state_settings)
        super().load_model_state_dict(checkpoint, strict)
        self._stage.saved = saved
        self._saved_optimizers = saved_optimizers(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the settings of the clients' optimizers, as schedulers left them."""
        scheduled = bool(self.lr_scheduler_configs)
        for one, saved in zip(self.optimizers, saved_optimizers(checkpoint), strict=False):
            load_optimizer(one, *saved, scheduled)
        steps = federated_part(checkpoint).get("local_steps", ())
        for training, taken in zip(self._client_training, steps, strict=False):
            training.steps = taken


def with_default_method() -> FederatedStrategy:
    """Make the strategy of ``Trainer(strategy="federated")``, with FedAvg as default method."""
    strategy = FederatedStrategy()
    strategy._default_method = FedAvg
    return strategy
