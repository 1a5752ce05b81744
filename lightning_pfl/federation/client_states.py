"""ClientStateStore: the stacked states of all clients between rounds."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send
from lightning_pfl.core.tree import (
    Tree,
    items,
    leaves,
    repeat,
    rows,
    shapes,
    stack,
    tmap,
    total_nbytes,
)
from lightning_pfl.federation.ranks import Ranks


def choose_device(place: str, device: torch.device, size: int) -> torch.device:
    """Choose the device of ``size`` bytes: ``place``, or the GPU if they take up to 1/4 of it."""
    if place == "host" or device.type == "cpu":
        return torch.device("cpu")
    fits = device.type != "cuda" or size <= torch.cuda.mem_get_info(device)[1] / 4
    return device if place == "device" or fits else torch.device("cpu")


BLOCK = 2**26
"""Largest size in bytes of client states that processes send at once."""


def _versions(tree: Tree) -> tuple[int, ...] | None:
    """Return what counts each tensor's writes; None if they aren't counted."""
    found = list(leaves(tree))
    return None if any(leaf.is_inference() for leaf in found) else tuple(t._version for t in found)


class ClientStateStore:
    """The states of all clients: one tensor ``(clients, *shape)`` per leaf.

    With several processes each has the states of its own clients.

    Args:
        row: One client's initial state; every client starts with a copy.
        num_clients: Number of clients.
        device: Device of the store. A cohort's rows are copied to the training device and back, so
            a store on the host costs one transfer of the cohort per round.
        ranks: The processes that share the clients; None for this one alone.
        owners: The rank of each client's process, int64 ``(clients,)``; None: dealt by id.

    Attributes:
        complete: Whether this process has the states of all clients.
    """

    def __init__(
        self,
        row: Tree,
        num_clients: int,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
        owners: Tensor | None = None,
    ) -> None:
        self.num_clients = num_clients
        self.device = torch.device(device)
        self.ranks = Ranks() if ranks is None else ranks
        self.owners = torch.arange(num_clients) % self.ranks.size if owners is None else owners
        self.complete = self.ranks.size == 1
        self._number = 0
        own = self.own_ids()
        self._rows = torch.zeros(num_clients, dtype=torch.int64)
        self._rows[own] = torch.arange(len(own))
        self.tree = repeat(tmap(lambda leaf: leaf.to(self.device), row), len(own))

    @property
    def tree(self) -> Tree:
        """The states of the clients in this process, ``(clients, ...)``."""
        return self._tree

    @tree.setter
    def tree(self, tree: Tree) -> None:
        self._tree = tree
        self._note_all()

    def _note_all(self) -> None:
        """Count a write to all rows."""
        self._number += 1
        rows = {len(leaf) for leaf in leaves(self._tree)}
        self._writes = torch.full((max(rows, default=0),), self._number)
        self._versions = _versions(self._tree)

    def written(self, clients: Tensor) -> Tensor:
        """Return the number of the last write of some clients' states, int64 ``(clients,)``.

        A state with the number of before is the one of before. Whatever writes to the tensors
        without :meth:`scatter` counts as a write to all of them.
        """
        if self._versions is None or _versions(self._tree) != self._versions:
            self._note_all()
        return self._writes[self._held(clients)]

    def gather(
        self,
        clients: Tensor,
        device: torch.device | str | None = None,
        without: Collection[str] = (),
    ) -> Tree:
        """Copy some clients' states, ``(clients, ...)``, in the order of the ids.

        Args:
            clients: Their ids, int64 ``(clients,)``.
            device: Device of the copies; None for the store's.
            without: Top-level entries to leave out.

        Raises:
            RuntimeError: If one of them is in another process.
        """
        index = send(self._held(clients), self.device)
        known = {name: leaf for name, leaf in self.tree.items() if name not in without}
        return tmap(lambda leaf: send(leaf, device or self.device), rows(known, index))

    def scatter(self, clients: Tensor, client_state: Tree) -> None:
        """Store some clients' states, ``(clients, ...)``.

        Raises:
            RuntimeError: If one of them is in another process.
            ValueError: If a tensor isn't one of the initial state, or has another shape.
        """
        self.require_entries(client_state)
        held = self._held(clients)
        index, new = send(held, self.device), dict(items(client_state))
        self.written(clients[:0])  # of other code, until now
        for path, stored in items(self.tree):
            stored[index] = new[path].to(self.device)
        if self.has_entries():
            self._number += 1
            self._writes[held] = self._number
            self._versions = _versions(self._tree)

    def require_entries(self, client_state: Tree) -> None:
        """Raise ValueError unless states ``(clients, ...)`` have the entries of the store."""
        stored, new = shapes(self.tree), shapes(client_state)
        for path in {**stored, **new}:
            wanted, given = (
                f"the shape {entries[path][1:]}" if path in entries else "no tensor"
                for entries in (stored, new)
            )
            if wanted != given:
                raise ValueError(
                    f"Expected a client's state to keep the entries of `init_client_state`, with "
                    f"{wanted} as {path!r}, but after the round it has {given}. Make every entry "
                    "in `init_client_state`, and return all of them from `client_final`."
                )

    def has_entries(self) -> bool:
        """Whether client states have any entries."""
        return any(True for _ in leaves(self.tree))

    def nbytes(self) -> int:
        """Count the bytes of the store in this process."""
        return total_nbytes(self.tree)

    def row_nbytes(self, without: Collection[str] = ()) -> int:
        """Count the bytes of one client's state, without some top-level entries."""
        counted = {name: leaf for name, leaf in self.tree.items() if name not in without}
        return sum(leaf.shape[1:].numel() * leaf.element_size() for leaf in leaves(counted))

    def state_dict(self) -> Tree:
        """Return all clients' states for a checkpoint, without a copy if the store is complete.

        A collective call of all processes; the tree is on the host, and empty except on rank 0.
        """
        return self._collect(keep=self.ranks.rank == 0)

    def load_state_dict(self, tree: Tree, clients: Tensor | None = None) -> None:
        """Load a saved tree, with the same names and shapes.

        Args:
            tree: States of some clients, ``(some, ...)``; those of other processes are left.
            clients: Their ids, int64 ``(some,)``; None: all clients, or the first ones.
        """
        for stored, saved in zip(
            leaves(self.tree), leaves(tmap(lambda _, new: new, self.tree, tree)), strict=True
        ):
            ids = torch.arange(len(saved)) if clients is None else clients
            at = torch.arange(len(ids))
            if not self.complete:
                at = (self.owners[ids] == self.ranks.rank).nonzero().flatten()
            stored[self._held(ids[at]).to(stored.device)] = saved[at].to(stored)

    # --- several processes ------------------------------------------------------------------------

    def own(self) -> Tree:
        """Return the states of this process's clients, ``(own, ...)``, without a copy if possible.

        They are in the order of :meth:`own_ids`, also where all states are here.
        """
        if self.complete and self.ranks.size > 1:
            return rows(self.tree, self.own_ids().to(self.device))
        return self.tree

    def gather_to_all_ranks(self, limit: int) -> None:
        """Gather all states on all processes, up to ``limit`` bytes; a collective call."""
        if not self.complete and self.row_nbytes() * self.num_clients <= limit:
            tree = self._collect(keep=True)
            self.tree = tmap(lambda leaf: leaf.to(self.device), tree)
            self.complete = True

    def keep_shard(self) -> None:
        """Undo :meth:`gather_to_all_ranks`, for a run that continues."""
        if self.complete and self.ranks.size > 1:
            self.tree = self.own()
            self.complete = False

    def own_ids(self) -> Tensor:
        """Return the ids of this process's clients, ascending."""
        if self.ranks.size == 1:
            return torch.arange(self.num_clients)
        return (self.owners == self.ranks.rank).nonzero().flatten()

    def _held(self, clients: Tensor) -> Tensor:
        """Find the rows of some clients in this process, on the host."""
        if self.complete or not self.has_entries():
            return clients
        if len(foreign := clients[self.owners[clients] != self.ranks.rank]):
            raise RuntimeError(
                f"Expected clients whose states are in process {self.ranks.rank}, but that of "
                f"client {int(foreign[0])} is in process {int(self.owners[foreign[0]])} of "
                f"{self.ranks.size}. Load the checkpoint in one process, or call "
                "`personal_models(federation, clients)` in all processes."
            )
        return self._rows[clients]

    def _collect(self, keep: bool) -> Tree:
        if self.complete or not self.has_entries():
            return self.tree
        pieces, size = [], max(1, BLOCK // max(self.row_nbytes(), 1))
        for clients in torch.arange(self.num_clients).split(size):
            shard = self.ranks.shard(self.owners[clients])
            piece = shard.all_gather(self.gather(clients[shard.index], self.ranks.device))
            if keep:
                pieces.append(tmap(lambda leaf: leaf.cpu(), piece))
        return stack(pieces) if keep else {}
