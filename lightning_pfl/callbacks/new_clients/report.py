"""Reports on new clients: a table, curves in TensorBoard, and their models."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_pfl.contract.records import Evaluation
from lightning_pfl.core.files import atomic_file
from lightning_pfl.core.tree import Model
from lightning_pfl.federation.evaluate import summaries

PREFIX = "new_clients/"


@dataclass(frozen=True)
class Adapted:
    """New clients after training on their first samples.

    Attributes:
        samples: Number of samples per client.
        epochs: Number of passes over them, if there are several such numbers; otherwise None.
        clients: Rows of the evaluated new clients, int64 ``(clients,)``.
        trained_on: Samples that each of them trained on, int64 ``(clients,)``.
        models: Their models, ``(clients, ...)``.
        evaluation: Their results on the test split.
    """

    samples: int
    epochs: int | None
    clients: Tensor
    trained_on: Tensor
    models: Model
    evaluation: Evaluation

    def key(self, name: str) -> str:
        """Return the name of a value, such as ``new_clients/acc@500/epoch3``."""
        after = "" if self.epochs is None else f"/epoch{self.epochs}"
        return f"{PREFIX}{name}@{self.samples}{after}"


def metric_name(key: str) -> str:
    """Remove the split from a name: ``acc`` for ``test_acc``."""
    for stage in ("test_", "val_", "test/", "val/"):
        key = key.removeprefix(stage)
    return key


def statistics(adapted: Adapted) -> dict[str, float]:
    """Compute the logged values of one number of samples and passes."""
    values: dict[str, float] = {}
    for key, of_clients in adapted.evaluation.values.items():
        one = replace(adapted.evaluation, values={key: of_clients})
        for name, value in summaries(one).items():
            values[f"{adapted.key(metric_name(key))}{name.removeprefix(key)}"] = value
    return values


def add_to_curves(trainer: L.Trainer, adapted: Adapted) -> None:
    """Add a point to each curve, against samples or, with several numbers of them, passes."""
    from lightning.pytorch.loggers import TensorBoardLogger

    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            for key, value in adapted.evaluation.values.items():
                one = replace(adapted.evaluation, values={key: value})
                name, step = f"{PREFIX}{metric_name(key)}", adapted.samples
                if adapted.epochs is not None:
                    name, step = f"{name}@{adapted.samples}/epochs", adapted.epochs
                logger.experiment.add_scalar(name, summaries(one)[key], step)


def write_table(path: Path, results: Sequence[Adapted], names: Sequence[str]) -> None:
    """Write ``new_clients.csv``: a row for each number of samples, number of passes, and client."""
    keys = [*dict.fromkeys(key for adapted in results for key in adapted.evaluation.values)]
    head = ["samples", "epochs", "client", "trained_on", "num_samples"]
    with atomic_file(path, "t", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*head, *map(metric_name, keys)])
        for adapted in results:
            epochs = "" if adapted.epochs is None else adapted.epochs
            columns = [adapted.evaluation.values[key].tolist() for key in keys]
            writer.writerows(
                zip(
                    [adapted.samples] * len(adapted.clients),
                    [epochs] * len(adapted.clients),
                    [names[row] for row in adapted.clients.tolist()],
                    adapted.trained_on.tolist(),
                    adapted.evaluation.counts.tolist(),
                    *columns,
                    strict=True,
                )
            )


def write_models(path: Path, adapted: Adapted, names: Sequence[str], state: Any) -> None:
    """Write a ``state_dict`` per new client, by name; ``torch.load(path)`` reads them.

    Args:
        path: Path of the file.
        adapted: The models.
        names: Names of all new clients.
        state: Makes a complete ``state_dict`` of the module from a client's model.
    """
    models = {
        names[row]: state({name: leaf[k].clone() for name, leaf in adapted.models.items()})
        for k, row in enumerate(adapted.clients.tolist())
    }
    with atomic_file(path) as file:
        torch.save(models, file)
