"""The bank: what every client remembers between rounds, stacked."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_pfl.core.tree import Tree, leaves, repeat, rows, stack, tmap, whole_nbytes
from lightning_pfl.federation.ranks import Ranks


def choose_device(place: str, device: torch.device, size: int) -> torch.device:
    """Where so many bytes live: as asked, or on the device if they take at most a quarter of it."""
    if place == "host" or device.type == "cpu":
        return torch.device("cpu")
    fits = device.type != "cuda" or size <= torch.cuda.mem_get_info(device)[1] / 4
    return device if place == "device" or fits else torch.device("cpu")


BLOCK = 2**26
"""Bytes of memories that processes send at a time."""


class ClientStateStore:
    """All clients' memories: one tensor ``(clients, *shape)`` per leaf.

    With several processes each holds the memories of its own clients: those whose id, modulo the
    number of processes, is its rank.

    Args:
        row: One client's memory at the start; every client starts with a copy.
        num_clients: Number of clients.
        device: Where the bank lives. A cohort's rows are copied to the training device and back, so
            a bank on the host costs one transfer of the cohort a round, whatever the number of
            clients.
        ranks: The processes that share the clients; None for this one alone.

    Attributes:
        complete: Whether all clients' memories are in this process.
    """

    def __init__(
        self,
        row: Tree,
        num_clients: int,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
    ) -> None:
        self.num_clients = num_clients
        self.device = torch.device(device)
        self.ranks = Ranks() if ranks is None else ranks
        self.complete = self.ranks.size == 1
        held = len(self._ids_of_shard())
        self.tree = repeat(tmap(lambda leaf: leaf.to(self.device), row), held)

    def gather(
        self,
        clients: Tensor,
        device: torch.device | str | None = None,
        without: Collection[str] = (),
    ) -> Tree:
        """Copies of some clients' memories, ``(clients, ...)``, in the order of the ids.

        Args:
            clients: Their ids, int64 ``(clients,)``.
            device: Where the copies live; None for where the bank does.
            without: Top-level entries that are left out.

        Raises:
            RuntimeError: If another process holds one of them.
        """
        index = self._rows(clients)
        known = {name: leaf for name, leaf in self.tree.items() if name not in without}
        return tmap(lambda leaf: leaf.to(device or self.device), rows(known, index))

    def scatter(self, clients: Tensor, memories: Tree) -> None:
        """Store some clients' memories; everybody else's stay untouched.

        Raises:
            RuntimeError: If another process holds one of them.
        """
        index = self._rows(clients)
        for stored, new in zip(
            leaves(self.tree), leaves(tmap(lambda _, new: new, self.tree, memories)), strict=True
        ):
            stored[index] = new.to(self.device)

    def remembers(self) -> bool:
        """Whether clients remember anything."""
        return any(True for _ in leaves(self.tree))

    def nbytes(self) -> int:
        """Memory of the bank in this process, in bytes."""
        return whole_nbytes(self.tree)

    def row_nbytes(self) -> int:
        """Bytes that one client remembers."""
        return sum(leaf.shape[1:].numel() * leaf.element_size() for leaf in leaves(self.tree))

    def state_dict(self) -> Tree:
        """All clients' memories for a checkpoint: the stacked tree itself, if it is whole.

        Several processes call it together; the tree is on the host, and empty but in process 0.
        """
        return self._collect(keep=self.ranks.rank == 0)

    def load_state_dict(self, tree: Tree) -> None:
        """Take over a saved tree of the same names and shapes, of all clients."""
        shard = self._ids_of_shard()
        for stored, saved in zip(
            leaves(self.tree), leaves(tmap(lambda _, new: new, self.tree, tree)), strict=True
        ):
            stored.copy_(saved if self.complete else saved[shard.to(saved.device)])

    # --- several processes ------------------------------------------------------------------------

    def gather_to_all_ranks(self, limit: int) -> None:
        """Give every process all memories, if they take at most ``limit`` bytes; all call it."""
        if not self.complete and self.row_nbytes() * self.num_clients <= limit:
            tree = self._collect(keep=True)
            self.tree = tmap(lambda leaf: leaf.to(self.device), tree)
            self.complete = True

    def keep_shard(self) -> None:
        """Undo :meth:`gather_to_all_ranks`, for a run that goes on."""
        if self.complete and self.ranks.size > 1:
            self.tree = rows(self.tree, self._ids_of_shard().to(self.device))
            self.complete = False

    def _ids_of_shard(self) -> Tensor:
        return torch.arange(self.ranks.rank, self.num_clients, self.ranks.size)

    def _rows(self, clients: Tensor) -> Tensor:
        """Where the memories of some clients are."""
        if self.complete or not self.remembers():
            return clients.to(self.device)
        holder = clients % self.ranks.size
        if len(foreign := clients[holder != self.ranks.rank]):
            raise RuntimeError(
                f"Expected clients whose memories are in process {self.ranks.rank}, but those of "
                f"client {int(foreign[0])} are in process {int(foreign[0]) % self.ranks.size} of "
                f"{self.ranks.size}. Ask after the run, when every process has all memories that "
                "fit, or load the checkpoint in one process; a callback may call "
                "`personal_models(strategy, clients)` in all processes."
            )
        return (clients // self.ranks.size).to(self.device)

    def _collect(self, keep: bool) -> Tree:
        if self.complete or not self.remembers():
            return self.tree
        pieces, size = [], max(1, BLOCK // max(self.row_nbytes(), 1))
        for clients in torch.arange(self.num_clients).split(size):
            shard = self.ranks.shard(clients)
            piece = shard.all_gather(self.gather(clients[shard.index], self.ranks.device))
            if keep:
                pieces.append(tmap(lambda leaf: leaf.cpu(), piece))
        return stack(pieces) if keep else {}
