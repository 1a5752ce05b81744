"""Clients of one architecture: their module, their states and their engine.

Most federations have one architecture. Several come from :class:`~lightning_pfl.ClientModules`. All
that depends on the architecture is split: each has a module, a parameter split, a store of client
states, an engine and a copy of the method bound to its parameter split, and is batched on its own.
``cohort.py`` runs the architectures of a round and joins their results.

What the server holds must have the same shapes in all of them. This is checked before the first
round, on what ``init_server`` makes of each module, so a method declares nothing: ``LocalOnly``,
methods over a graph whose messages have one shape, and split methods with a common shared part
work; the others are refused with the entry's name. ``federation.parameter_split``,
``federation.client_states`` and ``federation.engine`` mean the one architecture there is, and are
an error where there are several. Several architectures need one process.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_pfl.contract.known import Known
from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.errors import ClientError
from lightning_pfl.core.parameters import RUNNING_STATISTICS, ParameterSplit
from lightning_pfl.core.tree import Tree, rows, shapes
from lightning_pfl.engine.base import StepOptions
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.methods.base import Method
from lightning_pfl.models.client_modules import ClientModules

INITIAL_ROWS = 64
"""Number of clients whose initial states are made at once, where they differ."""


class Architecture:
    """The clients that share an architecture.

    Args:
        name: The architecture's name; empty if it is the only one.
        module: The module of its clients.
        parameter_split: The split of the module's parameters.
        clients: Ids of its clients, int64 ``(clients,)``, ascending; None for all clients.

    Attributes:
        method: The method, bound to this parameter split; the federation's own if there is only one
            architecture.
        client_states: The states of its clients.
        engine: The engine of its clients.
        optimizer: The template of its clients' optimizers, from ``configure_optimizers``; None
            until it is needed.
        schedule: Its options at each step of a phase; None if they stay.
        counts_steps: Whether a scheduler counts the clients' steps, and not rounds.
    """

    method: Method
    client_states: ClientStateStore
    engine: SelectedEngine
    optimizer: Optimizer | None = None
    schedule: StepOptions | None = None
    counts_steps: bool = False

    def __init__(
        self, name: str, module: Any, parameter_split: ParameterSplit, clients: Tensor | None
    ) -> None:
        self.name, self.module, self.parameter_split, self.clients = (
            name,
            module,
            parameter_split,
            clients,
        )

    def count(self, num_clients: int) -> int:
        """Count its clients in the federation."""
        return num_clients if self.clients is None else len(self.clients)

    def begin(
        self,
        method: Method,
        row: Tree,
        num_clients: int,
        device: torch.device,
        ranks: Ranks,
        info: ClientInfo,
        owners: Tensor,
    ) -> None:
        """Fill the store with the clients' states before round 0.

        Args:
            method: The method, bound to this architecture.
            row: One client's state, from the method's ``init_client_state``.
            num_clients: Number of clients in the federation.
            device: Device of the store.
            ranks: The processes that share the clients.
            info: All clients of the federation.
            owners: The rank of each client's process, int64 ``(num_clients,)``.
        """
        self.method = method
        model = self.parameter_split.model()
        mine = torch.arange(num_clients) if self.clients is None else self.clients
        self.client_states = ClientStateStore(row, len(mine), device, ranks, owners[mine])
        if type(method).init_client_state_rows is Method.init_client_state_rows:
            return
        for some in mine[self.client_states.own_ids()].split(INITIAL_ROWS):
            if len(some):
                client_state = self.gather(some, device)
                self.scatter(
                    some, method.init_client_state_rows(client_state, model, info.rows(some))
                )

    def gather(
        self, clients: Tensor, device: torch.device | str | None = None, evaluated: bool = False
    ) -> Tree:
        """Copy the states of some of its clients, ``(clients, ...)``.

        ``evaluated=True`` leaves out what only messages and training use (``edge_state``,
        ``training_state``).
        """
        without = self.not_evaluated if evaluated else ()
        return self.client_states.gather(self.positions(clients), device, without)

    @property
    def not_evaluated(self) -> tuple[str, ...]:
        """The entries of client states that personal models don't read."""
        return (*self.method.edge_state, *self.method.training_state)

    def scatter(self, clients: Tensor, client_state: Tree) -> None:
        """Store the states of some of its clients."""
        self.client_states.scatter(self.positions(clients), client_state)

    def positions(self, clients: Tensor) -> Tensor:
        """Find the rows of some of its clients in the store."""
        return clients if self.clients is None else torch.searchsorted(self.clients, clients)


@contextmanager
def naming_architecture(
    architecture: Architecture, names: Sequence[str], rows: Tensor, stage: str, round: int | None
) -> Iterator[None]:
    """Add the architecture's name in ``ClientModules`` to errors of its module.

    Args:
        architecture: The architecture.
        names: The names of all clients of the data.
        rows: Clients at work, int64 ``(clients,)``.
        stage: Name of the function, such as ``"client_step"``.
        round: The round; None outside of rounds.
    """
    try:
        yield
    except RuntimeError as cause:
        if not architecture.name or type(cause) not in (RuntimeError, ClientError):
            raise
        known = cause if isinstance(cause, ClientError) else None
        raise ClientError(
            known.stage if known else stage,
            known.clients if known else [names[row] for row in rows.tolist()],
            round,
            f"{(known and known.__cause__) or cause}. They have the module {architecture.name!r} "
            "of ClientModules: check that `groups` gives each client a module that fits its data.",
        ) from cause


def modules_by_name(module: Any) -> dict[str, Any]:
    """Map names to the modules that clients train: the user's, or those of ``ClientModules``."""
    return module.groups if isinstance(module, ClientModules) else {"": module}


def parameter_splits(module: Any, method: Method) -> dict[str, ParameterSplit]:
    """Split the parameters of every architecture."""
    return {
        name: ParameterSplit(part, method.resolve_personal(ParameterSplit(part)))
        for name, part in modules_by_name(module).items()
    }


def make_architectures(
    module: Any, split: Mapping[str, ParameterSplit], names: Sequence[str]
) -> list[Architecture]:
    """Make the architectures of a module: one, or those of :class:`~lightning_pfl.ClientModules`.

    Args:
        module: The user's module.
        split: Result of :func:`parameter_splits`.
        names: The clients' names.
    """
    if not isinstance(module, ClientModules):
        return [Architecture("", module, split[""], None)]
    members = module.members(names)
    return [
        Architecture(name, part, split[name], members[name]) for name, part in module.groups.items()
    ]


def describe(split: Mapping[str, ParameterSplit]) -> dict[str, object]:
    """Return the shape and kind of every entry, for checkpoints."""
    return {
        f"{architecture}: {name}" if architecture else name: entry
        for architecture, parameter_split in split.items()
        for name, entry in parameter_split.describe().items()
    }


def table(architectures: Sequence[Architecture]) -> str:
    """Format the parameter splits for the log."""
    return "\n".join(
        (f"  {architecture.name}\n" if architecture.name else "")
        + architecture.parameter_split.table(
            architecture.method.ownership(architecture.parameter_split)
        )
        for architecture in architectures
    )


def bound(
    method: Method, architecture: Architecture, architectures: Sequence[Architecture], known: Known
) -> Method:
    """Bind a method to one architecture: itself if there is only one, else a copy.

    Args:
        method: The method.
        architecture: The architecture.
        architectures: All of them.
        known: Facts about the federation, with the parameter split of any architecture.
    """
    mine = method if len(architectures) == 1 else copy.copy(method)
    mine.bind(replace(known, parameter_split=architecture.parameter_split))
    return mine


def model_sizes(architectures: Sequence[Architecture], num_clients: int) -> Tensor:
    """Count the trainable scalars of each client's model, int64 ``(num_clients,)``."""
    sizes = torch.zeros(num_clients, dtype=torch.int64)
    for architecture in architectures:
        clients = slice(None) if architecture.clients is None else architecture.clients
        sizes[clients] = architecture.parameter_split.num_trainable()
    return sizes


def by_architecture(
    architectures: Sequence[Architecture], clients: Tensor
) -> Iterator[tuple[Architecture, slice | Tensor]]:
    """Split a list of clients: each architecture with the positions of its clients."""
    if len(architectures) == 1:
        yield architectures[0], slice(None)
        return
    for architecture in architectures:
        assert architecture.clients is not None
        at = torch.isin(clients, architecture.clients).nonzero().flatten()
        if len(at):
            yield architecture, at


def split_rows(tree: Tree, at: slice | Tensor) -> Tree:
    """Return one architecture's rows of a tree; views where there is only one architecture."""
    return tree if isinstance(at, slice) else rows(tree, at)


def merge_values(
    parts: Sequence[tuple[slice | Tensor, Mapping[str, Tensor]]], count: int
) -> dict[str, Tensor]:
    """Merge logged values of several architectures, ``(count,)``; NaN where one has none."""
    if len(parts) == 1 and isinstance(parts[0][0], slice):
        return dict(parts[0][1])
    found: dict[str, Tensor] = {}
    for at, logged in parts:
        for name, value in logged.items():
            gap = torch.full((count,), torch.nan, dtype=value.dtype, device=value.device)
            found.setdefault(name, gap)[at] = value
    return found


def one_architecture(
    architectures: Sequence[Architecture], clients: Tensor | None = None
) -> Architecture:
    """Return the only architecture of some clients, or of all clients for None.

    Raises:
        MisconfigurationException: If they have several.
    """
    found = (
        architectures
        if clients is None
        else [architecture for architecture, _ in by_architecture(architectures, clients)]
    )
    if len(found) == 1:
        return found[0]
    raise MisconfigurationException(
        "Expected clients of one architecture, but got clients of "
        f"{', '.join(repr(architecture.name) for architecture in found) or 'no architecture'}. "
        "Use the clients of one architecture at a time, and only callbacks that don't compare "
        "parameters of all clients."
    )


def check_server_trees(
    method: Method, architectures: Sequence[Architecture], trees: Sequence[Tree]
) -> None:
    """Require the same shapes and constants of the server's tree for all architectures.

    Args:
        method: The method.
        architectures: The architectures.
        trees: Result of ``init_server`` for the module of each.

    Raises:
        MisconfigurationException: If shapes differ, or values of constant buffers.
    """
    difference, kind = _difference(architectures, trees), "shape"
    if not difference:
        difference, kind = _other_constant(architectures, trees), "value of each constant buffer"
    if difference:
        settings = inspect.signature(type(method)).parameters
        split = next((name for name in ("shared", "personal") if name in settings), "")
        what = {"shared": "a part that is equal", "personal": "every part that differs"}
        advice = (
            f"Name {what[split]} in `{split}=`, or use LocalOnly, SheafFMTL or "
            "HomologicalConstraints."
            if split
            else "Use LocalOnly, SheafFMTL or HomologicalConstraints, or FedPer, FedRep or "
            "LGFedAvg with a shared part of equal shapes."
        )
        raise MisconfigurationException(
            f"Expected the server of {type(method).__name__} to have one {kind} for all "
            f"clients, but {difference}. {advice}"
        )


def _other_constant(architectures: Sequence[Architecture], trees: Sequence[Tree]) -> str:
    """Describe a shared buffer, such as class weights, that differs between architectures.

    Running statistics are none: like parameters, they begin as the first architecture's.
    """
    first = trees[0].get("model", {})
    for architecture, tree in zip(architectures[1:], trees[1:], strict=True):
        split, shared = architecture.parameter_split, tree.get("model", {})
        for name in split.buffers:
            owner = split.module.get_submodule(name.rpartition(".")[0])
            if name not in shared or isinstance(owner, RUNNING_STATISTICS):
                continue
            if not torch.equal(first[name], shared[name]):
                return (
                    f"the shared buffer `{name}` has another value in architecture "
                    f"{architecture.name!r} than in {architectures[0].name!r}"
                )
    return ""


def check_messages(architectures: Sequence[Architecture], everyone: ClientInfo) -> None:
    """Require that messages between neighbours have the same shapes for all architectures.

    Args:
        architectures: The architectures, with their clients' states before round 0.
        everyone: All clients of the federation.

    Raises:
        MisconfigurationException: If shapes differ.
    """
    architectures = [
        architecture
        for architecture in architectures
        if architecture.clients is not None and len(architecture.clients)
    ]
    for exchange in architectures[0].method.exchanges(0) if architectures else ():
        sent = []
        for architecture in architectures:
            assert architecture.clients is not None
            one = architecture.clients[:1]
            sent.append(
                architecture.method.send(
                    exchange.name, architecture.gather(one), everyone.rows(one)
                )
            )
        if difference := _difference(architectures, sent):
            raise MisconfigurationException(
                f"Expected messages between clients of {type(architectures[0].method).__name__} "
                f"to have one shape, but {difference}. Use SheafFMTL, HomologicalConstraints or "
                "LocalOnly across architectures."
            )


def _difference(architectures: Sequence[Architecture], trees: Sequence[Tree]) -> str:
    """Describe the first entry with another shape than in the first architecture, or return ""."""
    first = shapes(trees[0])
    for architecture, tree in zip(architectures[1:], trees[1:], strict=True):
        other = shapes(tree)
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                return (
                    f"`{name}` is {_shape_text(first.get(name))} in architecture "
                    f"{architectures[0].name!r} and {_shape_text(other.get(name))} in architecture "
                    f"{architecture.name!r}"
                )
    return ""


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(shape)
