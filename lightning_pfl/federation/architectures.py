"""Clients of one architecture: their module, their memories and their engine.

Most federations have one group. Several come from :class:`~lightning_pfl.ClientModules`; each group
is batched on its own, and only what has the same shape in all of them can meet on a server.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pfl.contract.records import ClientInfo
from lightning_pfl.core.errors import ClientError, listed
from lightning_pfl.core.parameters import Layout
from lightning_pfl.core.tree import Tree, shapes
from lightning_pfl.engine.select import SelectedEngine
from lightning_pfl.federation.bank import Bank
from lightning_pfl.federation.ranks import Ranks
from lightning_pfl.methods.base import Method
from lightning_pfl.models.client_modules import ClientModules

INITIAL_ROWS = 64
"""Clients whose first memories are made at a time, where they differ."""


class Group:
    """Clients that share one architecture.

    Args:
        name: The group's name; empty where it is the only one.
        module: The module of its clients.
        layout: Who holds which of its parameters.
        clients: Their ids, int64 ``(clients,)``, ascending; None for all clients.

    Attributes:
        method: The method, bound to this group's layout; the federation's own where there is one
            group.
        bank: What its clients remember.
        engine: What runs its clients.
    """

    method: Method
    bank: Bank
    engine: SelectedEngine

    def __init__(self, name: str, module: Any, layout: Layout, clients: Tensor | None) -> None:
        self.name, self.module, self.layout, self.clients = name, module, layout, clients

    def count(self, num_clients: int) -> int:
        """How many of the federation's clients it has."""
        return num_clients if self.clients is None else len(self.clients)

    def begin(
        self,
        method: Method,
        row: Tree,
        num_clients: int,
        device: torch.device,
        ranks: Ranks,
        info: ClientInfo,
    ) -> None:
        """Fill the bank with what the clients remember before round 0.

        Args:
            method: Bound to this group.
            row: What one client remembers, by the method's ``init_own``.
            num_clients: Clients of the federation.
            device: Where the bank lives.
            ranks: The processes that share the clients.
            info: All clients of the federation.
        """
        self.method = method
        model = self.layout.model()
        self.bank = Bank(row, self.count(num_clients), device, ranks)
        if type(method).init_own_rows is Method.init_own_rows:
            return
        mine = torch.arange(num_clients) if self.clients is None else self.clients
        for some in mine.split(INITIAL_ROWS):
            some = some[ranks.part(some).index]
            if len(some):
                own = self.gather(some, device)
                self.scatter(some, method.init_own_rows(own, model, info.rows(some)))

    def gather(
        self, clients: Tensor, device: torch.device | str | None = None, edges: bool = True
    ) -> Tree:
        """Copies of what some of its clients remember, ``(clients, ...)``.

        ``edges=False`` leaves out what only messages need (``edge_state``).
        """
        without = () if edges else self.method.edge_state
        return self.bank.gather(self.positions(clients), device, without)

    def scatter(self, clients: Tensor, memories: Tree) -> None:
        """Store what some of its clients remember."""
        self.bank.scatter(self.positions(clients), memories)

    def positions(self, clients: Tensor) -> Tensor:
        """Rows of the bank of some of its clients."""
        return clients if self.clients is None else torch.searchsorted(self.clients, clients)


@contextmanager
def named(
    group: Group, names: Sequence[str], rows: Tensor, stage: str, round: int | None
) -> Iterator[None]:
    """Say in an error of a group's module which group of ``ClientModules`` it is, and whose.

    Args:
        group: The group.
        names: The names of all clients of the data.
        rows: Which of them are at work, int64 ``(clients,)``.
        stage: What they do, such as ``"client_step"``.
        round: The round; None if there is none.
    """
    try:
        yield
    except RuntimeError as cause:
        if not group.name or type(cause) not in (RuntimeError, ClientError):
            raise
        told = cause if isinstance(cause, ClientError) else None
        shown = listed(names, rows.tolist())
        raise ClientError(
            told.stage if told else stage,
            told.client if told else shown,
            round,
            f"{(told and told.__cause__) or cause}. They have the module {group.name!r} of "
            "ClientModules: check that `groups` gives each client the module that fits its data.",
        ) from cause


def architectures(module: Any) -> dict[str, Any]:
    """The modules that clients train, by name: the user's, or those of ``ClientModules``."""
    return module.groups if isinstance(module, ClientModules) else {"": module}


def layouts(module: Any, method: Method) -> dict[str, Layout]:
    """Who holds which parameter, for every architecture."""
    return {
        name: Layout(part, method.resolve_personal(Layout(part)))
        for name, part in architectures(module).items()
    }


def make_groups(module: Any, split: Mapping[str, Layout], names: Sequence[str]) -> list[Group]:
    """The groups of a module: one, or those of :class:`~lightning_pfl.ClientModules`.

    Args:
        module: The user's module.
        split: As :func:`layouts` gives it.
        names: The clients' names.
    """
    if not isinstance(module, ClientModules):
        return [Group("", module, split[""], None)]
    members = module.members(names)
    return [Group(name, part, split[name], members[name]) for name, part in module.groups.items()]


def describe(split: Mapping[str, Layout]) -> dict[str, object]:
    """What a checkpoint must agree on: the shape and the holder of every entry."""
    return {
        f"{group}: {name}" if group else name: entry
        for group, layout in split.items()
        for name, entry in layout.describe().items()
    }


def table(groups: Sequence[Group]) -> str:
    """Who holds which parameters, for the log."""
    return "\n".join(
        (f"  {group.name}\n" if group.name else "")
        + group.layout.table(group.method.holders(group.layout))
        for group in groups
    )


def bound(method: Method, group: Group, groups: Sequence[Group], *args: Any) -> Method:
    """The method for one group: itself where there is one group, else a copy of its own layout."""
    own = method if len(groups) == 1 else copy.copy(method)
    own.bind(group.layout, *args)
    return own


def model_sizes(groups: Sequence[Group], num_clients: int) -> Tensor:
    """Trainable scalars of each client's model, int64 ``(num_clients,)``."""
    sizes = torch.zeros(num_clients, dtype=torch.int64)
    for group in groups:
        clients = slice(None) if group.clients is None else group.clients
        sizes[clients] = group.layout.num_trainable()
    return sizes


def by_group(groups: Sequence[Group], clients: Tensor) -> Iterator[tuple[Group, slice | Tensor]]:
    """Split a list of clients: each group with the positions of its clients in the list."""
    if len(groups) == 1:
        yield groups[0], slice(None)
        return
    for group in groups:
        assert group.clients is not None
        at = torch.isin(clients, group.clients).nonzero().flatten()
        if len(at):
            yield group, at


def one_group(groups: Sequence[Group], clients: Tensor | None = None) -> Group:
    """The group of all these clients; of all clients of the federation for None.

    Raises:
        MisconfigurationException: If they are of several groups.
    """
    found = groups if clients is None else [group for group, _ in by_group(groups, clients)]
    if len(found) == 1:
        return found[0]
    raise MisconfigurationException(
        "Expected clients of one architecture, but got clients of "
        f"{', '.join(repr(group.name) for group in found) or 'no group'}. Ask for the clients of "
        "one group at a time; callbacks that compare or change the parameters of all clients need "
        "one module for all of them."
    )


def check_server_trees(method: Method, groups: Sequence[Group], trees: Sequence[Tree]) -> None:
    """Require that what the server holds has the same shapes in all groups.

    Args:
        method: The method.
        groups: The groups.
        trees: What ``init_server`` makes of the module of each.

    Raises:
        MisconfigurationException: Names the entry, both shapes, and what works across them.
    """
    if difference := _difference(groups, trees):
        settings = inspect.signature(type(method)).parameters
        split = next((name for name in ("shared", "personal") if name in settings), "")
        what = {"shared": "a part that all groups have", "personal": "every part that differs"}
        advice = (
            f"Name {what[split]} in `{split}=`, or across architectures use LocalOnly, SheafFMTL "
            "or HomologicalConstraints."
            if split
            else "Across architectures use LocalOnly, SheafFMTL or HomologicalConstraints; or "
            "FedPer, FedRep or LGFedAvg with a split whose shared part is the same in all groups."
        )
        raise MisconfigurationException(
            f"Expected what {type(method).__name__} holds on the server to have one shape for all "
            f"clients, but {difference}. {advice}"
        )


def check_messages(groups: Sequence[Group], everyone: ClientInfo) -> None:
    """Require that messages between neighbours have the same shapes in all groups.

    Args:
        groups: The groups, with what their clients remember before round 0.
        everyone: All clients of the federation.

    Raises:
        MisconfigurationException: Names the entry, both shapes, and what works across them.
    """
    groups = [group for group in groups if group.clients is not None and len(group.clients)]
    for exchange in groups[0].method.exchanges(0) if groups else ():
        sent = []
        for group in groups:
            assert group.clients is not None
            one = group.clients[:1]
            sent.append(group.method.send(exchange.name, group.gather(one), everyone.rows(one)))
        if difference := _difference(groups, sent):
            raise MisconfigurationException(
                f"Expected what clients of {type(groups[0].method).__name__} write to each other "
                f"to have one shape, but {difference}. Across architectures use SheafFMTL or "
                "HomologicalConstraints, whose messages are projections to common spaces; or "
                "LocalOnly."
            )


def _difference(groups: Sequence[Group], trees: Sequence[Tree]) -> str:
    """The first entry that has another shape than in the first group; empty if there is none."""
    first = shapes(trees[0])
    for group, tree in zip(groups[1:], trees[1:], strict=True):
        other = shapes(tree)
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                return (
                    f"`{name}` is {_say(first.get(name))} in group {groups[0].name!r} and "
                    f"{_say(other.get(name))} in group {group.name!r}"
                )
    return ""


def _say(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(shape)
