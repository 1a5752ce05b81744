"""NewClientAdaptation: models for clients that never took part, from a few samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pfl._lightning import connected, is_overridden, log_directly
from lightning_pfl.callbacks.new_clients.report import (
    PREFIX,
    Adapted,
    add_to_curves,
    statistics,
    write_models,
    write_table,
)
from lightning_pfl.callbacks.new_clients.samples import take_samples
from lightning_pfl.contract.callback import FederatedCallback, require_federation
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.checks import check_used, is_integer
from lightning_pfl.core.errors import naming_new_clients
from lightning_pfl.core.mixture import parts
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.randomness import derive, seeded
from lightning_pfl.core.tree import rows
from lightning_pfl.data.datasets import FederatedDataset, as_federated
from lightning_pfl.engine.base import EvaluationWork
from lightning_pfl.engine.steps import phase_budget
from lightning_pfl.engine.watching import in_mode
from lightning_pfl.federation.adapt import (
    adapt,
    budget_phase,
    check_lr,
    steps_of_new_clients,
)
from lightning_pfl.federation.eligibility import can_be_evaluated
from lightning_pfl.federation.federation import Federation
from lightning_pfl.federation.log_folder import log_folder
from lightning_pfl.federation.new_clients import Start, entries_to_adapt, starting_models
from lightning_pfl.methods.base import Phase
from lightning_pfl.trainer.data import move_to_device

__all__ = ["Adapted", "NewClientAdaptation"]


class NewClientAdaptation(FederatedCallback):
    r"""Adapts the model to clients that never took part, for several numbers of samples.

    A new client receives what the server sends, and starts with the initial personal part, or as
    set by ``start``. For each m in ``samples`` it trains on the first m samples of a seeded shuffle
    of its training data, and is evaluated on its test data. A client with fewer than m samples
    trains on all of them, and counts in the values for m; a warning says how many do. Clients train
    with the optimizer of ``configure_optimizers`` on the loss of ``training_step``; other entries
    than ``scope``, the server and other clients stay unchanged bit for bit.

    Clients that take no step would have an untrained personal part: they are left out with a
    warning, and m = 0 is only allowed if new clients start with a trained model.

    Runs at the end of a fit and in ``trainer.test``, which only needs a checkpoint. For every value
    that the test step logs, say ``test_acc``, it logs ``new_clients/acc@m`` and the statistics over
    the new clients (``new_clients/acc@m/worst_decile``, ...). ``new_clients.csv`` in the log folder
    has a row for each m and client; TensorBoard shows ``new_clients/acc`` with m as step. With a
    list of ``epochs`` clients are evaluated after each of these numbers of passes, under
    ``new_clients/acc@m/epoch3``; TensorBoard shows ``new_clients/acc@m/epochs``.

    Args:
        clients: Training and test data of the new clients: a pair of federated datasets, or of
            lists or dicts of DataLoaders. None: ``new_clients`` of the data module.
        samples: The numbers m, different integers >= 0.
        epochs: Passes over the m samples, or different numbers of passes after which to evaluate.
            Exactly one of ``epochs`` and ``steps``.
        steps: Optimizer steps instead.
        scope: Parameters that train: ``"personal"`` (the method's personal part), ``"all"``, or
            names, globs and module types, such as ``"head"`` for methods without a personal part.
        lr: Learning rate, positive, whatever a schedule says; None keeps those of
            ``configure_optimizers``, as schedules have left them.
        seed: Seed of the shuffle.
        start: The starting model. ``"personal"``: the current shared part and the initial personal
            part. ``"global"``: the method's global model, for methods with a complete model in the
            client state, such as APFL and L2GD. ``"mean"``: the mean of all clients' personal
            models, for methods with personal representations (LG-FedAvg).
        save_models: Whether to write ``new_clients@m.pt`` next to the table: a dict of a
            ``state_dict`` per new client, by name, after the largest number of passes.

    Raises:
        ValueError: If an argument is out of its range.
        MisconfigurationException: At the start of a run, without new clients, or if ``scope``,
            ``start``, ``save_models`` or m = 0 don't fit the method.

    Deviation from the paper: FedRep's Figure 6 has one m (500); its Figure 4 solves for linear
    heads exactly, as approximated by many steps.

    Example:
        >>> NewClientAdaptation(samples=[1, 10, 100], steps=50).samples
        (1, 10, 100)

    References:
        Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized
        federated learning. ICML 2021. arXiv:2102.07078, Figures 4 and 6.
    """

    reads_clients: ClassVar[bool] = True

    def __init__(
        self,
        clients: tuple[Any, Any] | None = None,
        samples: Sequence[int] = (10, 100, 500),
        epochs: int | Sequence[int] | None = 10,
        steps: int | None = None,
        scope: ParameterSpec = "personal",
        lr: float | None = None,
        seed: int = 0,
        start: Start = "personal",
        save_models: bool = False,
    ) -> None:
        plain = {"samples": samples, "seed": seed, "save_models": save_models}
        check_types(NewClientAdaptation.__init__, plain)
        check_lr(lr)
        self.samples = _check_samples(samples)
        self.given = None if clients is None else _check_pair(clients)
        self.several = isinstance(epochs, (list, tuple))
        training = {"epochs": epochs, "steps": steps, "lr": lr}
        check_used(NewClientAdaptation.__init__, training, any(self.samples), "samples above 0")
        self.phases = _phases(epochs, steps, lr)
        if start not in get_args(Start):
            raise ValueError(
                f"Expected `start` to be one of {get_args(Start)}, but got start={start!r}. "
                "Use 'personal' for methods that share a part of the model."
            )
        self.scope, self.seed, self.start, self.save_models = scope, seed, start, save_models
        self.results: tuple[Adapted, ...] = ()

    # --- hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Require new clients before training."""
        super().setup(trainer, pl_module, stage)
        if stage in ("fit", "test"):
            self._data(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require a scope that fits the method before training."""
        self._resolved(require_federation(trainer, self))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Adapt and evaluate after the last round."""
        log_directly(trainer, self._report(trainer))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Adapt and evaluate in a test."""
        if require_federation(trainer, self).rounds == 0:
            rank_zero_warn(
                "NewClientAdaptation expected a trained model, but this federation has not run a "
                "round. Pass `ckpt_path`."
            )
        pl_module.log_dict(self._report(trainer), batch_size=1)

    # --- the work ---------------------------------------------------------------------------------

    @naming_new_clients()
    def _adapt(self, trainer: L.Trainer) -> tuple[Adapted, ...]:
        """Train and evaluate the new clients for every number of samples."""
        federation = require_federation(trainer, self)
        train, test = (move_to_device(data, trainer) for data in self._data(trainer))
        module = federation.require_module()
        evaluate = "test_step" if is_overridden("test_step", module) else "validation_step"
        method, names = federation.method, self._resolved(federation)
        round = federation.rounds - 1 if federation.rounds else None
        found, had = [], dict[int, Tensor]()
        # Models that are trained must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad(), in_mode(module, training=False):
            for samples in self.samples:
                data = take_samples(train, samples, self.seed) if samples else train
                clients = self._trainable(
                    federation, data, test, samples, trainer.limit_test_batches
                )
                begin = rows(starting_models(federation, train.num_clients, self.start), clients)
                trained_on = data.num_samples[clients] * bool(samples)
                had[samples] = trained_on
                for phase in self.phases if samples else self.phases[:1]:
                    passes = phase_budget(phase).passes
                    models, epochs = begin, passes if self.several and samples else None
                    if samples:
                        # Fewer passes are the beginning of more: each starts anew, with the same
                        # order of samples.
                        phase = replace(phase, train=sorted(names))
                        step = steps_of_new_clients(method, federation.server)
                        models = adapt(
                            federation, begin, clients, (phase,), data, "new clients", step
                        )
                    with seeded(derive(federation.seed, "evaluation", PREFIX, samples)):
                        work = EvaluationWork(
                            models,
                            clients,
                            test,
                            evaluate,
                            trainer.limit_test_batches,
                            round,
                            method.predict,
                        )
                        evaluation = federation.engine.evaluate(work)
                    found.append(Adapted(samples, epochs, clients, trained_on, models, evaluation))
        _warn_of_fewer(had)
        return tuple(found)

    def _trainable(
        self,
        federation: Federation,
        data: FederatedDataset,
        test: FederatedDataset,
        samples: int,
        limit: float | int,
    ) -> Tensor:
        """Select the clients with test data that take at least one step."""
        everyone = torch.arange(data.num_clients)
        steps = federation.engine.count_steps(data, everyone, self.phases[:1])
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
                f"{', '.join(untrained[:10])}."
            )
        clients = everyone[ready & (test.num_samples > 0)]
        if not len(clients):
            raise MisconfigurationException(
                "Expected new clients with test data, but none that can train has any. Give them "
                "test samples."
            )
        return clients[can_be_evaluated(test, clients, "test", limit)]

    def _resolved(self, federation: Federation) -> frozenset[str]:
        method, name = federation.method, type(federation.method).__name__
        names = entries_to_adapt(federation, self.scope)
        if self.start == "global":
            starting_models(federation, 1, self.start)  # an error without such a model
        start = {} if self.start == "global" else starting_models(federation, 1, "personal")
        mix = parts(start)[1]
        if self.save_models and mix is not None:
            raise MisconfigurationException(
                f"Expected models that are one state_dict for save_models=True, but {name} "
                f"{mix.what}. Use save_models=False, or start='global'."
            )
        untrained = self.start == "personal" and method.global_model(federation.server) is None
        if 0 in self.samples and untrained:
            raise MisconfigurationException(
                f"Expected samples >= 1 for {name}, but got samples={list(self.samples)}. Leave "
                "out 0, with which the personal part is untrained."
            )
        return names

    def _data(self, trainer: L.Trainer) -> tuple[FederatedDataset, FederatedDataset]:
        if self.given is not None:
            return self.given
        source = getattr(connected(trainer).datamodule, "new_clients", None)
        if source is None:
            raise MisconfigurationException(
                "Expected new clients, but the run has no data module with `new_clients`. Pass "
                "FederatedDataModule(new_clients=...), or "
                "NewClientAdaptation(clients=(train, test))."
            )
        return _check_pair((source("train"), source("test")))

    # --- the report -------------------------------------------------------------------------------

    def _report(self, trainer: L.Trainer) -> dict[str, float]:
        """Compute all logged values, and write the table, curves and models."""
        self.results = self._adapt(trainer)
        names, folder = self._data(trainer)[1].names, log_folder(trainer)
        values: dict[str, float] = {}
        for adapted in self.results:
            values |= statistics(adapted)
            add_to_curves(trainer, adapted)
        if folder is not None:
            write_table(folder / "new_clients.csv", self.results, names)
            if self.save_models:
                self._write_models(trainer, folder, names)
        return values

    def _write_models(self, trainer: L.Trainer, folder: Path, names: Sequence[str]) -> None:
        """Write one file per number of samples, with the models after the most passes."""
        federation = require_federation(trainer, self)
        frame = {k: v.detach().clone() for k, v in federation.require_module().state_dict().items()}
        for adapted in {adapted.samples: adapted for adapted in self.results}.values():
            write_models(
                folder / f"new_clients@{adapted.samples}.pt",
                adapted,
                names,
                lambda model: {**frame, **federation.parameter_split.with_aliases(model)},
            )


def _warn_of_fewer(had: Mapping[int, Tensor]) -> None:
    """Warn of clients with fewer training samples than were asked for.

    Args:
        had: The samples of each client, by those that were asked for.
    """
    fewer = {m: int((counts < m).sum()) for m, counts in had.items()}
    if any(fewer.values()):
        said = [f"{fewer[m]} of {len(had[m])} have fewer than {m}" for m in fewer if fewer[m]]
        rank_zero_warn(
            f"NewClientAdaptation(samples={[*had]}) asks for more training samples than some new "
            f"clients have: {', '.join(said)}. These train on all of theirs, and count in the "
            f"values for that number. The fewest that one has are {int(had[max(had)].min())}."
        )


def _phases(epochs: Any, steps: int | None, lr: float | None) -> tuple[Phase, ...]:
    """Make a phase for each number of passes, in ascending order."""
    if not isinstance(epochs, (list, tuple)):
        phases: tuple[Phase, ...] = (budget_phase(epochs, steps, default_epochs=10),)
    else:
        if not epochs or len(set(epochs)) != len(epochs):
            raise ValueError(
                "Expected `epochs` to be a whole number or different whole numbers, but got "
                f"epochs={epochs!r}. Use [1, 2, 5, 10], for example."
            )
        phases = tuple(budget_phase(epoch, steps, default_epochs=None) for epoch in epochs)
        phases = tuple(sorted(phases, key=lambda phase: phase_budget(phase).passes))
    if not all(phase.epochs or phase.steps for phase in phases):
        raise ValueError(
            "Expected new clients to train, but got no epochs and no steps. "
            "Use samples=[0] to evaluate the global model of a method that has one."
        )
    return tuple(replace(phase, lr=lr, name="new client") for phase in phases)


def _check_samples(samples: Sequence[int]) -> tuple[int, ...]:
    whole = [is_integer(m, 0) for m in samples]
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
