"""Groups of clients with similar rows, by k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.core.sums import as_rows


def group_means(rows: Tensor, groups: int, key: int) -> tuple[Tensor, Tensor]:
    """Group rows by k-means, and average each group.

    Groups are numbered by their first row. With fewer rows than groups each is a group, and the
    means of groups without a row are those of all rows.

    Args:
        rows: ``(clients, ...)``.
        groups: The number of groups.
        key: Key of the random starts.

    Returns:
        Each row's group, int64 ``(clients,)``, and the means, ``(groups, ...)``.

    Example:
        >>> group_means(torch.tensor([[5.0], [0.0], [6.0]]), 2, key=0)
        (tensor([0, 1, 0]), tensor([[5.5000],
                [0.0000]]))
    """
    from sklearn.cluster import KMeans

    flat = as_rows(rows).double().cpu()
    solver = KMeans(min(groups, len(flat)), n_init=10, random_state=key % 2**32)
    found = solver.fit_predict(flat.numpy()).tolist()
    number = {group: n for n, group in enumerate(dict.fromkeys(found))}
    labels = torch.tensor([number[group] for group in found], device=rows.device)
    means = [
        rows[labels == group].mean(0) if group < len(number) else rows.mean(0)
        for group in range(groups)
    ]
    return labels, torch.stack(means)
