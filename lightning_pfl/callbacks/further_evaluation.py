"""Evaluations of other models than the personal ones: once after the last round, or in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_pfl._lightning import forget_metrics, log_directly, remember_metrics
from lightning_pfl.contract.callback import FederatedCallback, require_federation
from lightning_pfl.contract.records import ClientResults, Evaluation, LogOptions
from lightning_pfl.core.mixture import Prediction
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.core.tree import Model
from lightning_pfl.data.datasets import FederatedDataset
from lightning_pfl.engine.watching import in_mode
from lightning_pfl.federation.evaluate import evaluate_clients, join, summaries
from lightning_pfl.federation.federation import Federation
from lightning_pfl.metrics.history import headlines
from lightning_pfl.trainer.evaluation_loop import evaluation_limit

When = Literal["end", "evaluation"]


class FurtherEvaluation(FederatedCallback):
    """Evaluates something else than the personal models, under a prefix of its own.

    Args:
        when: ``"end"``: once, after the last round; ``"evaluation"``: in every evaluation.

    Attributes:
        prefix: Prefix of the values' names.
        purpose: What the training data are for, for an error.
    """

    reads_clients: ClassVar[bool] = True
    prefix: ClassVar[str]
    purpose: ClassVar[str]

    def __init__(self, when: When) -> None:
        if when not in ("end", "evaluation"):
            raise ValueError(
                f"Expected `when` to be 'end' or 'evaluation', but got when={when!r}. "
                "Use 'end' to evaluate once, after the last round."
            )
        self.when = when
        self._federation: Federation | None = None
        self._data: FederatedDataset | None = None

    def begin(self, trainer: L.Trainer) -> tuple[Callable[[Tensor], Model], int, Prediction | None]:
        """Begin an evaluation.

        Returns:
            A function of client ids that builds their models, ``(clients, ...)``; the number of
            clients to build them for at once; and the function of the outputs of models that have
            tensors of their own, None for the method's.
        """
        raise NotImplementedError

    def evaluate(
        self,
        trainer: L.Trainer,
        data: FederatedDataset,
        rows: Tensor,
        clients: Tensor,
        step: str,
    ) -> Evaluation:
        """Evaluate clients of a split, some at once.

        Args:
            trainer: The Trainer.
            data: The split.
            rows: Rows of the split, int64 ``(clients,)``.
            clients: Their ids, int64 ``(clients,)``.
            step: ``"validation_step"`` or ``"test_step"``.
        """
        federation: Any = require_federation(trainer, self)
        models_of, together, predict = self.begin(trainer)
        limit = evaluation_limit(trainer)
        order = list(torch.arange(len(clients)).split(max(1, together)))
        parts = [
            evaluate_clients(
                federation, models_of, clients[at], rows[at], data, step, limit, predict=predict
            )
            for at in order
        ]
        return join(parts, order)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin a run."""
        self._federation = require_federation(trainer, self)
        kind = type(self)
        if sum(isinstance(c, kind) for c in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise MisconfigurationException(
                f"Expected one {kind.__name__}, but got several, whose values would have the same "
                "names. Use one per run, for example in trainer.test with a checkpoint."
            )

    def further_evaluations(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        data: FederatedDataset,
        rows: Tensor,
        clients: Tensor,
        step: str,
    ) -> Mapping[str, Evaluation]:
        """Evaluate the clients of a split, unless that is done after the last round."""
        if self.when == "end" and trainer.state.fn == TrainerFn.FITTING:
            return {}
        return {self.prefix: self.evaluate(trainer, data, rows, clients, step)}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop the values of a fit's end that is no longer the last round."""
        if self.when == "end":
            require_federation(trainer, self).history.forget(self.prefix)
            old = [name for name in trainer.callback_metrics if name.startswith(self.prefix)]
            forget_metrics(trainer, old)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate after the last round, and log the results."""
        federation: Federation = require_federation(trainer, self)
        if self.when != "end" or not trainer.enable_validation or not federation.rounds:
            return
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        data = loop.load()
        rows, clients = loop.evaluable()
        if not len(rows):
            return
        with (
            in_mode(pl_module, training=False),
            seeded(derive(federation.seed, "evaluation", self.prefix)),
        ):
            found = self.evaluate(trainer, data, rows, clients, "validation_step")
        self._report(trainer, found, [data.names[row] for row in rows.tolist()])

    def _report(self, trainer: L.Trainer, found: Evaluation, names: list[str]) -> None:
        """Log the final values with the user's options, and extend the table."""
        federation: Federation = require_federation(trainer, self)
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        round, prefix = federation.rounds - 1, self.prefix
        values = summaries(found, prefix)
        federation.history.add(round, values)
        mean = federation.history.mean()
        remember_metrics(trainer, values | {f"last10/{name}": mean[name] for name in values})
        logged = {
            k: v for k, v in found.values.items() if found.options.get(k, LogOptions()).logger
        }
        shown = summaries(replace(found, values=logged), prefix)
        log_directly(trainer, shown | {f"last10/{name}": mean[name] for name in headlines(shown)})
        before = federation.client_results.get("val")
        # Of a resumed run, clients may have left the data.
        joins = before is not None and before.round == round and {*before.names} <= {*names}
        kept = before.among(names) if before is not None and joins else {}
        loop.record(ClientResults("val", round, names, {**kept, prefix: found}), further=prefix)

    def _training_data(self, federation: Federation) -> FederatedDataset:
        """Load the clients' training data, or take those of the last fit if this run has none."""
        try:
            data = federation.training_data()
        except MisconfigurationException as cause:
            if self._data is None:
                raise MisconfigurationException(
                    f"Expected training data to {self.purpose}, but got none. Pass a data module "
                    "to `trainer.test`, not only the test data."
                ) from cause
            data = self._data
        if tuple(data.names) != federation.client_names:
            raise MisconfigurationException(
                f"Expected the training data of the {federation.num_clients} clients of the "
                f"trained model, but got {data.num_clients} clients or other names. Use the data "
                "of that run, or NewClientAdaptation for new clients."
            )
        self._data = data
        return data
