"""The interface of engines, which run the clients' side of a round for a cohort.

Both engines call the same functions of the method, and a test runs every method, optimizer and kind
of client through both.

- A step: ``sequential.py`` runs one client and one minibatch in plain torch;
  ``vectorized/engine.py`` runs a chunk of clients by ``vmap`` over the user's own
  ``training_step``, with one backward pass and one optimizer step.
- Clients of different sizes: nothing to do, against clients whose minibatches have equal sizes
  running together; where a loss is known to be a mean over samples (``PersonalizedModule``), short
  minibatches are padded under a mask.
- The user's optimizer: on the client's tensors, against tensors ``(clients, *shape)``, which an
  elementwise optimizer treats alike.
- Randomness: keyed in both; in a batched program a hash of (client key, call, element) takes the
  place of torch's random functions.

``batch_idx`` counts a client's minibatches through all epochs of a phase, as if every step had all
of its ``accumulate_grad_batches``. A step that writes to weights which all clients have in common
(a teacher with ``requires_grad=False``, a clamped weight, ``max_norm``) is refused by name. An
error of a step names the client, or with the vectorized engine the first clients of the chunk, and
the round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.records import (
    ClientInfo,
    Evaluation,
    LocalResult,
    OnClients,
    OptimizerState,
    SlotStates,
)
from lightning_pfl.contract.returned import (
    require_pair,
    require_tree,
    require_unwritten,
    versions,
)
from lightning_pfl.core.errors import MisconfigurationException
from lightning_pfl.core.mixture import Prediction, is_mixed
from lightning_pfl.core.tree import Model, Tree, is_expanded, rows, separated
from lightning_pfl.data.datasets import FederatedDataset, FederatedTensorDataset
from lightning_pfl.data.public import PublicData
from lightning_pfl.methods.base import Method, Phase

StepOptions = Callable[[int], Sequence[Sequence[Mapping[str, Any]]]]
"""Makes the options of each group of an optimizer at each of some steps."""
BatchHooks = Callable[[L.LightningModule, Any], Any]
"""Passes one client's minibatch through the hooks of a module and of the data module."""


@dataclass
class EngineSettings:
    """The settings of local training from the Trainer's flags and the strategy.

    Args:
        seed: The run's seed.
        device: Device of local training.
        clip_value: ``gradient_clip_val``, per client; None or 0 for no clipping.
        clip_algorithm: ``"norm"`` (the client's total norm) or ``"value"``.
        accumulate: ``accumulate_grad_batches``: minibatches per optimizer step.
        limit_train_batches: Per client and epoch: a count (int) or a fraction (float).
        overfit_batches: When not 0: this number (or fraction) of unshuffled batches.
        chunk_size: Clients per batched program; None fits the memory.
        autocast: dtype of mixed precision; None without it.
        default_dtype: dtype of what a step makes, as ``"bf16-true"`` sets it; None for torch's.
        feature_cache: Whether features of a frozen shared prefix are computed once per phase.
        batch_hooks: Lightning's hooks on a batch, such as ``on_after_batch_transfer``; None without
            any.
        cuda_graphs: Whether steps of many clients are captured as CUDA graphs.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    accumulate: int = 1
    limit_train_batches: float | int = 1.0
    overfit_batches: float | int = 0.0
    chunk_size: int | None = None
    autocast: torch.dtype | None = None
    default_dtype: torch.dtype | None = None
    feature_cache: bool = True
    batch_hooks: BatchHooks | None = None
    cuda_graphs: bool = False


SERVER = "server"
"""The random stream of a server's own training, on public samples."""


@dataclass(frozen=True)
class LocalWork:
    """The local training of some clients.

    Args:
        method: The method, whose client functions run.
        received: What the server sent, ``(clients, ...)``.
        client_state: The clients' states, ``(clients, ...)``. An engine doesn't change them.
        info: The clients.
        data: The training split, of which ``info.index`` names rows.
        phases: What trains, and for how long.
        optimizer: What ``configure_optimizers`` returned: the template of which every client gets a
            fresh copy. It never steps itself.
        stream: Name of the random stream: two streams in one round draw other numbers.
        validation: The validation split, a row for each client of the federation; None if there is
            none.
        kept: The clients' optimizer states with which their phases begin; None for fresh ones.
        schedule: Makes the options of each group of ``optimizer`` at each of some steps of a phase;
            None if they stay.
        public: Public samples; None if there are none.
        cohort: Clients of the round in all processes; None where these are all.
    """

    method: Method
    received: Tree
    client_state: Tree
    info: ClientInfo
    data: FederatedDataset
    phases: tuple[Phase, ...]
    optimizer: Optimizer
    stream: str = "local"
    validation: FederatedDataset | None = None
    schedule: StepOptions | None = None
    kept: Sequence[OptimizerState] | None = None
    public: PublicData | None = None
    cohort: int | None = None

    def split(self, phase: Phase) -> FederatedDataset:
        """Return the data of a phase.

        Raises:
            MisconfigurationException: If there are none.
        """
        if phase.data == "training":
            return self.data
        if phase.data == "public":
            return require_public(self.public, self.method).for_clients(
                self.info.round + phase.ahead
            )
        if self.validation is None:
            raise MisconfigurationException(
                f"Expected validation data, on which {type(self.method).__name__} measures in its "
                "rounds, but got none. Pass `val_dataloaders`, or a positive `val_fraction`."
            )
        return self.validation

    def missing_labels(self, phase: Phase) -> str:
        """Return what to do where a step fails on public samples without labels; else nothing."""
        if phase.data != "public" and self.stream != SERVER:
            return ""
        data = self.split(phase)
        if not isinstance(data, FederatedTensorDataset) or len(data.fields) != 1:
            return ""
        return (
            "Public samples pass through `training_step` like others, and these are one tensor. If "
            "the step wants labels, give them some, of which nothing is learned: "
            "TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.long))."
        )

    def options(self, phase: Phase, steps: int) -> Sequence[Sequence[Mapping[str, Any]]] | None:
        """Return the optimizer's options at each step of a phase; None if they stay.

        Raises:
            MisconfigurationException: If the phase has a learning rate of its own.
        """
        if self.schedule is None:
            return None
        if phase.lr is not None:
            raise MisconfigurationException(
                f"Expected phases with the learning rate of `configure_optimizers`, as a scheduler "
                f"changes it in each step, but phase {phase.name!r} has lr={phase.lr}. Leave out "
                "its rate, or the scheduler."
            )
        return self.schedule(steps)

    @property
    def step(self) -> str:
        """Name of the module's step function."""
        return "training_step"

    @property
    def sent(self) -> Tree:
        """Trees that the module computes with, ``(clients, ...)``."""
        return self.received

    def rows(self, index: slice | Tensor) -> LocalWork:
        """Select the work of some clients; views of their trees for a slice.

        Args:
            index: A slice, or positions, int64 ``(some,)``.
        """
        return replace(
            self,
            received=rows(self.received, index),
            client_state=rows(self.client_state, index),
            info=self.info.rows(index),
            kept=None if self.kept is None else _chosen(self.kept, index),
        )


def _chosen(each: Sequence[Any], index: slice | Tensor) -> Sequence[Any]:
    return each[index] if isinstance(index, slice) else [each[row] for row in index.tolist()]


@dataclass(frozen=True)
class EvaluationWork:
    """The evaluation of some clients by a validation, test or prediction step.

    Args:
        models: One model per client, ``(clients, ...)``; expanded leaves run unbatched.
        clients: Client ids, int64 ``(clients,)``, naming rows of ``data``.
        data: The split.
        step: Name of the module's step function.
        limit: Minibatches per client: a count (int) or a fraction (float).
        round: The last finished round, for errors; None if it isn't known.
        predict: The function of the outputs of models with tensors of their own; None without.
        dataloader_idx: The step's argument of this name: the number of the data set where there are
            several; None for one.
    """

    models: Model
    clients: Tensor
    data: FederatedDataset
    step: str
    limit: float | int = 1.0
    round: int | None = None
    predict: Prediction | None = None
    dataloader_idx: int | None = None

    @property
    def sent(self) -> Tree:
        """Trees that the module computes with, ``(clients, ...)``."""
        return self.models

    @property
    def is_of_one_model(self) -> bool:
        """Whether all clients have the same model, whose outputs nothing changes."""
        plain = bool(self.models) and not is_mixed(self.models)
        return plain and all(map(is_expanded, self.models.values()))

    def rows(self, index: slice | Tensor) -> EvaluationWork:
        """Select the evaluation of some clients; views of their models for a slice.

        Args:
            index: A slice, or positions, int64 ``(some,)``.
        """
        return replace(self, models=rows(self.models, index), clients=self.clients[index])


def require_public(public: PublicData | None, method: Method) -> PublicData:
    """Return the public samples.

    Raises:
        MisconfigurationException: If there are none.
    """
    if public is None:
        raise MisconfigurationException(
            f"Expected public samples, on which {type(method).__name__} compares models, but got "
            "none. Use FederatedDataModule(public_samples=...), or define `public_dataloader` in "
            "your data module; a method of your own also sets `needs_public_data`."
        )
    return public


class ModuleLoop(Protocol):
    """Lightning's own loop over the minibatches of one client, which is in the module itself.

    For modules with code inside a step: hooks, manual optimization, several optimizers.

    Attributes:
        why: What the module has inside a step, for messages.
        manual: Whether ``training_step`` steps the optimizers.
    """

    why: str
    manual: bool

    def phase(
        self,
        trainable: Collection[str],
        lr: float | None,
        minibatches: int,
        kept: SlotStates | None = None,
    ) -> AbstractContextManager[None]:
        """Begin a phase of a client, and end it.

        Args:
            trainable: Names of the parameters that train.
            lr: As in :class:`~lightning_pfl.methods.base.Phase`.
            minibatches: Number of the client's minibatches in an epoch.
            kept: The optimizers' states, replaced at the end; None for fresh ones.
        """

    def run(self, batch: Any, number: int, accumulate: bool, is_last: bool) -> Tensor | None:
        """Run a minibatch as Lightning does, with the optimizer's step; return the loss if any.

        Args:
            batch: The minibatch.
            number: ``batch_idx``.
            accumulate: Whether the step comes with a later minibatch.
            is_last: Whether it is the last minibatch of an epoch.
        """

    def gradient(self, batch: Any, number: int) -> Tensor | None:
        """Run a minibatch without the optimizer's step; the gradients are the parameters'."""

    def apply(self, number: int, loss: Tensor | None, slot: str) -> None:
        """Step the optimizer on the parameters' gradients.

        Args:
            number: ``batch_idx``.
            loss: The minibatch's loss.
            slot: Name of the optimizer state.
        """

    def end_step(self) -> None:
        """End a step of the method."""

    def without_schedules(self) -> AbstractContextManager[None]:
        """Let schedulers that count steps stay where they are."""


class Engine(Protocol):
    """Runs a method's client functions. Engines agree within float tolerance."""

    name: str

    def count_steps(
        self, data: FederatedDataset, clients: Tensor, phases: tuple[Phase, ...]
    ) -> Tensor:
        """Count the optimizer steps of each client, int64 ``(clients,)``."""

    def train(self, work: LocalWork, on_clients: OnClients | None = None) -> LocalResult:
        """Run ``client_init``, the phases' steps and ``client_final`` for every client."""

    def evaluate(self, work: EvaluationWork, on_clients: OnClients | None = None) -> Evaluation:
        """Run a step of the user's module on the data of every client."""


def begin(method: Method, received: Tree, client_state: Tree, info: ClientInfo) -> Tree:
    """Run ``client_init``; the result shares no memory with what it was given.

    Raises:
        TypeError: If it returns no tree.
        ValueError: If a tensor has another number of rows, or it writes to what it was given.
    """
    before = versions(received, client_state)
    state = method.client_init(received, client_state, info)
    require_unwritten(before, "client_init", method, received, client_state)
    state = require_tree(state, "client_init", method, len(info))
    return separated(state, received, client_state)


def end(
    method: Method, received: Tree, client_state: Tree, state: Tree, info: ClientInfo
) -> tuple[Tree, Tree]:
    """Run ``client_final``, and return the upload and the new client state.

    Raises:
        TypeError: If it returns something else.
        ValueError: As :func:`begin`.
    """
    before = versions(received, client_state)
    pair = method.client_final(received, client_state, state, info)
    require_unwritten(before, "client_final", method, received, client_state)
    return require_pair(pair, method, len(info))


def require_same_entries(method: Method, before: Tree, after: Tree) -> None:
    """Require ``client_step`` to return the entries that it got.

    Raises:
        TypeError: If it returns no dict.
        ValueError: If it adds or removes some: clients without a step wouldn't have them.
    """
    if not isinstance(after, dict):
        require_tree(after, "client_step", method)
    if before.keys() != after.keys():
        raise ValueError(
            f"Expected `client_step` of {type(method).__name__} to return a state with the entries "
            f"{sorted(before)}, but got {sorted(after)}. Begin with all of them in `client_init`, "
            "as clients may take no step."
        )
