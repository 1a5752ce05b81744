"""Statistics over clients of one metric in one round."""

from __future__ import annotations

import math

from torch import Tensor

from lightning_pfl.core.argument_types import check_types

#: The statistics of `summarize`; "" is the headline. Key names are put together by the caller.
STATISTICS = ("", "weighted", "std", "worst_decile", "worst")
#: How many clients the statistics leave out, as they have no number; missing where it is 0.
LEFT_OUT = "left_out"
#: The standard error of the headline, if some of the clients were evaluated alone.
STANDARD_ERROR = "standard_error"


def summarize(
    values: Tensor, weights: Tensor, higher_is_better: bool = True, share: float = 1.0
) -> dict[str, float]:
    r"""Compute statistics of one value per client.

    With n clients that have samples, their values :math:`v_k` and numbers of samples
    :math:`N_k`:

    - ``""``: the mean over clients :math:`\frac{1}{n}\sum_k v_k`, the headline
    - ``"weighted"``: the mean over samples :math:`\sum_k N_k v_k / \sum_k N_k`
    - ``"std"``: the standard deviation over clients, of the population (divided by n)
    - ``"worst_decile"``: the mean over the worst :math:`\lceil n/10 \rceil` clients
    - ``"worst"``: the value of the worst client

    The worst are the lowest values where higher is better, else the highest. Clients without
    samples (weight 0) are left out. So are those whose value is NaN, as they couldn't log it or
    their model is broken; ``"left_out"`` counts them. If all are NaN, so are the statistics.

    If only a share :math:`f < 1` of the clients was drawn, at random without replacement, all of
    these are estimates. The mean has no bias, and ``"standard_error"`` is

    .. math:: \sqrt{(1 - f)\, s^2 / n}, \qquad s^2 = \frac{1}{n-1}\sum_k (v_k - \bar v)^2

    whose square is the mean's variance on average (Cochran, theorem 2.4). ``1 - f`` is the finite
    population's correction: with all clients nothing is left to chance. It is NaN for one client.
    ``"weighted"`` is a ratio of two sums, with a bias that falls as :math:`1/n`; the worst of some
    are better than the worst of all.

    Args:
        values: ``(clients,)``.
        weights: Numbers of samples, ``(clients,)``, at least 0.
        higher_is_better: True for an accuracy, False for a loss.
        share: Share of the clients that was drawn, in (0, 1].

    Raises:
        TypeError: If values or weights are no tensor.
        ValueError: If the shapes are no equal vectors, a weight is negative, no client has
            samples, or the share is out of its range.

    Example:
        >>> import torch
        >>> summary = summarize(torch.tensor([0.5, 1.0]), torch.tensor([30, 10]))
        >>> summary[""], summary["weighted"], summary["worst"]
        (0.75, 0.625, 0.5)

    References:
        Li, Sanjabi, Beirami, Smith. Fair resource allocation in federated learning. ICLR 2020.
        arXiv:1905.10497, section 4 and table 1, for the spread and the worst 10 %.

        Cochran. Sampling Techniques. 3rd edition, Wiley 1977, sections 2.5 to 2.7; 2.12 where
        clients are left out.
    """
    check_types(summarize, {"higher_is_better": higher_is_better, "share": share})
    if not 0 < share <= 1:
        raise ValueError(
            f"Expected `share` to be in (0, 1], but got share={share!r}. Use 1.0 for all clients."
        )
    kept, weight = clients_with_samples(values, weights)
    known = ~kept.isnan()
    if not known.any():
        names = STATISTICS if share == 1 else (*STATISTICS, STANDARD_ERROR)
        return dict.fromkeys(names, math.nan)
    left_out = {} if known.all() else {LEFT_OUT: float((~known).sum())}
    kept, weight = kept[known], weight[known]
    worst_first = kept.sort(descending=not higher_is_better).values
    decile = math.ceil(len(kept) / 10)
    return {
        "": float(kept.mean()),
        "weighted": float((kept * weight).sum() / weight.sum()),
        "std": float(kept.std(correction=0)),
        "worst_decile": float(worst_first[:decile].mean()),
        "worst": float(worst_first[0]),
        **({STANDARD_ERROR: _standard_error(kept, share)} if share < 1 else {}),
        **left_out,
    }


def _standard_error(values: Tensor, share: float) -> float:
    """Estimate the standard error of the mean of a share of the clients; NaN for one client."""
    if len(values) < 2:
        return math.nan
    return float(((1 - share) * values.var(correction=1) / len(values)).sqrt())


def clients_with_samples(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and weights of the clients with samples, in double precision on the CPU.

    Args:
        values: ``(clients,)``.
        weights: Numbers of samples, ``(clients,)``, at least 0.

    Raises:
        TypeError, ValueError: See `summarize`.
    """
    for name, value in (("values", values), ("weights", weights)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"Expected `{name}` to be a tensor with a number for each client, but got "
                f"{name}={value!r}. Use torch.tensor(...)."
            )
    values, weights = values.detach().cpu().double(), weights.detach().cpu().double()
    if values.ndim != 1 or values.shape != weights.shape:
        raise ValueError(
            "Expected `values` and `weights` to be vectors of one length, but got "
            f"values={tuple(values.shape)} and weights={tuple(weights.shape)}. "
            "Give one value and one number of samples for each client."
        )
    if not (weights >= 0).all():
        raise ValueError(
            f"Expected `weights` to be non-negative, but got a minimum of {float(weights.min())}. "
            "Give the number of samples of each client."
        )
    has_samples = weights > 0
    if not has_samples.any():
        raise ValueError(
            f"Expected `weights` to be positive for at least one client, but got {len(weights)} "
            "clients without samples. Give at least one client data in this split."
        )
    return values[has_samples], weights[has_samples]
