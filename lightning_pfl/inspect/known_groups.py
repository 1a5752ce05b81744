"""Groups of clients that are known in an experiment, to compare with what a method finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pfl.solvers.clusters import numbered

Groups = Sequence[int] | int | None
"""A group for each client, in the order of the ids; or the number of groups, where clients are in
blocks of (nearly) equal size, as in ``FeatureSkew("rotate90")``; None where they aren't known."""


def resolve_groups(groups: Groups, num_clients: int) -> Tensor | None:
    """Each client's group, numbered from 0 in ascending order, int64 ``(clients,)``.

    Args:
        groups: See :data:`Groups`.
        num_clients: Number of clients.

    Raises:
        ValueError: If there aren't as many entries as clients, if one is no whole number, or if
            there is no such number of groups.

    Example:
        >>> resolve_groups(2, 5)
        tensor([0, 0, 0, 1, 1])
        >>> resolve_groups([7, 7, 3], 3)
        tensor([1, 1, 0])
    """
    if groups is None:
        return None
    if isinstance(groups, int):
        if isinstance(groups, bool) or not 1 <= groups <= num_clients:
            raise ValueError(
                f"Expected `groups` to be between 1 and the number of clients ({num_clients}), but "
                f"got {groups=}. Use the number of like blocks, or a list with a group for each "
                "client."
            )
        return groups * torch.arange(num_clients) // num_clients
    return numbered("groups", groups, num_clients)
