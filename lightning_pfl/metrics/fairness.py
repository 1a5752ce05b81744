"""How evenly a metric is spread over the clients."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.metrics.summary import clients_with_samples


def jain_index(values: Tensor) -> float:
    r"""Jain's index :math:`(\sum_k v_k)^2 / (n \sum_k v_k^2)`.

    It is 1 if all values are equal, and :math:`m/n` if m of n clients share everything equally.

    Args:
        values: ``(clients,)``, non-negative. If all are 0 they are equal: the index is 1.

    Raises:
        ValueError: If there is no value or a negative one.

    Example:
        >>> jain_index(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        0.5

    References:
        Jain, Chiu, Hawe. A quantitative measure of fairness and discrimination for resource
        allocation in shared computer systems. DEC Research Report TR-301, 1984. arXiv:cs/9809099.
    """
    values = _non_negative(values)
    squares = (values**2).sum()
    return 1.0 if squares == 0 else float(values.sum() ** 2 / (len(values) * squares))


def gini(values: Tensor) -> float:
    r"""Gini's coefficient :math:`\sum_{k,l} |v_k - v_l| / (2 n^2 \bar v)`, in [0, 1 - 1/n].

    Computed from the sorted values :math:`v_{(1)} \le \dots \le v_{(n)}`, with the same result, as
    :math:`\sum_k (2k - n - 1)\, v_{(k)} / (n^2 \bar v)`.

    Args:
        values: ``(clients,)``, non-negative. If all are 0 they are equal: the coefficient is 0.

    Raises:
        ValueError: If there is no value or a negative one.

    Example:
        >>> gini(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        0.5

    References:
        Gini. Variabilità e mutabilità. 1912; the sorted form in Sen. On economic inequality. 1973.
    """
    values = _non_negative(values).sort().values
    total = values.sum()
    n = len(values)
    rank = 2 * torch.arange(1, n + 1, dtype=values.dtype) - n - 1
    return 0.0 if total == 0 else float((rank * values).sum() / (n * total))


def fairness(values: Tensor, weights: Tensor) -> dict[str, float]:
    """Return ``"jain"`` and ``"gini"`` over the clients that have samples.

    They are for values such as an accuracy, where a unit means the same to each client.

    Args:
        values: ``(clients,)``, non-negative where the weight isn't 0.
        weights: Numbers of samples, ``(clients,)``.

    Raises:
        ValueError: As `summarize`, and for negative values.
    """
    kept, _ = clients_with_samples(values, weights)
    return {"jain": jain_index(kept), "gini": gini(kept)}


def _non_negative(values: Tensor) -> Tensor:
    values = values.detach().cpu().double()
    # NaN passes on purpose: a client's NaN makes the index NaN.
    if not len(values) or (values < 0).any():
        got = f"a minimum of {float(values.min())}" if len(values) else "no value"
        raise ValueError(
            f"Expected `values` to be at least one non-negative value, but got {got}. "
            "Use the standard deviation for values of either sign."
        )
    return values
