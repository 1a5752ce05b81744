"""Records of a round: the cohort, its results and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pfl.core.transfer import begin_copies, send
from lightning_pfl.core.tree import Model, Tree, rows

SlotStates = dict[str, dict[str, dict[str, Any]]]
"""A client's optimizer state by slot, parameter and torch's key, without client axis."""
OptimizerState = dict[str, SlotStates]
"""The same by phase."""


def one_rate(rates: Collection[float]) -> float:
    """Return the single learning rate of an optimizer's parameter groups.

    Raises:
        ValueError: If they have several.
    """
    if len(rates) != 1:
        raise ValueError(
            f"Expected one learning rate for all parameter groups, but got {sorted(rates)}. "
            "Give all groups of `configure_optimizers` the same `lr`, which this method's update "
            "uses."
        )
    return next(iter(rates))


@dataclass
class ClientInfo:
    """Facts about the clients that a function works on; tensors have the shape ``(clients,)``.

    Attributes:
        index: Client ids, int64.
        num_samples: Training samples, as counted by the loop, int64.
        steps: Local optimizer steps of this round, all phases together, int64.
        weights: Aggregation weights of the method's ``weighting``, float64, summing to 1 over the
            cohort.
        round: The communication round, from 0.
        num_clients: Number of clients in the federation, sampled or not.
        rates: The distinct learning rates of the clients' optimizer now; empty without training.
        travel: Length that a constant gradient of 1 would have moved the clients in this round, in
            units of the learning rate, float64; for plain SGD the number of steps. Set in
            ``client_final`` of a method with ``measures_travel``, else None.
    """

    index: Tensor
    num_samples: Tensor
    steps: Tensor
    weights: Tensor
    round: int
    num_clients: int
    rates: tuple[float, ...] = ()
    travel: Tensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lr(self) -> float:
        """The learning rate, for updates outside of ``client_step``.

        An error if the parameter groups differ.
        """
        return one_rate(self.rates)

    def rows(self, index: slice | Tensor) -> ClientInfo:
        """Select some of the clients, without renormalising the weights."""
        tensors = {k: getattr(self, k) for k in ("index", "num_samples", "steps", "weights")}
        same = {k: getattr(self, k) for k in ("round", "num_clients", "rates")}
        return ClientInfo(**rows(tensors, index), **same)

    def keep(self, accepted: Tensor) -> ClientInfo:
        """Select accepted clients, bool ``(clients,)``, with weights renormalised to sum to 1."""
        kept = self.rows(accepted.nonzero().flatten())
        total = kept.weights.sum()
        kept.weights = (
            kept.weights / total
            if total > 0
            else torch.full_like(kept.weights, 1 / max(len(kept), 1))
        )
        return kept


@dataclass(frozen=True)
class FitPlan:
    """Facts about a fit before its first round.

    Attributes:
        max_rounds: Number of the round at which the fit ends at the latest; None without a limit.
        reload_every: Number of rounds between loads of the training data; 0 for never.
    """

    max_rounds: int | None
    reload_every: int


@dataclass
class Round:
    """One communication round, filled in as it proceeds.

    Fields are None until their stage is reached.

    Attributes:
        number: The round, from 0; equal to ``trainer.current_epoch``.
        info: The cohort.
        received: Trees that the server sent, ``(clients, ...)``.
        uploads: Trees that the clients sent, ``(clients, ...)``; after the gate only accepted ones.
        rejected: Reasons by id of the clients whose upload the gate rejected.
        metrics: Values logged by the clients' training steps, averaged over clients and steps; at
            the end also the method's values.
        bytes_down: Bytes sent to one client. ``bytes_up``: bytes sent by one client. Where clients
            differ, their mean, rounded down.
        bytes_exchanged: Bytes of all messages between clients.
        server: The server's tree at the start of the round.
    """

    number: int
    info: ClientInfo
    received: Tree | None = None
    uploads: Tree | None = None
    rejected: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_exchanged: int = 0
    server: Tree | None = None

    @property
    def accepted(self) -> Tensor:
        """Clients of the cohort that the gate accepted, bool ``(clients,)``, on the CPU."""
        return torch.tensor([k not in self.rejected for k in self.info.index.tolist()])


@dataclass(frozen=True)
class LogOptions:
    """The options of a logged value that matter after averaging over clients.

    Attributes:
        prog_bar, logger: Whether to show and log it, as in ``self.log``.
        higher_is_better: That of a torchmetrics object; None if unknown.
    """

    prog_bar: bool = False
    logger: bool = True
    higher_is_better: bool | None = None


@dataclass
class LocalResult:
    """The results of a cohort's local training.

    Every tensor has a leading client axis in the order of ``info.index``.

    Attributes:
        uploads: Trees that leave the clients.
        client_state: The clients' new states.
        logs: Values logged in ``training_step``: mean over each client's minibatches, weighted by
            batch size, ``(clients,)``; NaN where a client logged nothing.
        options: Options of each value.
        loss: Mean training loss over each client's minibatches, ``(clients,)``; Inf if it wasn't
            finite, NaN if none was computed.
        optimizers: The clients' optimizer states at the end, where they are kept; else empty.
    """

    uploads: Tree
    client_state: Tree
    logs: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, LogOptions] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.empty(0))
    optimizers: list[OptimizerState] = field(default_factory=list)


@dataclass
class Evaluation:
    """Per-client results of an evaluation.

    Attributes:
        values: Values logged by ``validation_step`` or ``test_step``, by key: mean over each
            client's batches, weighted by batch size, ``(clients,)``; NaN for a client without
            samples. Logged torchmetrics objects are computed per client.
        counts: Samples evaluated, int64 ``(clients,)``.
        options: Options of each value.
        predictions: For ``predict_step``: per client, the list of results of its batches.
        orders: The names that a step has logged, in its order, of all steps.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    options: dict[str, LogOptions] = field(default_factory=dict)
    predictions: list[list[Any]] = field(default_factory=list)
    orders: frozenset[tuple[str, ...]] = frozenset()

    def ordered(self) -> Evaluation:
        """Sort the values as steps log them, whichever client or engine was first.

        Of names that no step logs one after the other, the first in the alphabet is first, as it is
        where steps contradict each other.
        """
        after = {name: set[str]() for order in self.orders for name in order}
        for order in self.orders:
            for earlier, later in pairwise(order):
                after[later].add(earlier)
        names = []
        while after:
            free = [name for name, others in after.items() if not others & after.keys()]
            names.append(min(free or after))
            del after[names[-1]]
        values = {name: self.values[name] for name in names if name in self.values}
        return replace(self, values={**values, **self.values})

    def spread(self, at: Tensor, clients: int) -> Evaluation:
        """Place the clients among others, which have no samples.

        Args:
            at: Their positions, int64.
            clients: How many clients the result has.
        """

        def spread(found: Tensor, gap: float) -> Tensor:
            wide = found.new_full((clients,), gap)
            return wide.index_copy(0, send(at, found.device), found)

        values = {key: spread(found, torch.nan) for key, found in self.values.items()}
        return Evaluation(values, spread(self.counts, 0), self.options, orders=self.orders)


def to_host(evaluations: Sequence[Evaluation]) -> Callable[[], list[Evaluation]]:
    """Begin to copy results to the host.

    Returns:
        A function that waits for them once.
    """
    read = begin_copies(
        [leaf for one in evaluations for leaf in (*one.values.values(), one.counts)]
    )

    def arrived() -> list[Evaluation]:
        copies = iter(read())
        return [
            replace(one, values={name: next(copies) for name in one.values}, counts=next(copies))
            for one in evaluations
        ]

    return arrived


@dataclass
class ClientResults:
    """The last evaluation of a split, client by client.

    Attributes:
        split: ``"val"`` or ``"test"``.
        round: The round after which it was, from 0; -1 before the first.
        names: Names of the evaluated clients.
        evaluations: The results by prefix: ``""`` (personal models), ``"global/"``, and those of
            callbacks, such as ``"ft/"``.
    """

    split: str
    round: int
    names: Sequence[str]
    evaluations: dict[str, Evaluation]

    def among(self, names: Sequence[str]) -> dict[str, Evaluation]:
        """Return the evaluations for more clients, of which the others have no samples.

        Args:
            names: Names of all, with those of the evaluated clients.
        """
        if list(names) == list(self.names):
            return self.evaluations
        position = {name: at for at, name in enumerate(names)}
        at = torch.tensor([position[name] for name in self.names], dtype=torch.int64)
        return {prefix: one.spread(at, len(names)) for prefix, one in self.evaluations.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values for a checkpoint."""
        return {
            "round": self.round,
            "names": list(self.names),
            "evaluations": {
                prefix: {
                    "values": {key: values.cpu() for key, values in found.values.items()},
                    "counts": found.counts.cpu(),
                    "options": {key: asdict(options) for key, options in found.options.items()},
                }
                for prefix, found in self.evaluations.items()
            },
        }

    @classmethod
    def restored(cls, split: str, state: Mapping[str, Any]) -> ClientResults:
        """Make the results again of a split, of which `state_dict` was saved."""
        return cls(
            split,
            state["round"],
            tuple(state["names"]),
            {
                # Copies: a checkpoint's tensors may be on the disk.
                prefix: Evaluation(
                    {key: values.clone() for key, values in found["values"].items()},
                    found["counts"].clone(),
                    {key: LogOptions(**options) for key, options in found["options"].items()},
                )
                for prefix, found in state["evaluations"].items()
            },
        )

    def columns(self, only: str | None = None) -> dict[str, list[float]]:
        """Return each value's list over clients, by its name with prefix.

        Args:
            only: The one prefix whose values are returned; None: all.
        """
        return {
            f"{prefix}{key}": values.tolist()
            for prefix, found in self.evaluations.items()
            if only in (None, prefix)
            for key, values in found.values.items()
        }


@dataclass
class BestModel:
    """A client's personal model of the round that was best for it in validation.

    Attributes:
        round: The round, from 0.
        value: What it was chosen by.
        model: The model, without client axis, on the CPU; empty where another process has it.
    """

    round: int
    value: float
    model: Model


class OnClients(Protocol):
    """A function that is called when clients have finished.

    It gets their positions in the cohort, and in training a function that computes their losses,
    ``(clients,)``, which few listeners ask for.
    """

    def __call__(
        self, positions: list[int], losses: Callable[[], Tensor] | None = None
    ) -> bool | None:
        """Take note of the clients; return False if this has run no code of a user's.

        Before such code, call :func:`~lightning_pfl.core.randomness.put_generators_back`.
        """


def as_positions_of(on_clients: OnClients | None, at: slice | Tensor) -> OnClients | None:
    """Convert positions in a part of a list of clients to positions in the list.

    Args:
        on_clients: Called with positions in the list; None without a listener.
        at: Positions of the part's clients in the list.
    """
    if on_clients is None or isinstance(at, slice):
        return on_clients

    listed = at.tolist()

    def call(positions: list[int], losses: Callable[[], Tensor] | None = None) -> bool | None:
        return on_clients([listed[position] for position in positions], losses)

    return call
