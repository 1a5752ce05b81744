"""Setup of federation and engines when a stage of the Trainer begins."""

from __future__ import annotations

import ast
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_pfl._lightning import connected, log_settings
from lightning_pfl.contract.records import FitPlan
from lightning_pfl.core.files import FolderLock
from lightning_pfl.data.datamodule import FederatedDataModule
from lightning_pfl.data.datasets import FederatedTensorDataset
from lightning_pfl.engine.cuda_graphs import require_graphs
from lightning_pfl.engine.select import EngineName, SelectedEngine
from lightning_pfl.federation.architectures import make_architectures, parameter_splits, table
from lightning_pfl.federation.checkpoint import merge_clients
from lightning_pfl.federation.client_states import choose_device
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.log_folder import log_folder
from lightning_pfl.methods.base import Method
from lightning_pfl.trainer import checks
from lightning_pfl.trainer.client_loop import ClientTraining
from lightning_pfl.trainer.evaluation_loop import FederatedEvaluationLoop
from lightning_pfl.trainer.parts import engine_settings, federated_loops, fit_loop
from lightning_pfl.trainer.prediction_loop import FederatedPredictionLoop

_PERSONALIZED_BY: WeakKeyDictionary[L.LightningModule, str] = WeakKeyDictionary()
"""The method that has trained a module for clients with personal parts; empty for one without."""
ClientStateDevice = Literal["auto", "device", "host"]


class StageSetup:
    """Begins, continues or restores a federation when a stage of the Trainer begins.

    Args:
        federation: The federation.
        engine, seed, chunk_size, feature_cache, client_state_device, cuda_graphs: As for
            :class:`~lightning_pfl.FederatedStrategy`.

    Attributes:
        saved: The federation's part of a checkpoint, until its clients are known; else None.
        partition: Digest of the samples of the last fit's clients; None without a data module.
    """

    def __init__(
        self,
        federation: Federation,
        engine: EngineName,
        seed: int | None,
        chunk_size: int | None,
        feature_cache: bool,
        client_state_device: ClientStateDevice,
        cuda_graphs: bool,
    ) -> None:
        self.federation, self.engine, self.seed = federation, engine, seed
        self.chunk_size, self.feature_cache = chunk_size, feature_cache
        self.client_state_device, self.cuda_graphs = client_state_device, cuda_graphs
        self.saved: Mapping[str, Any] | None = None
        self.partition: str | None = None
        self._owner: tuple[L.Trainer, L.LightningModule, Method, tuple[str, ...]] | None = None
        self.lock = FolderLock()

    def lock_folder(self, trainer: L.Trainer) -> None:
        """Keep the loggers' folder for this run, until the stage ends.

        Raises:
            MisconfigurationException: If another run has it.
        """
        folder, problem = None if trainer.predicting else log_folder(trainer), ""
        if folder is not None and (owner := self.lock.take(folder)):
            problem = (
                f"Expected a folder for this run alone, but got {str(folder)!r}, into which "
                f"{owner} writes. Wait for its end, or give the logger another name or version."
            )
        # All processes end, and none waits for the one that has asked.
        if any(problems := self.federation.ranks.all_gather_objects(problem)):
            raise MisconfigurationException("".join(problems))

    @property
    def trainer(self) -> L.Trainer | None:
        """The Trainer of the federation; None before the first stage."""
        return None if self._owner is None else self._owner[0]

    def begin(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        device: torch.device,
        training: Sequence[ClientTraining],
    ) -> None:
        """Prepare the federation for a stage.

        A new one begins if Trainer, module, method or clients differ from those of the last stage.

        Args:
            trainer: The Trainer, with the federated loops.
            module: The user's module.
            device: Where clients train.
            training: The optimizers of each architecture's clients; used in a fit alone.

        Raises:
            MisconfigurationException: If processes, module or Trainer don't fit.
            CheckpointMismatchError: If the checkpoint doesn't fit.
        """
        federation = self.federation
        names, num_samples = self._clients(trainer, module)
        digests = federation.ranks.all_gather_objects(checks.digest_clients(names, num_samples))
        checks.check_same_clients(digests)
        owner = (trainer, module, federation.method, names)
        fresh, saved = owner != self._owner, self.saved
        if fresh or saved is not None:
            federation.seed = self._choose_seed()
        checks.check_keeps_optimizers(federation.method, federation.keeps_optimizers)
        split = parameter_splits(module, federation.method)
        checks.check_one_process(len(split), federation.ranks.size)
        fitting = trainer.state.fn == TrainerFn.FITTING
        choose = partial(choose_device, self.client_state_device, device)
        if fresh:
            if saved is None:
                self._check_begins(trainer, module)
            architectures = make_architectures(module, split, names)
            federation.begin(module, architectures, names, num_samples, choose)
            self._owner = owner
        federation.knows_owners = True
        self._split_data(trainer)
        federation.bind_method()
        if not fresh and saved is None:
            checks.check_unchanged(module, federation.changed_outside())
        stores = [architecture.client_states for architecture in federation.architectures]
        for store in stores:
            store.keep_shard()
        federation.keep_own_best()
        federation.move(device, choose(sum(store.nbytes() for store in stores)))
        if num_samples.any():
            federation.num_samples = num_samples
        if saved is not None:
            federation.load_state_dict(saved)
            if fitting:
                self._warn_of_other_settings(trainer, saved.get("run", {}))
        federation.fitting = fitting
        if fitting and not federation.keeps_best:
            federation.best = {}
        self._compare_partitions(trainer, fresh, saved)
        self.saved = None
        self._begin_engines(trainer, training, fresh, saved)
        if fitting:
            self._begin_fit(trainer, module)

    def _check_begins(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Check that a stage may begin a federation without a checkpoint."""
        if trainer.state.fn == TrainerFn.FITTING:
            checks.check_unused(trainer)
            checks.check_finite(module)
            return
        if self._owner is not None:
            checks.check_kept(trainer, self._owner[0], self.federation.rounds)
        _warn_of_lost_parts(module)

    def _begin_fit(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Find who can learn, note the module as it is, and say what runs."""
        federation, loop = self.federation, fit_loop(trainer)
        loop.find_learners()
        splits = [architecture.parameter_split for architecture in federation.architectures]
        loop.module_at_start = checks.ModuleAtStart(splits, module, connected(trainer).callbacks)
        _note_parts(federation, module)
        self._report(trainer)
        log_settings(trainer, self._settings(trainer))

    def _split_data(self, trainer: L.Trainer) -> None:
        """Let the data module and the loops keep the samples of this process's clients alone."""
        federation = self.federation
        if not federation.splits_data or federation.ranks.size == 1:
            return
        keep = getattr(trainer.datamodule, "keep_clients", None)  # type: ignore[attr-defined]
        if keep is not None:
            keep(federation.own_names())
        for loop in federated_loops(trainer):
            loop.keep_own(again=keep is not None)

    def _settings(self, trainer: L.Trainer) -> dict[str, Any]:
        """Collect the settings of the run for loggers, under the names of a recipe."""
        federation, method = self.federation, self.federation.method
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        flags = {
            "accumulate_grad_batches": 1,
            "gradient_clip_val": None,
            "limit_train_batches": 1.0,
            "overfit_batches": 0.0,
            "precision": "32-true",
        }
        found: dict[str, Any] = {
            "method": type(method).__name__,
            "model": type(trainer.lightning_module).__name__,
            "trainer.max_epochs": trainer.max_epochs,
            **{
                f"trainer.{name}": getattr(connected(trainer), name)
                for name, usual in flags.items()
                if getattr(connected(trainer), name) != usual
            },
            **{f"method.{name}": _value(text) for name, text in method.settings().items()},
            "trainer.strategy.participation": federation.participation,
            "trainer.strategy.max_update_norm": federation.max_update_norm,
            "trainer.strategy.seed": federation.seed,
            "data.num_clients": federation.num_clients,
        }
        if federation.evaluated_clients != 1.0:
            found["trainer.strategy.evaluated_clients"] = federation.evaluated_clients
        if isinstance(data, FederatedDataModule):
            found |= {f"data.{name}": value for name, value in data.settings().items()}
        return found

    def _compare_partitions(
        self, trainer: L.Trainer, fresh: bool, saved: Mapping[str, Any] | None
    ) -> None:
        """Warn if the clients have been trained on other samples than those of the data module."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        now = data.digest() if isinstance(data, FederatedDataModule) else None
        if saved is not None:
            self.partition = saved.get("partition")
        elif fresh:
            self.partition = None
        if None not in (now, self.partition) and now != self.partition:
            rank_zero_warn(
                "The clients were trained on other samples than those of this data module, so "
                "models may be evaluated on training data of other clients. Use the source, the "
                "partition and the seed of that fit."
            )
        if trainer.state.fn == TrainerFn.FITTING:
            self.partition = now

    def run_settings(self, trainer: L.Trainer) -> dict[str, str]:
        """Return the settings of the run, besides the method's, that decide what a round does."""
        data = fit_loop(trainer).data
        known: dict[str, object] = {
            "participation": self.federation.participation,
            "evaluated_clients": self.federation.evaluated_clients,
            "max_update_norm": self.federation.max_update_norm,
            "keep_optimizer_state": self.federation.keeps_optimizers,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "limit_train_batches": trainer.limit_train_batches,
            "overfit_batches": connected(trainer).overfit_batches,
        }
        if isinstance(data, FederatedTensorDataset):
            known |= {"batch_size": data.batch_size, "drop_last": data.drop_last}
        return {name: repr(value) for name, value in known.items()}

    def _warn_of_other_settings(self, trainer: L.Trainer, saved: Mapping[str, str]) -> None:
        now = self.run_settings(trainer)
        changed = [
            f"{name} was {saved[name]}, is {value}"
            for name, value in now.items()
            if saved.get(name, value) != value
        ]
        if changed:
            rank_zero_warn(
                "The run continues with other settings than the checkpoint's: "
                f"{'; '.join(changed)}."
            )

    def _clients(
        self, trainer: L.Trainer, module: L.LightningModule
    ) -> tuple[tuple[str, ...], Tensor]:
        """Return names and training samples of the training data, the checkpoint, or this split."""
        federation = self.federation
        if trainer.state.fn == TrainerFn.FITTING:
            fit = fit_loop(trainer)
            data = fit.require_data()
            if self.saved is None:
                return tuple(data.names), data.num_samples
            names = merge_clients(self.saved, data.names, data.named)
            fit.arrange(names)
            before = torch.zeros(len(names), dtype=torch.int64)
            before[: len(self.saved["clients"])] = self.saved["num_samples"]
            return names, fit.counts(before)
        if self.saved is not None:
            return tuple(self.saved["clients"]), self.saved["num_samples"]
        if self._owner is not None and self._owner[:3] == (trainer, module, federation.method):
            return federation.client_names, federation.num_samples
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        data = cast("FederatedPredictionLoop | FederatedEvaluationLoop", loop).load()
        return tuple(data.names), torch.zeros(data.num_clients, dtype=torch.int64)

    def _choose_seed(self) -> int:
        saved = None if self.saved is None else int(self.saved["seed"])
        if saved is not None and self.seed not in (None, saved):
            rank_zero_warn(
                f"The run continues with the checkpoint's seed {saved}, not with seed={self.seed}."
            )
        if saved is not None:
            return saved
        if self.seed is not None:
            return self.seed
        # `seed_everything` sets this variable, according to its documentation.
        from_environment = os.environ.get("PL_GLOBAL_SEED")
        drawn = int(from_environment) if from_environment else secrets.randbits(31)
        return int(self.federation.ranks.all_gather_objects(drawn)[0])

    def _begin_engines(
        self,
        trainer: L.Trainer,
        training: Sequence[ClientTraining],
        fresh: bool,
        saved: Mapping[str, Any] | None,
    ) -> None:
        federation, fitting = self.federation, trainer.state.fn == TrainerFn.FITTING
        settings = engine_settings(trainer, federation.seed, self.chunk_size, self.feature_cache)
        if fitting and self.cuda_graphs:
            require_graphs(settings.device)
            settings.cuda_graphs = True
        if not (fresh or fitting):
            # The engines of the fit were chosen; they read the settings when they run.
            vars(federation.settings).update(vars(settings))
            if saved is not None:
                for architecture in federation.architectures:
                    # `Federation.client_optimizer` then makes the checkpoint's.
                    architecture.optimizer = None
            return
        federation.settings = settings
        # A choice that the checkpoint's run has made is repeated, so that it goes on bit by bit.
        found = (saved or {}).get("probed_engines", {})
        for architecture in federation.architectures:
            architecture.optimizer = architecture.schedule = None
            architecture.engine = SelectedEngine(
                self.engine,
                architecture.module,
                architecture.parameter_split,
                settings,
                found=found.get(architecture.name),
                group=architecture.name if len(federation.architectures) > 1 else "",
                agree=federation.ranks.agreement(),
            )
        if fitting:
            self.use(training)

    def use(self, training: Sequence[ClientTraining]) -> None:
        """Let clients train with these optimizers."""
        for architecture, one in zip(self.federation.architectures, training, strict=True):
            architecture.optimizer, architecture.schedule = one.optimizers[0], one.schedule
            architecture.engine.loop, architecture.counts_steps = one.loop, one.counts_steps
        assert self.trainer is not None
        fit_loop(self.trainer).training = training

    def local_steps(self, trainer: L.Trainer) -> int:
        """Count the steps of the longest phase of a round, of the client with most steps."""
        data = fit_loop(trainer).require_data()
        clients = torch.arange(data.num_clients)
        counts = [
            int(self.federation.count_steps(data, clients, (phase,)).max())
            for phase in self.federation.method.phases(trainer.current_epoch)
        ]
        return max(counts, default=1)

    def _report(self, trainer: L.Trainer) -> None:
        federation = self.federation
        rank_zero_info(
            f"{type(federation.method).__name__} with {federation.num_clients} clients, "
            f"{trainer.num_training_batches} a round; engine {self.engine}; seed "
            f"{federation.seed}. Parameters and buffers:\n{table(federation.architectures)}"
        )
        found = [
            (
                *architecture.parameter_split.notes(),
                *architecture.method.notes(architecture.parameter_split),
            )
            for architecture in federation.architectures
        ]
        if fit_loop(trainer).trains_nothing:
            found += [("All local epochs and steps are 0: clients train nothing.",)]
        found += [_who_trains(federation, trainer.current_epoch)]
        for note in dict.fromkeys(note for notes in found for note in notes):
            rank_zero_info(note)
        if problem := federation.method.check_fit(_plan(trainer)):
            rank_zero_warn(problem)


def _who_trains(federation: Federation, round: int) -> tuple[str, ...]:
    """Say where a method trains all clients, whatever the participation is."""
    method, share = federation.method, federation.participation
    everyone = share == 1 if isinstance(share, float) else share == federation.num_clients
    if everyone or not method.full_participation(round):
        return ()
    when = "every round" if method.full_participation(round + 1) else f"round {round}"
    return (f"{type(method).__name__} trains all clients in {when}, not participation={share}.",)


def _value(text: str) -> Any:
    """Return the plain value that a setting's text means; other texts as they are."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return found if found is None or isinstance(found, (int, float, str)) else text


def _note_parts(federation: Federation, module: L.LightningModule) -> None:
    personal = any(
        architecture.method.personalized_entries(architecture.parameter_split)
        for architecture in federation.architectures
    )
    _PERSONALIZED_BY[module] = type(federation.method).__name__ if personal else ""


def _warn_of_lost_parts(module: L.LightningModule) -> None:
    """Warn of a module without its clients, which another Trainer has trained."""
    if method := _PERSONALIZED_BY.get(module):
        rank_zero_warn(
            f"{type(module).__name__} holds the shared part of a federation that another Trainer "
            f"has trained with {method}; this Trainer evaluates it without the clients' personal "
            "parts. Use the Trainer of the fit, or pass ckpt_path."
        )


def _plan(trainer: L.Trainer) -> FitPlan:
    """Collect the facts about a fit that a method may know."""
    endless = trainer.max_epochs is None or trainer.max_epochs < 0
    rounds = None if endless else trainer.max_epochs
    return FitPlan(rounds, connected(trainer).reload_dataloaders_every_n_epochs)
