"""FederatedLoop: a fit loop whose epochs are communication rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from torch import Tensor

from lightning_pfl._lightning import (
    ConnectedTrainer,
    DataHolder,
    FitLoop,
    call_hooks,
    call_module_hook,
    count_server_update,
    log_directly,
    log_values,
    publish_round,
    remember_metrics,
    send_round,
    set_rounds,
    step_schedulers,
    stop_if_terminated,
    validates_after_round,
)
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.local import Phase
from lightning_pfl.contract.records import LocalResult, Round
from lightning_pfl.contract.returned import require_same_tree
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.core.tree import Tree, rows
from lightning_pfl.data.datasets import FederatedDataset, as_federated, label_counts
from lightning_pfl.data.public import PublicData
from lightning_pfl.engine.base import require_public
from lightning_pfl.engine.checks import is_ours
from lightning_pfl.engine.minibatches import count_ready_batches
from lightning_pfl.federation.cohort import Cohort
from lightning_pfl.federation.eligibility import (
    check_budgets,
    learners,
    require_samples,
    warn_of_single_samples,
)
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.gate import Verdict
from lightning_pfl.federation.sampling import sample_cohort
from lightning_pfl.federation.server_training import train_server
from lightning_pfl.metrics.history import without_summary
from lightning_pfl.trainer.board_layout import add_summary
from lightning_pfl.trainer.checks import ModuleAtStart, check_flags_stay
from lightning_pfl.trainer.client_loop import ClientLoop, ClientTraining
from lightning_pfl.trainer.data import by_client, due_reload, placed
from lightning_pfl.trainer.progress import ClientProgress, profiled
from lightning_pfl.trainer.round_log import RoundLog

READERS = (
    "on_local_training_end",
    "on_aggregation_start",
    "on_aggregation_end",
    "on_round_end",
)
"""Hooks of callbacks that get the uploads of a round."""
LOOK_AHEAD = 64
"""Number of rounds in which a method must train at least once."""
# Progress of the current round, for a checkpoint written inside it. Before OPEN's end nothing of
# it counts.
OPEN, TRAINED, VALIDATED, CLOSED = "open", "trained", "validated", "closed"
ENDED = "ended"
"""Callbacks and the module have seen the round's end; those that monitor its values haven't yet."""
INSIDE = (TRAINED, VALIDATED, ENDED)
STORING = "storing"
"""Some of the round counts, and some not yet: no checkpoint is written."""


def _no_silent_end(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Raise an error for a StopIteration, by which Lightning would end the fit silently."""

    @wraps(function)
    def run(loop: Any) -> None:
        try:
            function(loop)
        except StopIteration as cause:
            raise RuntimeError(
                "Expected a round to run to its end, but a step, a callback or the data raised "
                "StopIteration. Check the error above; it often comes from `next(...)` on an "
                "exhausted iterator."
            ) from cause

    return run


class FederatedLoop(FitLoop):
    """Runs rounds instead of epochs; every Lightning hook fires as usual.

    ``on_train_batch_start`` and ``on_train_batch_end`` fire once for each client of the cohort,
    for callbacks, with the client's id as ``batch``, the number of clients before it as
    ``batch_idx``, and its mean loss in ``outputs``. The last client's end comes after the server's
    update. A module's are called for each minibatch of each client; see ``client_loop.py``.

    Attributes:
        federation: The state of the run.
        data: The training data.
        members: The federation's clients, where the data may be of some of them, in any order.
        present: Which of them the data have, bool ``(clients,)``; None for all.
        module_at_start: The module as the fit or the last round left it.
        training: The optimizers and schedulers of each architecture's clients.
        stage: How far the current round is.
        log: What the current round logs, and what was warned of.
        trains_nothing: Whether the method has no local step, as its budgets are 0.
    """

    trainer: ConnectedTrainer
    federation: Federation
    module_at_start: ModuleAtStart
    log: RoundLog
    training: Sequence[ClientTraining] = ()
    data: FederatedDataset | None = None
    members: tuple[str, ...] = ()
    present: Tensor | None = None
    stage: str = CLOSED
    trains_nothing: bool = False
    _seconds: float = 0.0  # of the current round without its evaluation; 0 if unknown
    _learners: Tensor | None = None
    _restored: dict[str, Any] | None = None
    _uploads_are_read: bool = True
    _public: PublicData | None = None
    _left_out: str | None = ""  # why the last round left out all clients; None once one did not

    # --- data -------------------------------------------------------------------------------------

    def require_data(self) -> FederatedDataset:
        """Load the training data, unless they are loaded.

        Raises:
            MisconfigurationException: If there is no source of training data.
        """
        if self.data is None or self._combined_loader is None:
            if not self._data_source.is_defined():
                raise MisconfigurationException(
                    "Expected training data, which the method also needs for evaluation, but got "
                    "none. Pass a FederatedDataModule, or define `train_dataloader`."
                )
            data = as_federated(self._data_source.dataloader(), what="train_dataloaders")
            self.data = placed(count_ready_batches(data), self.trainer, self.federation)
            self._combined_loader = DataHolder(self.data)  # type: ignore[assignment]
            self.present = None
            if self.members:
                self.arrange(self.members)
        return self.data

    def keep_own(self, again: bool) -> None:
        """Keep the samples of this process's clients alone, now that it's known whose they are.

        Args:
            again: Whether the source has dropped the others, too.
        """
        if self.data is not None and self._combined_loader is not None:
            self._combined_loader = None
            if not again:
                self.data = placed(self.data, self.trainer, self.federation)
                self._combined_loader = DataHolder(self.data)  # type: ignore[assignment]
            self.require_data()

    def arrange(self, members: tuple[str, ...]) -> None:
        """Give the data a row for each of the federation's clients, empty for those without."""
        data, self.members = self.require_data(), members
        if tuple(data.names) != members:
            here = {*data.names}
            self.present = torch.tensor([name in here for name in members])
            self.data = by_client(data, members, "train_dataloaders")
            self._combined_loader = DataHolder(self.data)  # type: ignore[assignment]

    def setup_data(self) -> None:
        """Load the training data, again after ``reload_dataloaders_every_n_epochs`` rounds."""
        if self._combined_loader is not None and not self._should_reload_train_dl:
            return
        if self.trainer.limit_train_batches == 0:
            return
        self._combined_loader = None
        data = self.require_data()
        require_samples(data, self._fate, warn=self._last_train_dl_reload_epoch < 0)
        self._learners = None
        self.max_batches = len(self._draw(0))
        self._last_train_dl_reload_epoch = due_reload(self.trainer)

    def find_learners(self) -> None:
        """Find the clients that can take a step, and may be sampled.

        Raises:
            MisconfigurationException: If there are none.
        """
        trainer, method, start = self.trainer, self.federation.method, self.trainer.current_epoch
        if trainer.limit_train_batches == 0:
            return
        # Methods may have rounds without training.
        rounds = (method.phases(number) for number in range(start, start + LOOK_AHEAD))
        phases = next((phases for phases in rounds if phases), ())
        flag = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
        limit = f"{flag}={getattr(trainer, flag)!r}"
        data = self.require_data()
        self._learners = learners(self.federation, data, phases, limit, self._fate)
        check_budgets(phases, data.names, self._learners)
        training = [phase for phase in phases if not phase.evaluate_only]
        self.trains_nothing = bool(training) and not any(p.epochs or p.steps for p in training)
        if phases and not trainer.overfit_batches and trainer.limit_train_batches == 1.0:
            warn_of_single_samples(data, self._learners, trainer.lightning_module)
        some = torch.zeros(data.num_clients, dtype=torch.bool)
        some[self._learners] = True
        self.federation.know_data(some, label_counts(data))
        self.max_batches = len(self._draw(start))

    def counts(self, before: Tensor) -> Tensor:
        """Return the clients' training samples; of those who left, as many as ``before``."""
        now = self.require_data().num_samples
        return now if self.present is None else now.where(self.present, before)

    @property
    def _fate(self) -> str:
        """Describe the consequence for clients that can't take a step."""
        idle = self.federation.method.include_clients_without_data
        return "take part without local steps" if idle else "are never sampled"

    def _check_reloaded(self, data: FederatedDataset) -> None:
        names = self.federation.client_names
        # They usually are the same object; to compare many names in every round takes time.
        if data.names is not names and tuple(data.names) != names:
            raise MisconfigurationException(
                f"Expected reloaded training data to hold the same {self.federation.num_clients} "
                f"clients, but got {data.num_clients} clients or other names. Return the same "
                "clients in the same order from `train_dataloader`."
            )
        self.federation.num_samples = self.counts(self.federation.num_samples)

    def _draw(self, round: int) -> Tensor:
        federation, eligible = self.federation, self._learners
        if federation.method.include_clients_without_data:
            everyone = torch.arange(self.require_data().num_clients)
            eligible = everyone if self.present is None else everyone[self.present]
        elif eligible is None:
            eligible = self.require_data().num_samples.nonzero().flatten()
        share = 1.0 if federation.method.full_participation(round) else federation.participation
        return sample_cohort(federation.seed, round, eligible, share) if len(eligible) else eligible

    # --- the run ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Continue where the last run or the checkpoint stopped, also inside a round."""
        torch.set_grad_enabled(True)
        if self._restored is not None:
            remember_metrics(self.trainer, without_summary(self._restored["callback_metrics"]))
        self._restored, self._left_out = None, ""
        self._uploads_are_read = self._find_readers()

    def _count_rounds(self) -> None:
        """Count a round as finished once its stage is closed."""
        updates = self.epoch_loop.global_step
        inside = self.stage in INSIDE
        set_rounds(self, finished=updates - inside, begun=updates)

    def _find_readers(self) -> bool:
        """Whether a callback may look at the uploads of each client, in any process."""
        ranks, method = self.federation.ranks, self.federation.method
        if ranks.alone:
            return True  # they are all here
        found = any(
            getattr(type(callback), hook) is not getattr(FederatedCallback, hook)
            for callback in self.trainer.callbacks
            if isinstance(callback, FederatedCallback) and callback is not method
            for hook in READERS
        )
        return any(ranks.all_gather_objects(found))

    @_no_silent_end
    def on_advance_start(self) -> None:
        """Begin a round, unless a resumed one is in progress."""
        self.setup_data()
        self._check_reloaded(self.require_data())
        if self._learners is None:
            self.find_learners()
        if self.stage in INSIDE:
            return
        self.stage = OPEN
        self.epoch_progress.increment_ready()
        call_hooks(self.trainer, "on_train_epoch_start")
        self.module_at_start.check()
        check_flags_stay(self.trainer, self.federation.settings)
        self.epoch_progress.increment_started()

    @_no_silent_end
    def advance(self) -> None:
        """Run one round: train and aggregate, then validate if due."""
        profile = self.trainer.profiler.profile
        if self.stage == OPEN:
            begin = time.perf_counter()
            with profile("run_training_epoch"):
                round, cohort = self._begin_round()
                clients = self._progress(round.info.index)
                try:
                    with profile(profiled("training_step")):
                        validation = self._validation_data(cohort.phases)
                        public = self._public_data()
                        method = self.federation.method
                        own = any(phase.data == "public" for phase in cohort.phases)
                        if own or method.server_phases(round.number):
                            require_public(public, method)  # before the clients train in vain
                        gate = not self._each_is_read(round)
                        data = self.require_data()
                        work = cohort.train(data, clients.finished, validation, public, gate)
                finally:  # also where a step fails
                    self._report_validation()
                clients.finish(work.loss)
                self._aggregate(round, cohort, work)
                clients.release()
            self._seconds = time.perf_counter() - begin
        self._log()
        if self.stage == TRAINED and self._validation_due():
            self._validate()

    def _validation_data(self, phases: tuple[Phase, ...]) -> FederatedDataset | None:
        """Return the validation split by client id, if a phase measures on it and there is one."""
        validation: Any = self.epoch_loop.val_loop
        needed = any(phase.data == "validation" for phase in phases)
        if not needed or not validation._data_source.is_defined():
            return None
        names = self.federation.client_names
        found = by_client(validation.load(), names, "val_dataloaders")
        return found if found.num_samples.any() else None

    def _public_data(self) -> PublicData | None:
        """Return the public samples, if the method needs them and there are some."""
        method = self.federation.method
        if method.needs_public_data and self._public is None:
            owners = (self.trainer.datamodule, self.trainer.lightning_module)
            loads = [getattr(owner, "public_dataloader", None) for owner in owners]
            source = next((load() for load in loads if callable(load)), None)
            if source is not None:
                names, seed = self.federation.client_names, self.federation.seed
                public = PublicData(source, seed, method.public_samples, names)
                self._public = public.to(self.federation.settings.device)
        return self._public

    def _begin_round(self) -> tuple[Round, Cohort]:
        """Draw the clients and send them the server's trees."""
        federation, method, data = self.federation, self.federation.method, self.require_data()
        number = self.trainer.current_epoch
        phases = method.phases(number)
        drawn = self._draw(number)
        info = federation.info(drawn, number, federation.count_steps(data, drawn, phases))
        round = Round(number, info, server=federation.server)
        self.log.warn(method.warnings_before(federation, round))
        self._hook("on_round_start", round)

        round.received = federation.download(info)
        cohort = federation.cohort(info, round.received, phases)
        cohort.exchange("before")
        self._hook("on_local_training_start", round)
        return round, cohort

    def _aggregate(self, round: Round, cohort: Cohort, work: LocalResult) -> None:
        """Update the server from the accepted uploads, and store the client states."""
        federation, method = self.federation, self.federation.method
        uploads, verdict = self._accept(round, cohort, work)
        server, refused = self._updated_server(round, cohort, uploads, verdict)
        self.log.add_messages(round, cohort.exchanged)
        if refused:
            self.log.refuse_server(federation, round, verdict, refused)
        self.stage = STORING
        if not refused:
            cohort.store()
        if len(round.rejected) < len(round.info):
            self._left_out = None
        elif round.rejected and self._left_out is not None:
            self._left_out = next(iter(round.rejected.values()))
        self.module_at_start.check_values()
        federation.commit(server)
        self.module_at_start.renew()
        count_server_update(self)
        for training in self.training:
            steps = 0 if training.schedule is None else self._longest(cohort.phases, round)
            training.end_round(steps, federation.ranks.all_gather_objects)
        step_schedulers(self, plateau=False)
        self.stage = TRAINED
        self._hook("on_aggregation_end", round)
        measured = method.measure(federation, round)
        round.metrics.update(measured)
        self.log.add(measured)
        self.log.warn(method.warnings_after(federation, round))
        self._hook("on_round_end", round)

    def _accept(self, round: Round, cohort: Cohort, work: LocalResult) -> tuple[Tree, Verdict]:
        """Reduce the cohort to accepted clients; return their uploads, and the gate's verdict."""
        each = self._each_is_read(round)
        if each:
            cohort.gather_uploads(work)
            round.uploads = work.uploads
        self._hook("on_local_training_end", round)

        verdict = cohort.accept_uploads(work)
        if not each:
            work.uploads = cohort.average_uploads(work, verdict.accepted)
        uploads, round.rejected = work.uploads, verdict.rejected
        self.log.record(self.federation, round, work, verdict)
        if round.rejected:
            accepted = verdict.accepted.nonzero().flatten()
            uploads = rows(uploads, accepted.to(cohort.device))
        round.uploads = uploads
        self._hook("on_aggregation_start", round)
        return uploads, verdict

    def _updated_server(
        self, round: Round, cohort: Cohort, uploads: Tree, verdict: Verdict
    ) -> tuple[Tree, str]:
        """Return the server's new tree; or the one before, and why the new one is refused."""
        federation, method = self.federation, self.federation.method
        before, info = federation.server, cohort.info
        if not len(info):
            return before, ""
        with self.trainer.profiler.profile("aggregation"):
            # A user's method may draw: the same numbers in a resumed run and in all processes.
            key = derive(federation.seed, "server update", round.number)
            draws = nullcontext() if is_ours(method) else seeded(key, everything=True)
            with draws:
                server = method.server_update(before, uploads, info)
            server = require_same_tree(before, server, method)
            if method.server_phases(round.number):
                server = train_server(federation, server, uploads, info, self._public_data())
            if refused := federation.refuse_step(server, verdict):
                return before, refused
            cohort.exchange("after")
        return server, ""

    def _each_is_read(self, round: Round) -> bool:
        """Whether a callback or the server looks at the upload of each client."""
        method = self.federation.method
        each = self._uploads_are_read or method.needs_each_upload
        return each or bool(method.server_phases(round.number))

    def _longest(self, phases: tuple[Phase, ...], round: Round) -> int:
        """Count the steps of the longest phase of the client with most steps."""
        data, clients = self.require_data(), round.info.index
        counts = [self.federation.count_steps(data, clients, (phase,)) for phase in phases]
        return max((int(count.max()) for count in counts if len(count)), default=0)

    def _progress(self, cohort: Tensor) -> ClientProgress:
        self.epoch_loop.batch_progress.reset_on_run()
        self.max_batches = len(cohort)
        return ClientProgress(
            self.trainer, self.federation.ranks, self.epoch_loop, cohort, "train", hold_last=True
        )

    def _hook(self, name: str, round: Round) -> None:
        for callback in self.trainer.callbacks:
            if isinstance(callback, FederatedCallback):
                with self.trainer.profiler.profile(f"[Callback]{callback.state_key}.{name}"):
                    getattr(callback, name)(self.trainer, self.trainer.lightning_module, round)

    # --- after a round ---

    def _log(self) -> None:
        log, trainer, results = self.log, self.trainer, self.epoch_loop._results
        log_values(trainer, results, "training_step", log.values, log.prog_bar, log.logger)
        publish_round(trainer)

    def _should_accumulate(self) -> bool:
        # A round is one step; accumulation happens inside the clients.
        inside = isinstance(self.epoch_loop, ClientLoop)
        return inside and self.epoch_loop._should_accumulate()

    def _validation_due(self) -> bool:
        trainer = self.trainer
        if trainer.check_val_every_n_epoch is None:
            return bool(
                trainer.enable_validation
                and (trainer.current_epoch + 1) % trainer.val_check_interval == 0
            )
        return validates_after_round(self)

    def _validate(self) -> None:
        self.trainer.validating = True
        call_module_hook(self.trainer, "on_validation_model_zero_grad")
        self.epoch_loop.val_loop.run()
        self.trainer.training = True

    def _report_validation(self) -> None:
        """Read and log the values of the last validation, if a device may still compute them."""
        validation: Any = self.epoch_loop.val_loop
        validation.report()

    def validated(self) -> None:
        """Called by the validation loop between its values and the hooks that write checkpoints."""
        step_schedulers(self, plateau=True)
        self.stage = VALIDATED

    @_no_silent_end
    def on_advance_end(self) -> None:
        """End the round: callbacks, schedulers that use values, loggers."""
        trainer = self.trainer
        if self.stage == TRAINED:
            step_schedulers(self, plateau=True)
        self.epoch_progress.increment_processed()
        if self.stage != ENDED:
            self.stage = ENDED
            call_hooks(trainer, "on_train_epoch_end", monitoring=False)
        self.stage = CLOSED
        call_hooks(trainer, "on_train_epoch_end", monitoring=True)
        # For the loggers alone: values of a run that callbacks see are the same each time.
        send_round(self, {"round/seconds": self._seconds} if self._seconds else {})
        self._seconds = 0.0
        self.epoch_progress.increment_completed()
        self._heed_early_stopping()
        # A callback may request the end in one process alone.
        heard = self.federation.ranks.all_gather_objects(
            (trainer.should_stop, trainer.received_sigterm)
        )
        trainer.should_stop = any(stop for stop, _ in heard)
        stop_if_terminated(any(terminated for _, terminated in heard))

    def run(self) -> None:
        """Run the rounds that are left; where none is, report what the last ones had."""
        self.setup_data()
        self._count_rounds()
        if self._restored is not None and self.stage not in INSIDE:
            self._heed_early_stopping()
        if self._restored is None or not self.done:
            super().run()
            return
        # A run that was killed after its last round has no summary yet, and no last evaluation.
        self.reset()
        self._summarize()
        for callback in self.trainer.callbacks:
            if isinstance(callback, FederatedCallback):
                callback.on_train_end(self.trainer, self.trainer.lightning_module)

    def _heed_early_stopping(self) -> None:
        """Ask for the end if an EarlyStopping did after the last round, maybe before a resume.

        Callbacks save what they have decided, the Trainer doesn't.
        """
        trainer = self.trainer
        trainer.should_stop |= any(
            callback.stopped_epoch == trainer.current_epoch - 1
            and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED
            for callback in trainer.early_stopping_callbacks
            if isinstance(callback, EarlyStopping)
        )

    def on_run_end(self) -> None:
        """Report the last ten rounds and the best one, and end the training."""
        self._report_validation()
        self.module_at_start.check()  # later hooks may write: no round comes after them
        if self._left_out:
            raise RuntimeError(
                "Expected a round that accepts a client, but all rounds of this fit left out all "
                f"clients; in the last one: {self._left_out}. Look at the warnings above, use a "
                "smaller learning rate, or clean the data."
            )
        self._summarize()
        super().on_run_end()

    def _summarize(self) -> None:
        """Log the means of the last ten rounds, and the best round."""
        on_test = getattr(self.trainer.datamodule, "val_split", "train") == "test"
        history = self.federation.history
        if summary := history.summary(on_test):
            shown = history.for_loggers(summary)
            log_directly(self.trainer, summary, shown)
            add_summary(self.trainer, {name: summary[name] for name in shown})

    # --- checkpoints ------------------------------------------------------------------------------

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the progress of the round, and the values for callbacks."""
        self._report_validation()  # what callbacks save comes after it
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return {
            "stage": self.stage,
            **self.log.state_dict(),
            "callback_metrics": metrics,
        }

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of `on_save_checkpoint`."""
        self._restored = state_dict
        self.stage = state_dict["stage"]
        self.log.load_state_dict(state_dict)
