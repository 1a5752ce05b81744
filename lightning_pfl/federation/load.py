"""Loading of the clients' models from a checkpoint, without data and Trainer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pfl._lightning import copy_apart, read_optimizers
from lightning_pfl.core.argument_types import check_types
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, finite, tmap
from lightning_pfl.data.datasets import FederatedDataset, as_federated
from lightning_pfl.engine.base import EngineSettings
from lightning_pfl.engine.minibatches import count_ready_batches
from lightning_pfl.engine.optimizer_options import check_optimizer
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.federation.adapt import (
    adapt,
    budget_phase,
    check_lr,
    steps_of_new_clients,
)
from lightning_pfl.federation.adapt_alone import check_adapts_alone, train_alone
from lightning_pfl.federation.architectures import (
    Architecture,
    describe,
    make_architectures,
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
from lightning_pfl.federation.hooks import BATCH_HOOKS, STEP_HOOKS, overridden
from lightning_pfl.federation.new_clients import Start, entries_to_adapt, starting_models
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.federation.shards import read_shards, require_checkpoint
from lightning_pfl.methods.base import Method


class SavedClients(Federation):
    """The federation in a checkpoint; :func:`load_clients` makes it.

    It has the interface of ``trainer.strategy.federation`` after the run that wrote the file, with
    the same results: ``client_state_dict(client)``, ``client_module(client)``,
    ``global_state_dict()``, ``num_clients``, ``client_names``, ``rounds``. It trains models of new
    clients alone, by :meth:`adapt`.
    """

    optimizers: list[tuple[str, dict[str, Any]]]

    def __repr__(self) -> str:
        """Return the method, the number of clients and that of rounds."""
        method = type(self.method).__name__
        return f"SavedClients({method}, {self.num_clients} clients, after {self.rounds} rounds)"

    def adapt(
        self,
        data: DataLoader[Any] | FederatedDataset,
        epochs: int | None = 10,
        steps: int | None = None,
        scope: ParameterSpec = "personal",
        lr: float | None = None,
        start: Start = "personal",
    ) -> L.LightningModule:
        """Fit a model for a client that never took part, on its own data alone.

        It is the model of :class:`~lightning_pfl.callbacks.NewClientAdaptation` with all samples,
        and with the settings of the same names. The checkpoint's clients stay as they are.

        Args:
            data: The client's training data; of a federated dataset the only client's.
            epochs: Passes over them. Exactly one of ``epochs`` and ``steps``.
            steps: Optimizer steps instead.
            scope: Parameters that train: ``"personal"``, ``"all"``, or names, globs and types.
            lr: Learning rate; None keeps the checkpoint's.
            start: The starting model: ``"personal"``, ``"global"`` or ``"mean"``.

        Returns:
            A copy of the module with the new model, in eval mode.

        Raises:
            ValueError: If the budget is none, the data have no minibatch or several clients, or the
                model doesn't stay finite.
            ClientError: If the module can't read the data.
            MisconfigurationException: If ``scope``, ``start`` or the module don't fit.
        """
        check_types(SavedClients.adapt, {"start": start})
        check_lr(lr)
        budget = budget_phase(epochs, steps, default_epochs=10)
        clients = torch.arange(1)
        given = {"new client": data} if isinstance(data, DataLoader) else data
        federated = count_ready_batches(as_federated(given, what="data"))
        if federated.num_clients != 1:
            raise ValueError(
                "Expected `data` to be of one client, but got those of "
                f"{federated.num_clients}. Use `data.subset([client])`."
            )
        names = sorted(entries_to_adapt(self, scope))
        phase = replace(budget, train=names, lr=lr, name="new client")
        begin = starting_models(self, 1, start)
        if not self.count_steps(federated, clients, (phase,)).any():
            raise ValueError(
                f"Expected `data` to have a minibatch to train on, but got {data!r} without one. "
                "Use smaller batches or drop_last=False, and at least one epoch or step."
            )
        if self._needs_a_loop():
            check_adapts_alone(self.method)
            module = self._as_module(
                self.architectures[0], {name: leaf[0] for name, leaf in begin.items()}
            )
            module = train_alone(
                module.train(), names, federated, phase, self.optimizers, self.seed
            ).eval()
        else:
            step = steps_of_new_clients(self.method, self.server)
            models = adapt(self, begin, clients, (phase,), federated, "new clients", step)
            module = self._as_module(
                self.architectures[0], {name: leaf[0] for name, leaf in models.items()}
            )
        trained = {name: module.state_dict()[name] for name in names}
        if not finite(tmap(lambda leaf: leaf.unsqueeze(0), trained)).all():
            raise ValueError(
                "Expected `data` on which the model stays finite, but got NaN or infinity in it "
                "after training. Look for NaN in the data, or use a smaller `lr`."
            )
        return module

    def _needs_a_loop(self) -> bool:
        """Whether the module has code inside a step, which only Lightning's own loop runs."""
        module = self.architectures[0].module
        if not module.automatic_optimization or overridden(module, (*STEP_HOOKS, *BATCH_HOOKS)):
            return True
        return len(read_optimizers(module, module.configure_optimizers(), lambda _: None)[0]) != 1

    def _optimizer(self, architecture: Architecture) -> Optimizer:
        """Make the template of the optimizer, with the checkpoint's learning rates if any."""
        module = architecture.module
        optimizers, _ = read_optimizers(module, module.configure_optimizers(), lambda _: None)
        check_optimizer(optimizers[0])
        if self.optimizers:
            load_optimizer(optimizers[0], *self.optimizers[0])
        return optimizers[0]

    def _personal_model(self, client: int | str) -> Model:
        if self.method.evaluation_phases():
            raise MisconfigurationException(
                "Expected a method whose personal models are in the checkpoint, but got "
                f"{type(self.method).__name__}, which trains them on the client's data. Use "
                "`trainer.validate(module, data, ckpt_path=path)` and "
                "`trainer.strategy.client_state_dict(client)`, or `global_state_dict()`."
            )
        return super()._personal_model(client)


def load_clients(
    path: str | PathLike[str], module: L.LightningModule, method: Method
) -> SavedClients:
    """Read the clients' models of a checkpoint, without data and Trainer.

    No code in the file is run (``weights_only=True``); tensors are on the CPU in the precision of
    the file. Module and method are copied.

    Args:
        path: A checkpoint of a federated run, on this machine.
        module: The module of the run, with any weights, or its
            :class:`~lightning_pfl.ClientModules`.
        method: The method of the run, with its settings.

    Raises:
        TypeError: If module or method are no instances.
        FileNotFoundError: If there is no such file.
        RuntimeError: If the file is truncated or damaged, is no checkpoint, or has code.
        CheckpointMismatchError: If it belongs to another kind of run, method, module, split or
            graph.

    Example::

        clients = load_clients("last.ckpt", DigitsCNN(), FedRep())
        clients.client_module(3)    # or by name: clients.client_names[3]
        clients.adapt(loader)       # of a client that never took part
    """
    for name, given, kind in (
        ("module", module, L.LightningModule),
        ("method", method, Method),
    ):
        if not isinstance(given, kind):
            raise TypeError(
                f"Expected `{name}` to be an instance of {kind.__name__}, but got "
                f"{name}={given!r}. Call load_clients(path, MyModule(), FedRep()), for example."
            )
    check_types(load_clients, {"path": path})
    require_checkpoint(path)
    if Path(path).is_dir():
        checkpoint = read_shards(path)
    else:
        check_file(path)
        with explain_read_errors(path):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    saved = federated_part(require_lightning(checkpoint, path))
    module, method = copy_apart(module).cpu(), copy.copy(method)
    split = parameter_splits(module, method)
    check_parameter_split(saved, type(method).__name__, describe(split))
    check_settings(saved, method.settings(), method.state_settings, "The models are read")
    module.on_load_checkpoint(checkpoint)
    _take_precision(module, checkpoint["state_dict"])
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)

    clients = SavedClients()
    clients.optimizers, clients.client_optimizer = saved_optimizers(checkpoint), clients._optimizer
    clients.method, clients.ranks, clients.seed = method, Ranks(), int(saved["seed"])
    clients.settings = EngineSettings(seed=clients.seed)
    architectures = make_architectures(module, split, saved["clients"])
    clients.begin(
        module, architectures, saved["clients"], saved["num_samples"], lambda _: torch.device("cpu")
    )
    for architecture in architectures:
        architecture.engine = SelectedEngine(
            "sequential", architecture.module, architecture.parameter_split, clients.settings
        )
    clients.load_state_dict(saved)
    return clients


def _take_precision(module: L.LightningModule, state: Mapping[str, Any]) -> None:
    """Give the module the dtypes of the checkpoint, as ``precision="64-true"`` does."""
    for name, held in module.state_dict(keep_vars=True).items():
        theirs = state.get(name)
        if isinstance(held, Tensor) and isinstance(theirs, Tensor) and held.is_floating_point():
            held.data = held.data.to(theirs.dtype)
