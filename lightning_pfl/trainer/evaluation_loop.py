"""The evaluation loop: every client with its personal model, and with the global model if any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pfl._lightning import (
    ConnectedTrainer,
    DataHolder,
    EvaluationLoop,
    forget_metrics,
    is_overridden,
    log_directly,
    log_values,
    no_grad_context,
)
from lightning_pfl.contract.callback import FederatedCallback
from lightning_pfl.contract.records import ClientResults, Evaluation, LogOptions, to_host
from lightning_pfl.core.errors import format_names
from lightning_pfl.core.randomness import derive, permutation, seeded
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.federation.eligibility import can_be_evaluated, warn_of_nan_samples
from lightning_pfl.federation.evaluate import (
    GLOBAL,
    direction,
    summaries,
)
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.log_folder import log_folder
from lightning_pfl.federation.sampling import cohort_size, sample_evaluated
from lightning_pfl.metrics.summary import LEFT_OUT
from lightning_pfl.trainer.board_layout import add_layout
from lightning_pfl.trainer.client_table import ClientTable
from lightning_pfl.trainer.data import (
    EvaluationSets,
    align_clients,
    due_reload,
    move_to_device,
    placed,
)
from lightning_pfl.trainer.progress import ClientProgress, profiled


@dataclass(frozen=True)
class _Found:
    """The findings of an evaluation.

    Attributes:
        results: The clients' results by prefix.
        central: Those of the global model on central samples, by prefix.
        names: The clients' names.
        share: Share of the clients that was drawn, in (0, 1].
    """

    results: dict[str, Evaluation]
    central: dict[str, Evaluation]
    names: list[str]
    share: float

    def to_host(self) -> Callable[[], _Found]:
        """Begin to copy it to the host; the function that is returned waits for it."""
        read = to_host([*self.results.values(), *self.central.values()])

        def arrived() -> _Found:
            each = iter(read())
            results, central = (
                {prefix: next(each) for prefix in some} for some in (self.results, self.central)
            )
            return replace(self, results=results, central=central)

        return arrived


# --- the loop -------------------------------------------------------------------------------------


class FederatedEvaluationLoop(EvaluationLoop):
    """Validates (inside a fit or alone) and tests all clients that have samples in the split.

    Inside a fit ``evaluated_clients`` says how many of them, in turns. With ``overlap_evaluation``
    a validation's values stay on the device until `report` is called.

    ``on_validation_batch_start`` and ``on_validation_batch_end`` (or ``on_test_...``) fire once per
    client, with its id as ``batch``. The sanity check runs ``num_sanity_val_steps`` batches of as
    many clients.

    Attributes:
        federation: The state of the run.
        data: The clients' own samples in the split.
        sets: These and further sets.
        on_validated: Called by the validation of a fit, before the hooks that write checkpoints.
        rows, clients: Rows of ``data`` with samples, and the ids of these clients.
    """

    trainer: ConnectedTrainer
    federation: Federation
    on_validated: Callable[[], None]
    data: FederatedDataset | None = None
    sets: EvaluationSets
    rows: Tensor
    clients: Tensor
    table: ClientTable | None = None
    _named_nan: frozenset[str] = frozenset()
    _unread: Callable[[], _Found] | None = None
    _verified: Any = None

    @property
    def prefix(self) -> str:
        """Prefix of the split: ``"val"`` or ``"test"``."""
        return str(self._stage.dataloader_prefix)

    # --- data -------------------------------------------------------------------------------------

    def load(self) -> FederatedDataset:
        """Load the split's data, unless they are loaded."""
        if self.data is None or self._combined_loader is None:
            source, what = self._data_source.dataloader(), f"{self.prefix}_dataloaders"
            sets = EvaluationSets.from_any(source, what)
            self.sets = self._placed(sets)
            self.data = self.sets.first
            self._warn_of_names(source, what)
            self._combined_loader = DataHolder(self.data)  # type: ignore[assignment]
        return self.data

    def _placed(self, sets: EvaluationSets) -> EvaluationSets:
        trainer, federation = self.trainer, self.federation
        return sets.each(
            lambda data: placed(data, trainer, federation),
            lambda data: move_to_device(data, trainer),
        )

    def keep_own(self, again: bool) -> None:
        """Keep the samples of this process's clients alone, as the fit loop does."""
        if self.data is not None and self._combined_loader is not None:
            self._combined_loader = None
            if not again:
                self.sets = self._placed(self.sets)
                self.data = self.sets.first
                self._combined_loader = DataHolder(self.data)  # type: ignore[assignment]
            self.load()

    def _warn_of_names(self, source: Any, what: str) -> None:
        """Warn of sets that are named like clients: a dict by client has no sets as values."""
        names = list(map(str, source)) if self.sets.several else []
        if same := [name for name in names if name in self.federation.client_names]:
            rank_zero_warn(
                f"`{what}` is read as several sets of all clients, as it has lists or dicts as "
                f"values, but {', '.join(map(repr, same))} is also a client. Give the set another "
                "name, or give one DataLoader per client."
            )

    def evaluable(self) -> tuple[Tensor, Tensor]:
        """Find the clients with a minibatch in the split: rows of the data, and ascending ids.

        Raises:
            MisconfigurationException: If the limits leave none to any client.
        """
        trainer, data = self.trainer, self.load()
        rows, clients = align_clients(
            data, self.federation.client_names, f"{self.prefix}_dataloaders"
        )
        limit = trainer.limit_test_batches if self.prefix == "test" else trainer.limit_val_batches
        busy = can_be_evaluated(data, rows, self.prefix, limit)
        # In whatever order the data are, so that sums over clients have the same bits.
        order = clients[busy].argsort()
        warn_of_nan_samples(data, rows[busy], self.prefix, self.federation.ranks)
        return rows[busy][order], clients[busy][order]

    def setup_data(self) -> None:
        """Load the split and find its clients in the federation."""
        fitting = self._trainer_fn == TrainerFn.FITTING
        if fitting and self._combined_loader is not None and not self._should_reload_val_dl:
            return
        self._max_batches = []
        trainer = self.trainer
        limit = trainer.limit_test_batches if self.prefix == "test" else trainer.limit_val_batches
        if limit == 0 or not is_overridden(
            "test_step" if self.prefix == "test" else "validation_step", trainer.lightning_module
        ):
            return
        if fitting:
            self._combined_loader = None
            self._last_val_dl_reload_epoch = due_reload(trainer)
        self.rows, self.clients = self.evaluable()
        if fitting and len(self.rows):  # before the first round
            cohort_size(self.federation.evaluated_clients, len(self.rows), "evaluated_clients")
        central = self.sets.central
        self._max_batches = [len(self.rows) or len(central)]
        if central and self.federation.global_model() is None:
            raise MisconfigurationException(
                f"Expected a method with a global model for central samples in "
                f"`{self.prefix}_dataloaders`, but {type(self.federation.method).__name__} has "
                "none. Give one DataLoader per client, in a list or a dict by client name."
            )
        if not self._max_batches[0]:
            rank_zero_warn(
                f"No client has samples in the {self.prefix} split; it is not evaluated."
            )

    # --- a run ------------------------------------------------------------------------------------

    @no_grad_context
    def run(self) -> list[dict[str, Any]]:
        """Evaluate, and return one dict of logged values."""
        self.setup_data()
        if self.skip:
            return []
        drawn = self._draw()
        self._max_batches = [len(drawn) or len(self.sets.central)]
        self.reset()
        self.on_run_start()
        # Random numbers in validation steps must not change later results.
        with seeded(derive(self.federation.seed, "evaluation", self.federation.rounds)):
            self._evaluate(drawn)
        self._logged_outputs.append({})  # the end of the run adds all values
        logged: list[dict[str, Any]] = self.on_run_end()
        return logged

    def _verify_dataloader_idx_requirement(self) -> None:
        """Check the signatures of the module's hooks once for the data, as to read them is slow."""
        if self._verified is not self._combined_loader:
            super()._verify_dataloader_idx_requirement()
            self._verified = self._combined_loader

    def reset(self) -> None:
        """Reset the counters."""
        self._has_run = False
        self._logged_outputs = []
        self.batch_progress.reset_on_run()

    def _draw(self) -> Tensor:
        """Choose the clients to evaluate: their positions, ascending, int64 ``(evaluated,)``."""
        trainer, federation = self.trainer, self.federation
        if self._trainer_fn != TrainerFn.FITTING or trainer.sanity_checking or not len(self.rows):
            return torch.arange(len(self.rows))
        share = federation.evaluated_clients
        return sample_evaluated(federation.seed, self._turn(), len(self.rows), share)

    def _turn(self) -> int:
        """Number the validations of a fit, from 0.

        A function of the round, so that a resumed run goes on with the next clients.
        """
        every = self.trainer.check_val_every_n_epoch or int(self.trainer.val_check_interval)
        return max(self.federation.rounds // every - 1, 0)

    def _evaluate(self, drawn: Tensor) -> None:
        trainer, federation = self.trainer, self.federation
        drawn = drawn[: int(self.max_batches[0])]
        rows, clients, data = self.rows[drawn], self.clients[drawn], self.load()
        step = "test_step" if trainer.testing else "validation_step"
        limit = evaluation_limit(trainer)
        stage = "test" if trainer.testing else "validation"
        progress = ClientProgress(trainer, federation.ranks, self, clients, stage)
        for architecture in federation.architectures:
            architecture.engine.trial = bool(trainer.sanity_checking)
        with trainer.profiler.profile(profiled(step)):
            several = {"dataloader_idx": 0} if self.sets.several else {}
            results: dict[str, Evaluation] = {}
            if len(clients):
                results = federation.evaluate(
                    clients, rows, data, step, limit, progress.finished, **several
                )
            progress.finish()
            further = self._further_sets(clients, step, limit)
            central = {
                f"{name}/" if name else "": federation.evaluate_global(held, step, limit, place)
                for name, (place, held) in self.sets.central.items()
            }
        if not trainer.sanity_checking:
            self._has_run = True
            if len(clients):
                results |= self._further(rows, clients, step)
            everyone = clients  # ascending
            if further:
                everyone = torch.cat([clients, *(ids for ids, _ in further.values())]).unique()
            if len(everyone) > len(clients):
                at = torch.searchsorted(everyone, clients)
                results = {k: one.spread(at, len(everyone)) for k, one in results.items()}
            results |= {
                prefix: one.spread(torch.searchsorted(everyone, ids), len(everyone))
                for prefix, (ids, one) in further.items()
            }
            rows = self.rows[torch.searchsorted(self.clients, everyone)]
            share = len(clients) / len(self.rows) if len(clients) else 1.0
            names = [data.names[row] for row in rows.tolist()]
            found = _Found(results, central, names, share).to_host()
            if self._trainer_fn == TrainerFn.FITTING and federation.overlaps_evaluation:
                self._unread = found
            else:
                self._report(found(), late=False)

    def _further_sets(
        self, clients: Tensor, step: str, limit: float | int
    ) -> dict[str, tuple[Tensor, Evaluation]]:
        """Evaluate clients on further sets: those of the first one that have samples there.

        If a turn has none of them, one that isn't in it has its turn in this set, so that
        callbacks which monitor the set have a value of every validation.

        Returns:
            By prefix the ids of the clients, ascending, and their results.
        """
        federation = self.federation
        found: dict[str, tuple[Tensor, Evaluation]] = {}
        for name, (place, data) in self.sets.further.items():
            what = f"{self.prefix}_dataloaders[{name!r}]"
            rows, ids = align_clients(data, federation.client_names, what)
            at = torch.isin(ids, self.clients)
            if not at.all():
                unknown = [federation.client_names[k] for k in ids[~at].tolist()]
                raise MisconfigurationException(
                    f"Expected the clients in `{what}` to be among those with samples in the first "
                    f"set, but got {unknown[:5]}, which aren't. Give these clients samples there."
                )
            at = can_be_evaluated(data, rows, self.prefix, limit)
            rows, ids = rows[at], ids[at]
            order = ids.argsort()
            rows, ids = rows[order], ids[order]
            # A sanity check evaluates fewer clients.
            at = torch.isin(ids, clients).nonzero().flatten()
            if len(ids) and not len(at) and not self.trainer.sanity_checking:
                key = derive(federation.seed, "evaluated clients", name, self._turn())
                at = permutation(len(ids), key)[:1]
            rows, ids = rows[at], ids[at]
            if not len(ids):
                continue
            results = federation.evaluate(ids, rows, data, step, limit, dataloader_idx=place)
            found |= {f"{name}/{prefix}": (ids, each) for prefix, each in results.items()}
        return found

    def _further(self, rows: Tensor, clients: Tensor, step: str) -> dict[str, Evaluation]:
        """Collect the extra evaluations of callbacks."""
        trainer = self.trainer
        found: dict[str, Evaluation] = {}
        for callback in trainer.callbacks:
            if isinstance(callback, FederatedCallback):
                name = f"[Callback]{callback.state_key}.further_evaluations"
                with trainer.profiler.profile(name):
                    found |= callback.further_evaluations(
                        trainer, trainer.lightning_module, self.load(), rows, clients, step
                    )
        return found

    def report(self) -> None:
        """Report the values of the last validation, if they weren't read yet.

        Until the server's next update, the federation is as it was in that validation.
        """
        if (found := self._unread) is not None:
            self._unread = None
            self._report(found(), late=True)

    def _report(self, found: _Found, late: bool) -> None:
        """Log the statistics, extend the per-client table, and record the round."""
        round = self.federation.rounds - 1
        values: dict[str, float] = {}
        directions: dict[str, bool] = {}
        shown, logged = set(), set()
        results, central = found.results, found.central
        for prefix, evaluation in (*results.items(), *central.items()):
            numbers = summaries(evaluation, prefix, found.share)
            if central.get(prefix) is evaluation:  # one value has no statistics
                numbers = {f"{prefix}{key}": float(v[0]) for key, v in evaluation.values.items()}
            values |= numbers
            for key in evaluation.values:
                options = evaluation.options.get(key, LogOptions())
                keys = {
                    name
                    for name in numbers
                    if name == f"{prefix}{key}" or name.startswith(f"{prefix}{key}/")
                }
                directions |= dict.fromkeys(keys, direction(key, evaluation))
                logged |= keys if options.logger else set()
                shown |= {f"{prefix}{key}"} if options.prog_bar and not prefix else set()
            names = found.names if prefix in results else ["the owner"]
            self._warn_of_nan(prefix, evaluation, names)
        if late:
            log_directly(self.trainer, values, logged, shown, round)
        else:
            hook = "test_step" if self.trainer.testing else "validation_step"
            log_values(self.trainer, self._results, hook, values, shown, logged)
        if self._trainer_fn == TrainerFn.FITTING:
            history = self.federation.history
            # Values without a number in this round, such as of a former global model, must be
            # neither shown nor monitored.
            forget_metrics(self.trainer, history.latest() - values.keys())
            history.update(round, values, directions, values.keys() - logged)
            if GLOBAL not in results:
                history.forget(GLOBAL)
        if results:
            self.record(ClientResults(self.prefix, round, found.names, results))

    def record(self, results: ClientResults, further: str | None = None) -> None:
        """Keep what was evaluated for each client, tabulate it, and hand it to callbacks.

        Args:
            results: All results of the round.
            further: Prefix of the results to add to the round's rows of the table; None: these
                results are the round's rows.
        """
        trainer = self.trainer
        # The split that was evaluated last is the last one.
        self.federation.client_results.pop(results.split, None)
        self.federation.client_results[results.split] = results
        if (folder := log_folder(trainer)) is not None:
            path = folder / f"clients_{results.split}.csv"
            if self.table is None or self.table.path != path:
                self.table = ClientTable(path)
                if results.split == "val":
                    add_layout(trainer, results)
            add = self.table.append if further is None else self.table.extend
            counts = results.evaluations[further or ""].counts.tolist()
            add(results.round, results.names, counts, results.columns(further))
        for callback in trainer.callbacks:
            if isinstance(callback, FederatedCallback):
                name = f"[Callback]{callback.state_key}.on_clients_evaluated"
                with trainer.profiler.profile(name):
                    callback.on_clients_evaluated(trainer, trainer.lightning_module, results)

    def _warn_of_nan(self, prefix: str, evaluation: Evaluation, names: list[str]) -> None:
        """Name, once per value, the clients that its statistics leave out."""
        for key, values in evaluation.values.items():
            broken = (values.isnan() & (evaluation.counts > 0)).nonzero().flatten()
            name = f"{prefix}{key}"
            if len(broken) and key not in self._named_nan:
                self._named_nan |= {key}
                rank_zero_warn(
                    f"{name!r} is NaN, or not logged, for {format_names(names, broken.tolist())}; "
                    f"its statistics leave such clients out, and '{name}/{LEFT_OUT}' counts them. "
                    f"Look at the {self.prefix} data of these clients and at their models."
                )

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        module = self.trainer.lightning_module
        stage = "test" if self.trainer.testing else "validation"
        hook = f"on_{stage}_epoch_end"
        pooled = [key.split(".")[1] for key in self._results or () if key.startswith(f"{hook}.")]
        if pooled and is_overridden(hook, module):
            rank_zero_warn(
                f"`{hook}` of {type(module).__name__} logs {', '.join(map(repr, pooled))} "
                "once, of "
                "what all clients' steps have gathered, those with the global model among them "
                f"where the method has one. Log in `{stage}_step` for the mean over clients."
            )

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer_fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self.on_validated()
        super()._on_evaluation_end(*args, **kwargs)

    def teardown(self) -> None:
        """End the stage; of one that failed, values that weren't read are lost."""
        super().teardown()
        self._unread = None


def evaluation_limit(trainer: L.Trainer) -> float | int:
    """Return the minibatches per client in the running evaluation: a count or a fraction."""
    if trainer.sanity_checking:
        limit = trainer.num_sanity_val_steps
        return 1.0 if limit == float("inf") else int(limit)
    return trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
