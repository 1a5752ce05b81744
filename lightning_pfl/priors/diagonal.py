"""DiagonalGaussianPrior: a learned mean and a learned variance per parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pfl.core.checks import check_number, is_number
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, Tree, leaves, sub, tmap, weighted_mean
from lightning_pfl.priors.base import Prior, sum_entries

SWEEPS = 200
"""Largest number of alternations of means and variances; each shrinks the error by a third."""
PRECISION = 1e-14
"""Relative change of the variances below which the alternation stops."""
NEWTON_STEPS = 8
"""Newton steps: from a start at most 2.2 times the root, seven reach double precision."""


class DiagonalGaussianPrior(Prior):
    r"""A Gaussian whose means :math:`\mu` and variances :math:`s + c` are learned.

    .. math::
        R(\theta, \mu, s) = \sum_i \tfrac12 \alpha(s_i) (\theta_i - \mu_i)^2
        + \varepsilon (\lVert s \rVert^2 + \lVert \mu \rVert^2), \qquad
        \alpha(s) = \frac{1}{s + c}

    The last term bounds the variances; it doesn't depend on :math:`\theta`, so clients skip it.
    With ``prior_lr`` the server takes a gradient step and projects :math:`s_i \ge -c + \delta`;
    without it alternates the exact solutions

    .. math::
        \mu_i = \frac{\alpha(s_i) \sum_k w_k \theta_{ki}}{\alpha(s_i) + 2 \varepsilon}, \qquad
        4 \varepsilon s_i (s_i + c)^2 = \sum_k w_k (\theta_{ki} - \mu_i)^2

    until neither changes.

    Args:
        spread: :math:`s^0 > -c`, the initial value of every :math:`s_i`.
        offset: :math:`c > 0`.
        epsilon: :math:`\varepsilon > 0`; smaller values allow larger variances.
        margin: :math:`\delta > 0` of the projection. At that variance plain SGD needs
            ``lr * (L + 1 / margin) < 2``.
        parameters: Trainable parameters under the prior.

    Deviation from the paper: none in the density, which leaves out the normaliser as the paper
    does, so :math:`s + c` is no estimate of the clients' variance. The exact server step and the
    projection are not in the paper, whose :math:`s` is bounded by assumption.

    Example:
        >>> DiagonalGaussianPrior(epsilon=1e-3).epsilon
        0.001

    References:
        Zhang et al. FedMAP. arXiv:2405.19000, equation 18, lemma 1, section A.4.
    """

    def __init__(
        self,
        spread: float = 0.0,
        offset: float = 1.0,
        epsilon: float = 1e-4,
        margin: float = 1e-3,
        parameters: ParameterSpec = "all",
    ) -> None:
        super().__init__(parameters)
        check_number("offset", offset, "Use 1 as in the paper.", positive=True)
        check_number("epsilon", epsilon, "Use 1e-4 as in the paper.", positive=True)
        check_number("margin", margin, "Use 1e-3, for example.", positive=True)
        if not is_number(spread) or not -offset + margin <= spread < float("inf"):
            raise ValueError(
                f"Expected `spread` to be a finite number >= margin - offset, but got {spread=}, "
                f"{margin=} and {offset=}. Use 0 as in the paper."
            )
        self.spread, self.offset, self.epsilon, self.margin = spread, offset, epsilon, margin

    def init(self, model: Model) -> Tree:
        """Make the initial parameters the means, with equal variances."""
        return {
            "mean": model,
            "spread": tmap(lambda leaf: torch.full_like(leaf, self.spread), model),
        }

    def learned(self, gamma: Tree) -> dict[str, Model]:
        """Return the variances ``s + c``."""
        return {"variance": tmap(lambda s: s + self.offset, gamma["spread"])}

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        """Sum half the squared deviations over the variances."""

        def deviation(t: Tensor, m: Tensor, s: Tensor) -> Tensor:
            return (t - m).square() / (2 * (s + self.offset))

        return sum_entries(deviation, theta, gamma["mean"], gamma["spread"])

    def hyperprior(self, gamma: Tree) -> Tensor:
        """Multiply the sum of all squares by epsilon."""
        parts = [leaf.double().square().sum() for leaf in gamma["mean"].values()]
        parts += [leaf.double().square().sum() for leaf in gamma["spread"].values()]
        return self.epsilon * torch.stack(parts).sum()

    def theta_gradient(self, theta: Model, gamma: Tree) -> Model:
        """Divide the deviations by the variances."""
        change = sub(theta, gamma["mean"])
        return tmap(lambda d, s: d / (s + self.offset), change, gamma["spread"])

    def curvature(self, gamma: Tree) -> float:
        """Return one over the smallest current variance."""
        least = [leaf.min() for leaf in leaves(gamma["spread"]) if leaf.numel()]
        return 1 / (float(torch.stack(least).min()) + self.offset)

    def gamma_gradient(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        """Compute the gradients by means and by spreads."""
        mean, spread = gamma["mean"], gamma["spread"]
        center, deviation = _moments(theta, mean, weights)
        rate = 2 * self.epsilon

        def by_mean(m: Tensor, x: Tensor, s: Tensor) -> Tensor:
            return (m - x) / (s + self.offset) + rate * m

        def by_spread(s: Tensor, v: Tensor) -> Tensor:
            return rate * s - v / (2 * (s + self.offset) ** 2)

        return {
            "mean": tmap(by_mean, mean, center, spread),
            "spread": tmap(by_spread, spread, deviation),
        }

    def project(self, gamma: Tree) -> Tree:
        """Clamp variances at the margin."""
        least = self.margin - self.offset
        return {**gamma, "spread": tmap(lambda s: s.clamp_min(least), gamma["spread"])}

    def closed_form(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        """Alternate the two exact solutions until neither changes."""
        center = weighted_mean(theta, weights)
        _, variance = _moments(theta, center, weights)
        mean, spread = {}, {}
        for name, x in center.items():
            m, s = self._solve(x.double(), variance[name].double(), gamma["spread"][name].double())
            mean[name], spread[name] = m.to(x.dtype), s.to(x.dtype)
        return {"mean": mean, "spread": spread}

    def _solve(self, center: Tensor, variance: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(SWEEPS):
            mean = center / (1 + 2 * self.epsilon * (spread + self.offset))
            old, spread = spread, self.spread_of(variance + (center - mean).square())
            # One synchronisation with the device per sweep.
            if bool(((spread - old).abs() <= PRECISION * (spread + self.offset)).all()):
                break
        return mean, spread

    def spread_of(self, deviation: Tensor) -> Tensor:
        r"""Solve :math:`4 \varepsilon s (s + c)^2 = v` for :math:`s`.

        Args:
            deviation: :math:`v \ge 0`, the weighted mean square of the deviations, any shape.
        """
        c, target = self.offset, deviation / (4 * self.epsilon)
        # Both are above the root, where the cubic is convex: Newton's method decreases to it.
        s = torch.minimum(target.pow(1 / 3), target / c**2)
        for _ in range(NEWTON_STEPS):
            s = s - (s * (s + c) ** 2 - target) / ((s + c) * (3 * s + c))
        return s.clamp_min(0)


def _moments(theta: Model, mean: Model, weights: Tensor) -> tuple[Model, Model]:
    """Compute the clients' weighted mean, and their mean squared deviation from ``mean``."""
    squares = tmap(lambda t, m: (t - m).square(), theta, mean)
    return weighted_mean(theta, weights), weighted_mean(squares, weights)
