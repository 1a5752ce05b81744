"""The positions of each client's samples in a pool that all clients index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor


class Positions(Sequence[Tensor]):
    """Positions of each client's samples: views into one flat tensor, made when they are asked for.

    A tensor takes 600 bytes besides its numbers, and 100,000 clients have few of these.

    Args:
        flat: The positions of all clients, int64 ``(positions,)``.
        sizes: Their number for each client, int64 ``(clients,)``.
        names: The clients' names.
        held: Which clients' samples are here, bool ``(clients,)``; None for all.
    """

    def __init__(
        self, flat: Tensor, sizes: Tensor, names: Sequence[str], held: Tensor | None = None
    ) -> None:
        self._flat, self._names = flat, names
        self._held = None if held is None else held.numpy()
        self._bounds = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).numpy()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        """Return the positions of one client, or of several ones."""
        if isinstance(index, slice):
            return tuple(self[client] for client in range(*index.indices(len(self))))
        client = range(len(self))[index]
        if self._held is not None and not self._held[client]:
            raise not_here(self._names[client])
        return self._flat[int(self._bounds[client]) : int(self._bounds[client + 1])]


def as_positions(row: Any, client: int) -> Tensor:
    """Convert what a user gives as a client's positions, int64 ``(samples,)``; perhaps none.

    Args:
        row: The positions, such as a list, an array or a tensor of whole numbers.
        client: The client's number, for error messages.

    Raises:
        TypeError: If they are no whole numbers along one axis.
    """
    try:
        positions = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Expected `indices` to be one 1-d integer tensor per client, but client {client} got "
            f"{row!r}. Give the positions of the client's samples."
        ) from error
    if positions.numel() == 0:
        return positions.new_empty(0, dtype=torch.long)
    if positions.is_floating_point() or positions.dtype == torch.bool or positions.ndim != 1:
        raise TypeError(
            "Expected `indices` to be one 1-d integer tensor per client, but client "
            f"{client} has dtype {positions.dtype} and shape {tuple(positions.shape)}. "
            "Give the positions of the client's samples (for a mask: mask.nonzero()[:, 0])."
        )
    return positions.long()


def not_here(name: str) -> RuntimeError:
    """Make the error for a client whose samples another process has."""
    return RuntimeError(
        f"Expected samples of a client of this process, but got client {name!r}, whose samples "
        "another process has. Call `personal_models(federation, clients)` in all processes, or use "
        "split_data=False, with which every process has all samples."
    )
