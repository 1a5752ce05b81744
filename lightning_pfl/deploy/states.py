"""Client states on the disk of their node: a file for every client and version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_pfl.core.tree import Tree, rows, stack, tmap
from lightning_pfl.federation.checkpoint import explain_read_errors
from lightning_pfl.federation.client_states import ClientStateStore
from lightning_pfl.trainer.checkpoint_io import AtomicCheckpointIO

NONE = -1
"""The version of a client whose work was never accepted: its state is the initial one."""


class LostStateError(RuntimeError):
    """The server counts on a client state that this node doesn't have, or can't read."""


class StatesOnDisk(ClientStateStore):
    """The client states of a node.

    Every version of a client's state is a file of its own, written atomically and never changed.
    The server says which version counts: a client whose work was left out, or whose server went
    back to a checkpoint, goes on from an older file.

    Args:
        folder: Where they live; made for its owner's eyes alone.
        names: The federation's clients, in the order of their ids.
        row: One client's state before round 0.
        initial: Makes the first states of some clients, ``(clients, ...)``.
        device: Where copies live.

    Attributes:
        versions: The version to read, by client id.
        next: The version that :meth:`scatter` writes.
    """

    def __init__(
        self,
        folder: Path,
        names: tuple[str, ...],
        row: Tree,
        initial: Callable[[Tensor], Tree],
        device: torch.device | str,
    ) -> None:
        super().__init__(row, 0, device)
        self.folder, self.names, self.initial = folder, names, initial
        self.versions: dict[int, int] = {}
        self.next = 0
        self._io = AtomicCheckpointIO()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def gather(
        self,
        clients: Tensor,
        device: torch.device | str | None = None,
        without: Collection[str] = (),
    ) -> Tree:
        """Read the states of some clients, ``(clients, ...)``, in the order of the ids.

        Raises:
            LostStateError: If a version isn't there, or damaged.
        """
        found = stack([self._read(int(client)) for client in clients])
        kept = {name: leaf for name, leaf in found.items() if name not in without}
        return tmap(lambda leaf: leaf.to(device or self.device), kept)

    def scatter(self, clients: Tensor, client_state: Tree) -> None:
        """Write the states of some clients as version :attr:`next`."""
        self.require_entries(client_state)
        for row, client in enumerate(clients.tolist()):
            one = rows(client_state, slice(row, row + 1))
            # Copies: a view would bring the other clients' states into the file.
            state = tmap(lambda leaf: leaf.detach().cpu().clone(), one)
            self._io.save_checkpoint({"state": state}, self._path(client, self.next))

    def forget(self, keep: Mapping[int, Collection[int]]) -> None:
        """Delete versions that can't be asked for any more.

        Args:
            keep: By client id, the versions that count now and in the server's last checkpoint;
                newer ones are kept as well.
        """
        for client, versions in keep.items():
            for version in self.held(client):
                if version not in versions and version < max(versions, default=NONE):
                    self._path(client, version).unlink(missing_ok=True)

    def held(self, client: int) -> list[int]:
        """List the versions that are on disk."""
        paths = (self.folder / str(client)).glob("version-*.pt")
        return sorted(int(path.stem.removeprefix("version-")) for path in paths)

    def _path(self, client: int, version: int) -> Path:
        return self.folder / str(client) / f"version-{version:08d}.pt"

    def _read(self, client: int) -> Tree:
        version = self.versions.get(client, NONE)
        if version == NONE:
            return self.initial(torch.tensor([client]))
        path = self._path(client, version)
        if not path.is_file():
            held = ", ".join(map(str, self.held(client))) or "nothing"
            raise LostStateError(
                f"client {self.names[client]!r} should have its state of round {version}, which "
                f"the server counts on, but this node has {held}"
            )
        try:
            with explain_read_errors(path):
                state: Tree = torch.load(path, map_location=self.device, weights_only=True)["state"]
        except RuntimeError as error:
            raise LostStateError(
                f"client {self.names[client]!r} has its state of round {version}, but the file on "
                "this node is damaged"
            ) from error
        return state
