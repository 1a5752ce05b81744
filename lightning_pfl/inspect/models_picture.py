"""ModelsPicture: a callback that draws the clients' models in some rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.contract.callback import require_federation
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, floats, select
from lightning_pfl.federation.evaluate import personal_models
from lightning_pfl.federation.federation import Federation
from lightning_pfl.inspect.board import (
    PictureCallback,
    check_every,
    check_max_clients,
    show,
    takes_pictures,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ModelsPicture(PictureCallback):
    """Draws a part of the clients' models every few rounds; subclasses say how.

    Args:
        part: ``"personal"`` (entries that differ between clients with the method, by client or by
            cluster), ``"all"``, or names, globs and module types.
        every_n_rounds: Rounds between pictures, at least 1.
        max_clients: Largest number of clients to draw, the first ones, at least 2.

    Raises:
        ValueError: If a number is out of its range.
        MisconfigurationException: At the start of a run without a logger, with several
            architectures, or if ``part="personal"`` and all clients have the same model.
    """

    reads_clients: ClassVar[bool] = True
    picture: ClassVar[str]
    """Name of the picture in loggers."""

    def __init__(
        self, part: ParameterSpec = "personal", every_n_rounds: int = 10, max_clients: int = 256
    ) -> None:
        check_types(ModelsPicture.__init__, locals())
        check_every(every_n_rounds)
        check_max_clients(max_clients, 256)
        self.part, self.every_n_rounds, self.max_clients = part, every_n_rounds, max_clients
        self._drawn = -1

    def draw(self, trainer: L.Trainer, models: Model, clients: Tensor, round: int) -> Figure:
        """Draw the part of the models.

        Args:
            trainer: The running Trainer.
            models: The entries of ``part``, ``(clients, ...)``.
            clients: Ids of these clients, int64 ``(clients,)``.
            round: The round, from 0.
        """
        raise NotImplementedError

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require entries to compare."""
        federation = require_federation(trainer, self)
        if len(federation.architectures) > 1:
            names = ", ".join(repr(architecture.name) for architecture in federation.architectures)
            name = type(self).__name__
            raise MisconfigurationException(
                f"Expected one architecture for {name}, but got ClientModules with {names}. Remove "
                f"{name}, or use it in a fit of one architecture's clients."
            )
        self._names(federation)
        self._drawn = -1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw if the round is due."""
        if (trainer.current_epoch + 1) % self.every_n_rounds == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the last round unless it was drawn."""
        self._draw(trainer)

    def _draw(self, trainer: L.Trainer) -> None:
        federation = require_federation(trainer, self)
        round = federation.rounds - 1
        if round == self._drawn or not takes_pictures(trainer):
            return
        self._drawn = round
        clients = torch.arange(min(federation.num_clients, self.max_clients))
        with torch.no_grad():
            models = select(personal_models(federation, clients), self._names(federation))
        show(trainer, self.picture, self.draw(trainer, models, clients, round), round)

    def _names(self, federation: Federation) -> frozenset[str]:
        if self.part != "personal":
            return federation.parameter_split.match(self.part, "part")
        personalized_entries = federation.method.personalized_entries(federation.parameter_split)
        if not personalized_entries:
            name = type(self).__name__
            raise MisconfigurationException(
                f"Expected a method with personal models for {name}, but "
                f"{type(federation.method).__name__} shares all entries. Remove {name}."
            )
        return personalized_entries


def flat(models: Model) -> Tensor:
    """Put each model's floating-point entries in a row, float64 ``(clients, entries)``, on the CPU.

    Args:
        models: Models, ``(clients, ...)``; integer entries are ignored.
    """
    rows = [leaf.reshape(len(leaf), -1).double() for leaf in floats(models).values()]
    return torch.cat(rows, 1).cpu()


def found_clusters(federation: Federation, count: int) -> Tensor | None:
    """Return the first clients' clusters, int64 ``(count,)``, if the method forms some."""
    found = federation.method.clusters(federation.server)
    return None if found is None else found[:count].cpu()
