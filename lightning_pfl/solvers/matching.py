"""Assignments of hidden units of several networks to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from lightning_pfl.core.transfer import send


def assignment(profit: Tensor) -> Tensor:
    """Give each row a column of its own, so that the sum of the profits is largest.

    Args:
        profit: ``(rows, columns)``, no more rows than columns.

    Returns:
        The columns, int64 ``(rows,)``.

    Example:
        >>> assignment(torch.tensor([[1.0, 3.0], [2.0, 3.5]]))
        tensor([1, 0])
    """
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(profit.detach().cpu().double().numpy(), maximize=True)
    return send(torch.from_numpy(columns), profit.device)


def nearest_order(units: Tensor, targets: Tensor) -> Tensor:
    r"""Find the order of units with the smallest :math:`\sum_i \lVert u_{o(i)} - t_i \rVert^2`.

    Args:
        units: :math:`u`, ``(units, numbers)``.
        targets: :math:`t`, ``(units, numbers)``.

    Returns:
        :math:`o`, int64 ``(units,)``; the order as it is, where none is better.

    Example:
        >>> nearest_order(torch.tensor([[5.0], [1.0]]), torch.tensor([[0.0], [4.0]]))
        tensor([1, 0])
    """
    # The squared lengths are the same in every order.
    profit = targets.double() @ units.double().T
    order = assignment(profit)
    better = profit.gather(1, order.unsqueeze(1)).sum() > profit.trace()
    return order if better else torch.arange(len(order), device=order.device)


@dataclass(frozen=True)
class Atoms:
    """Global units that explain the units of several networks.

    Attributes:
        means: Posterior means, ``(atoms, numbers)``.
        members: The atom of each unit, int64 ``(units,)``, by network.
    """

    means: Tensor
    members: list[Tensor]


def match_units(
    networks: Sequence[Tensor],
    *,
    variance: float = 1.0,
    prior_variance: float = 1.0,
    prior_mean: Tensor | float = 0.0,
    concentration: float = 1.0,
    count_weight: float = 2.0,
    sweeps: int = 50,
) -> Atoms:
    r"""Find global units by the most probable assignment of a Beta-Bernoulli process.

    A network's units are noisy copies of different global ones. The noise has the precision
    :math:`s`, the prior of a global unit :math:`s_0` around :math:`\mu_0`. A global unit that
    :math:`m` of the other of :math:`J` networks have has a posterior with the numerator :math:`a`
    and the precision :math:`b`. Unit :math:`v` gains by it, or by the :math:`r`-th new one,

    .. math::
        \frac{\lVert s v + a \rVert^2}{s + b} - \frac{\lVert a \rVert^2}{b}
        + c \log \frac{m}{J - m}, \qquad
        \frac{\lVert s v + s_0 \mu_0 \rVert^2}{s + s_0} - \frac{\lVert s_0 \mu_0 \rVert^2}{s_0}
        - c \log r + c \log \frac{\gamma}{J}.

    Networks are assigned one after another, each given the others, until none changes.

    Args:
        networks: Their units, ``(units, numbers)`` each.
        variance: :math:`1 / s > 0`.
        prior_variance: :math:`1 / s_0 > 0`.
        prior_mean: :math:`\mu_0`, a number or ``(numbers,)``.
        concentration: :math:`\gamma > 0`: the larger, the more global units.
        count_weight: :math:`c`: 2 in the model, 1 in its authors' code.
        sweeps: Passes over the networks at most.

    References:
        Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni. Bayesian nonparametric federated
        learning of neural networks. ICML 2019. arXiv:1905.12022, section 3.
    """
    count, numbers = len(networks), networks[0].shape[1]
    first = networks[0].double()
    mean = torch.as_tensor(prior_mean, dtype=torch.float64, device=first.device).expand(numbers)
    s, s0 = 1 / variance, 1 / prior_variance
    start = s0 * mean

    def gain(added: Tensor, before: Tensor, precision: Tensor | float) -> Tensor:
        after = (s * added + before).square().sum(-1) / (s + precision)
        return after - before.square().sum(-1) / precision

    members = [torch.zeros(0, dtype=torch.int64, device=first.device)] * count
    for _ in range(sweeps):
        before = members
        for number, network in enumerate(networks):
            units = network.double()
            rest = [of if k != number else of[:0] for k, of in enumerate(members)]
            total, m = _sums(networks, rest, s, start)
            old = gain(units.unsqueeze(1), total, s0 + s * m)
            old = old + count_weight * (m / (count - m)).log()
            fresh = gain(units, start, s0) + count_weight * log(concentration / count)
            ranks = torch.arange(1, len(units) + 1, device=units.device).double()
            new = fresh.unsqueeze(1) - count_weight * ranks.log()
            # A unit that nobody else has loses its number, so new ones come after the others.
            found = assignment(torch.cat([old, new], 1))
            members = [found if k == number else of for k, of in enumerate(_numbered(rest))]
        members = _numbered(members)
        if len(before[0]) and all(map(torch.equal, before, members)):
            break
    total, m = _sums(networks, members, s, start)
    means = total / (s0 + s * m).unsqueeze(1)
    return Atoms(means.to(networks[0]), members)


def _sums(
    networks: Sequence[Tensor], members: list[Tensor], s: float, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the atoms' numerators, ``(atoms, numbers)``, and how many units they have."""
    members = _numbered(members)
    of = torch.cat(members)
    atoms = int(of.max()) + 1 if len(of) else 0
    kept = [network.double() for network, own in zip(networks, members, strict=True) if len(own)]
    total = start.repeat(atoms, 1)
    if kept:
        total.index_add_(0, of, s * torch.cat(kept))
    return total, torch.bincount(of, minlength=atoms).double()


def _numbered(members: list[Tensor]) -> list[Tensor]:
    """Number atoms in the order in which networks have them."""
    of = torch.cat(members)
    names, at = of.unique(return_inverse=True)
    place = torch.arange(len(of), device=of.device)
    first = place.new_full((len(names),), len(of)).scatter_reduce(0, at, place, "amin")
    return list(first.argsort().argsort()[at].split([len(own) for own in members]))
