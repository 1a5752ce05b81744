"""The prediction loop: every client with its personal model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_pfl._lightning import (
    ClientHooks,
    ConnectedTrainer,
    DataHolder,
    PredictionLoop,
    no_grad_context,
)
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.data.datasets import FederatedDataset, as_federated
from lightning_pfl.federation.eligibility import can_be_evaluated
from lightning_pfl.federation.evaluate import evaluate_clients, personal_models
from lightning_pfl.federation.federation import Federation
from lightning_pfl.trainer.data import align_clients, in_order, placed
from lightning_pfl.trainer.progress import ClientBatch, profiled


class FederatedPredictionLoop(PredictionLoop):
    """Returns one list per client from ``trainer.predict``: the results of ``predict_step``.

    ``on_predict_batch_start`` and ``on_predict_batch_end`` fire once per client that has samples,
    with its id as ``batch`` and its list as ``outputs``.
    """

    trainer: ConnectedTrainer
    federation: Federation
    data: FederatedDataset | None = None
    rows: Tensor
    clients: Tensor

    @property
    def predictions(self) -> list[Any]:
        """One list per client, in the order of the data, for prediction writers."""
        return self._predictions

    def load(self) -> FederatedDataset:
        """Load the data, unless they are loaded."""
        if self.data is None or self._combined_loader is None:
            data = as_federated(self._data_source.dataloader(), what="predict_dataloaders")
            self.data = placed(in_order(data), self.trainer, self.federation)
            self._combined_loader = DataHolder(self.data)  # type: ignore[assignment]
        return self.data

    def keep_own(self, again: bool) -> None:
        """Keep the samples of this process's clients alone, as the fit loop does."""
        if self.data is not None and self._combined_loader is not None:
            self._combined_loader = None
            if not again:
                self.data = placed(self.data, self.trainer, self.federation)
                self._combined_loader = DataHolder(self.data)  # type: ignore[assignment]
            self.load()

    def setup_data(self) -> None:
        """Load the data and find its clients in the federation."""
        self.max_batches = []
        if self.trainer.limit_predict_batches == 0:
            return
        data = self.load()
        rows, clients = align_clients(data, self.federation.client_names, "predict_dataloaders")
        busy = can_be_evaluated(data, rows, "predict", self.trainer.limit_predict_batches)
        self.rows, self.clients = rows[busy], clients[busy]
        self.max_batches = [len(self.rows)]

    @no_grad_context
    def run(self) -> list[list[Any]] | None:
        """Predict for every client; return None without predictions."""
        self.setup_data()
        if self.skip:
            return None
        self.batch_progress.reset_on_run()
        data, federation = self.load(), self.federation
        self.epoch_batch_indices = [[] for _ in range(data.num_clients)]
        self._predictions = [[] for _ in range(data.num_clients)]
        self.on_run_start()
        with seeded(derive(federation.seed, "prediction", federation.rounds)):
            self._predict(data)
        self.on_run_end()
        return self._predictions if self.return_predictions else None

    def _predict(self, data: FederatedDataset) -> None:
        federation = self.federation
        with self.trainer.profiler.profile(profiled("predict_step")):
            found = evaluate_clients(
                federation,
                lambda ids: personal_models(federation, ids),
                self.clients,
                self.rows,
                data,
                "predict_step",
                self.trainer.limit_predict_batches,
            )
        start = ClientHooks(self.trainer, "on_predict_batch_start")
        end = ClientHooks(self.trainer, "on_predict_batch_end")
        pairs = zip(self.rows.tolist(), self.clients.tolist(), found.predictions, strict=True)
        for number, (row, of, outputs) in enumerate(pairs):
            client, last = ClientBatch(of), number == len(self.rows) - 1
            self.batch_progress.increment_ready()
            start(client, number, last=last)
            self.batch_progress.increment_started()
            self._predictions[row] = outputs
            self.batch_progress.increment_processed()
            end(outputs, client, number, last=last)
            self.batch_progress.increment_completed()
