"""The bank: what every client remembers between rounds, stacked."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.tree import Tree, leaves, rows, tmap


class Bank:
    """All clients' memories: one tensor ``(num_clients, *shape)`` per leaf.

    Args:
        row: One client's memory at the start; every client starts with a copy.
        num_clients: Number of clients.
        device: Where the bank lives. A cohort's rows are copied to the training device and back, so
            a bank on the host costs one transfer of the cohort a round, whatever the number of
            clients.
    """

    def __init__(self, row: Tree, num_clients: int, device: torch.device | str = "cpu") -> None:
        self.num_clients = num_clients
        self.device = torch.device(device)
        self.tree = tmap(
            lambda leaf: (
                leaf.to(self.device)
                .expand(num_clients, *leaf.shape)
                .clone(memory_format=torch.contiguous_format)
            ),
            row,
        )

    def gather(self, clients: Tensor, device: torch.device | str | None = None) -> Tree:
        """Copies of some clients' memories, ``(clients, ...)``, in the order of the ids."""
        index = clients.to(self.device)
        return tmap(lambda leaf: leaf.to(device or self.device), rows(self.tree, index))

    def scatter(self, clients: Tensor, memories: Tree) -> None:
        """Store some clients' memories; everybody else's stay untouched."""
        index = clients.to(self.device)
        for stored, new in zip(
            leaves(self.tree), leaves(tmap(lambda _, new: new, self.tree, memories)), strict=True
        ):
            stored[index] = new.to(self.device)

    def nbytes(self) -> int:
        """Memory of the bank in bytes."""
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves(self.tree))

    def state_dict(self) -> Tree:
        """The stacked tree itself, for a checkpoint."""
        return self.tree

    def load_state_dict(self, tree: Tree) -> None:
        """Take over a saved tree of the same names and shapes."""
        for stored, saved in zip(
            leaves(self.tree), leaves(tmap(lambda _, new: new, self.tree, tree)), strict=True
        ):
            stored.copy_(saved)
