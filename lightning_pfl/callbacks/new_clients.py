"""NewClientAdaptation: clients that never took part fit a model to a few samples of their own."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pfl._lightning import is_overridden, log_at_end
from lightning_pfl.adaptation import adapt
from lightning_pfl.callback import ClientInfo, FederatedCallback
from lightning_pfl.callbacks.modes import evaluating
from lightning_pfl.callbacks.samples import take_samples
from lightning_pfl.callbacks.settings import check_budget, check_lr
from lightning_pfl.data.clients import FederatedDataset, as_federated
from lightning_pfl.engine.base import Evaluation
from lightning_pfl.evaluation import log_folder, summaries
from lightning_pfl.federation import Federation, require_federation
from lightning_pfl.idle import evaluated
from lightning_pfl.layout import Spec
from lightning_pfl.placement import place
from lightning_pfl.randomness import derive, seeded
from lightning_pfl.tree import Model, expand, rows

PREFIX = "new_clients/"


@dataclass(frozen=True)
class Adapted:
    """New clients after training on their first samples.

    Attributes:
        samples: How many samples they were given.
        clients: Rows of the new clients that are evaluated, int64 ``(clients,)``.
        trained_on: Samples that each of them has had, int64 ``(clients,)``.
        models: Their models, ``(clients, ...)``.
        evaluation: Their results on the test split.
    """

    samples: int
    clients: Tensor
    trained_on: Tensor
    models: Model
    evaluation: Evaluation


class NewClientAdaptation(FederatedCallback):
    r"""Fits the model to clients that never took part, and reports accuracy against samples.

    A new client receives what the server sends, and begins with the personal part that every
    client had before round 0. For each m in ``samples`` it trains on the first m samples of a
    seeded shuffle of its training data (a larger m adds samples; a client with fewer trains on all
    it has), and is evaluated on its test data. It trains with the optimizer of
    ``configure_optimizers`` on the loss of ``training_step``; what is not in ``scope`` is unchanged
    bit for bit, and so are the server and the clients that took part.

    A personal part that nobody trained says nothing about a method. So a new client that takes no
    step is left out, with a warning, and m = 0 is only accepted for methods with a global model,
    where it evaluates that model.

    Runs at the end of a fit and in ``trainer.test``, also from a checkpoint alone. For every value
    that the test step logs, say ``test_acc``, it logs ``new_clients/acc@m`` and the statistics
    over the new clients (``new_clients/acc@m/worst_decile``, ...). ``new_clients.csv`` beside the
    logs has a row for each m and client; TensorBoard shows ``new_clients/acc`` with m as step.

    Args:
        clients: Training and test data of the new clients: a pair of federated datasets, or of
            lists or dicts of DataLoaders. None: ``new_clients`` of the data module.
        samples: The numbers m: different whole numbers of at least 0.
        epochs: Passes over the m samples. Exactly one of ``epochs`` and ``steps``.
        steps: Optimizer steps instead.
        scope: What trains: ``"personal"`` (the method's personal part), ``"all"``, or names, globs
            and module types, such as ``"head"`` for methods without a personal part.
        lr: Learning rate, positive; None keeps those of ``configure_optimizers``.
        seed: Decides which samples come first.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: At the start of a run, if there are no new clients, or
            ``scope`` or m = 0 don't fit the method.

    Deviation from the paper: FedRep's Figure 6 has one m (500); its Figure 4 solves for linear
    heads exactly, which many steps approach.

    Example:
        >>> NewClientAdaptation(samples=[1, 10, 100], steps=50).samples
        (1, 10, 100)

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, Figures 4 and 6.
    """

    def __init__(
        self,
        clients: tuple[Any, Any] | None = None,
        samples: Sequence[int] = (10, 100, 500),
        epochs: int | None = 10,
        steps: int | None = None,
        scope: Spec = "personal",
        lr: float | None = None,
        seed: int = 0,
    ) -> None:
        check_lr(lr)
        self.samples = _check_samples(samples)
        self.given = None if clients is None else _check_pair(clients)
        budget = check_budget(epochs, steps, default_epochs=10)
        if not (budget.epochs or budget.steps):
            raise ValueError(
                "Expected new clients to train, but got no epochs and no steps. "
                "Use samples=[0] to evaluate the global model of a method that has one."
            )
        self.phase = replace(budget, lr=lr, name="new client")
        self.scope, self.seed = scope, seed
        self.results: tuple[Adapted, ...] = ()

    # --- hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require new clients before anything is trained."""
        require_federation(trainer, self)
        if stage in ("fit", "test"):
            self._data(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require a scope that fits the method, before the training and not after it."""
        self._resolved(require_federation(trainer, self))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Adapt and evaluate after the last round."""
        log_at_end(trainer, self._report(trainer))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Adapt and evaluate in a test."""
        pl_module.log_dict(self._report(trainer), batch_size=1)

    # --- the work ---------------------------------------------------------------------------------

    def _adapt(self, trainer: L.Trainer) -> tuple[Adapted, ...]:
        """Train and evaluate the new clients for every number of samples."""
        federation = require_federation(trainer, self)
        train, test = (place(data, trainer) for data in self._data(trainer))
        federation.settings.limit_eval_batches = trainer.limit_test_batches
        module = federation.require_module()
        step = "test_step" if is_overridden("test_step", module) else "validation_step"
        names = self._resolved(federation)
        found = []
        # Models that are trained must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad(), evaluating(module):
            for samples in self.samples:
                data = take_samples(train, samples, self.seed) if samples else train
                clients = self._trainable(federation, data, test, samples)
                models = rows(_initial_models(federation, train.num_clients), clients)
                if samples:
                    phase = replace(self.phase, train=sorted(names))
                    models = adapt(federation, models, clients, (phase,), data, "new clients")
                with seeded(derive(federation.seed, "evaluation", PREFIX, samples)):
                    evaluation = federation.engine.evaluate(models, clients, test, step)
                trained_on = data.num_samples[clients] * bool(samples)
                found.append(Adapted(samples, clients, trained_on, models, evaluation))
        return tuple(found)

    def _trainable(
        self, federation: Federation, data: FederatedDataset, test: FederatedDataset, samples: int
    ) -> Tensor:
        """Rows of the clients with test data that take at least one step."""
        everyone = torch.arange(data.num_clients)
        steps = federation.engine.count_steps(data, everyone, (self.phase,))
        ready = (steps > 0) if samples else torch.ones_like(everyone, dtype=torch.bool)
        untrained = [data.names[row] for row in (~ready).nonzero().flatten().tolist()]
        if len(untrained) == data.num_clients:
            raise MisconfigurationException(
                f"Expected new clients with a batch of training data, but none of the "
                f"{data.num_clients} can take a step on {samples} samples. Use more samples, a "
                "smaller batch_size, or drop_last=False."
            )
        if untrained:
            rank_zero_warn(
                f"{len(untrained)} new clients without a batch of training data are left out: "
                f"{', '.join(untrained[:10])}. Their model would be untrained."
            )
        clients = everyone[ready & (test.num_samples > 0)]
        if not len(clients):
            raise MisconfigurationException(
                "Expected new clients with test data, but none that can train has any. Give them "
                "test samples."
            )
        return clients[evaluated(test, clients, "test", federation.settings.limit_eval_batches)]

    def _resolved(self, federation: Federation) -> frozenset[str]:
        method, layout = federation.method, federation.layout
        name = type(method).__name__
        if self.scope == "personal" and not layout.personal:
            raise MisconfigurationException(
                f"Expected a method with a personal part for scope='personal', but {name} shares "
                "the whole model. Use scope='head' to train the head alone, or scope='all'."
            )
        if 0 in self.samples and method.global_model(federation.server) is None:
            raise MisconfigurationException(
                f"Expected samples >= 1 for {name}, but got samples={list(self.samples)}: without "
                "samples a new client's personal part is untrained, and its accuracy says nothing. "
                "Leave out 0."
            )
        return layout.personal if self.scope == "personal" else layout.match(self.scope, "scope")

    def _data(self, trainer: Any) -> tuple[FederatedDataset, FederatedDataset]:
        if self.given is not None:
            return self.given
        source = getattr(trainer.datamodule, "new_clients", None)
        if source is None:
            raise MisconfigurationException(
                "Expected new clients, but the run has no data module with `new_clients`. Pass "
                "FederatedDataModule(new_clients=...), or "
                "NewClientAdaptation(clients=(train, test))."
            )
        return _check_pair((source("train"), source("test")))

    # --- the report -------------------------------------------------------------------------------

    def _report(self, trainer: L.Trainer) -> dict[str, float]:
        """Everything that is logged; writes the table and the curves on the way."""
        self.results = self._adapt(trainer)
        values: dict[str, float] = {}
        for adapted in self.results:
            named = {_bare(key): v for key, v in adapted.evaluation.values.items()}
            for key in named:
                one = Evaluation({key: named[key]}, adapted.evaluation.counts)
                for name, value in summaries(one, PREFIX).items():
                    statistic = name.removeprefix(f"{PREFIX}{key}")
                    values[f"{PREFIX}{key}@{adapted.samples}{statistic}"] = value
                _draw_curve(trainer, f"{PREFIX}{key}", summaries(one)[key], adapted.samples)
        if (folder := log_folder(trainer)) is not None:
            _write_table(folder / "new_clients.csv", self.results, self._data(trainer)[1].names)
        return values


def _initial_models(federation: Federation, clients: int) -> Model:
    """What new clients begin with: the shared part of now, the personal part of round 0."""
    # No ids of the federation: a method that knows its clients by id must not take them for one.
    index = torch.arange(clients) + federation.num_clients
    none = torch.zeros(clients, dtype=torch.int64)
    weights = torch.full((clients,), 1 / clients, dtype=torch.float64)
    round = max(federation.rounds - 1, 0)
    info = ClientInfo(index, none, none, weights, round, federation.num_clients)
    own = expand(federation.method.init_own(federation.layout.model()), clients)
    return federation.method.personal_model(federation.download(info), own, info)


def _bare(key: str) -> str:
    """``acc`` for ``test_acc``: the split is said by the prefix."""
    for stage in ("test_", "val_", "test/", "val/"):
        key = key.removeprefix(stage)
    return key


def _draw_curve(trainer: L.Trainer, name: str, value: float, samples: int) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_scalar(name, value, samples)


def _write_table(path: Path, results: Sequence[Adapted], names: Sequence[str]) -> None:
    keys = [*dict.fromkeys(key for adapted in results for key in adapted.evaluation.values)]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["samples", "client", "trained_on", "num_samples", *map(_bare, keys)])
        for adapted in results:
            columns = [adapted.evaluation.values[key].tolist() for key in keys]
            writer.writerows(
                zip(
                    [adapted.samples] * len(adapted.clients),
                    [names[row] for row in adapted.clients.tolist()],
                    adapted.trained_on.tolist(),
                    adapted.evaluation.counts.tolist(),
                    *columns,
                    strict=True,
                )
            )
    temporary.replace(path)


def _check_samples(samples: Sequence[int]) -> tuple[int, ...]:
    whole = [isinstance(m, int) and not isinstance(m, bool) and m >= 0 for m in samples]
    if not whole or not all(whole) or len(set(samples)) != len(whole):
        raise ValueError(
            "Expected `samples` to be different whole numbers >= 0, but got "
            f"samples={samples!r}. Use [1, 10, 100], for example."
        )
    return tuple(samples)


def _check_pair(clients: Any) -> tuple[FederatedDataset, FederatedDataset]:
    if isinstance(clients, Mapping) or not isinstance(clients, (tuple, list)) or len(clients) != 2:
        raise TypeError(
            "Expected `clients` to be a pair (training data, test data) of the new clients, but "
            f"got a {type(clients).__name__}. Pass two federated datasets, or two lists of "
            "DataLoaders."
        )
    train = as_federated(clients[0], what="clients[0]")
    test = as_federated(clients[1], what="clients[1]")
    if tuple(train.names) != tuple(test.names):
        raise ValueError(
            "Expected the same new clients in the training and the test data, but got "
            f"{train.num_clients} and {test.num_clients} clients, or other names. Give both in "
            "the same order."
        )
    return train, test
