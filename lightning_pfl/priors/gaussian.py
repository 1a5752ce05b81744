"""GaussianPrior: a learned mean and fixed variances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_pfl.core.checks import check_number
from lightning_pfl.core.parameters import ParameterSpec, picks
from lightning_pfl.core.sums import double_sqnorm
from lightning_pfl.core.tree import Model, Tree, sub, weighted_mean
from lightning_pfl.priors.base import Prior


class GaussianPrior(Prior):
    r"""A Gaussian with a learned mean :math:`\gamma` and fixed variances :math:`\sigma_i^2`.

    .. math::
        R(\theta, \gamma) = \sum_i \frac{(\theta_i - \gamma_i)^2}{2 \sigma_i^2}, \qquad
        \arg\min_\gamma \sum_k w_k R(\theta_k, \gamma) = \sum_k w_k \theta_k

    The closed form (equation 9) is equation 3 with the step :math:`\lambda = \sigma^2` for equal
    variances; it doesn't depend on them.

    Args:
        variance: :math:`\sigma^2 > 0`; ``inf`` switches the penalty off. Plain SGD needs ``lr *
            (L + 1 / variance) < 2``. In a round the mean moves by a fraction of about ``variance *
            L``, so for a small variance a larger ``prior_lr`` is faster than the closed form.
            Or a variance per name or glob, ``{"head": 1.0, "*": 15.0}``: each parameter takes the
            first that matches, so names come before ``"*"``, and one must match.
        parameters: Trainable parameters under the prior.

    Raises:
        ValueError: If a variance isn't above 0; before the first round, if a parameter has no
            variance, or a name matches no parameter that those before it leave.

    Deviation from the paper: none. Variances by name are its anisotropic prior, whose
    :math:`\sigma_i` is :math:`1 / \sigma_i` here.

    Example:
        >>> GaussianPrior(15.0)
        GaussianPrior(variance=15.0, parameters='all')
        >>> GaussianPrior({"head": 1.0, "*": 15.0}).variance["head"]
        1.0

    References:
        Zhang et al. FedMAP. arXiv:2405.19000, equations 6, 7 and 9.
    """

    def __init__(
        self, variance: float | dict[str, float] = 15.0, parameters: ParameterSpec = "all"
    ) -> None:
        super().__init__(parameters)
        advice = "Use 15 as in the paper's code."
        if isinstance(variance, Mapping):
            if not variance:
                raise ValueError(
                    "Expected `variance` to have a variance for every parameter, but got "
                    f"{variance=}. Use {{'*': 15.0}}, or 15.0."
                )
            for pattern, value in variance.items():
                check_number(f"variance[{pattern!r}]", value, advice, positive=True, infinite=True)
            variance = dict(variance)
        else:
            check_number("variance", variance, advice, positive=True, infinite=True)
        self.variance = variance

    @property
    def pulls_nobody(self) -> bool:
        """Whether all variances are infinite."""
        found = self.variance
        return all(v == math.inf for v in (found.values() if isinstance(found, dict) else [found]))

    def init(self, model: Model) -> Tree:
        """Make the initial parameters the mean, once every parameter has a variance."""
        if isinstance(self.variance, dict):
            _check_names(self.variance, model)
        return super().init(model)

    def _over(self, model: Model) -> Model:
        """Divide each parameter by its variance."""
        variances = self._variances(model)
        return {name: leaf / variances[name] for name, leaf in model.items()}

    def _variances(self, model: Model) -> Mapping[str, float]:
        if isinstance(self.variance, dict):
            return _by_name(tuple(self.variance.items()), tuple(model))
        return dict.fromkeys(model, self.variance)

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        """Sum half the squared distances to the mean over the variances."""
        variances, mean = self._variances(theta), gamma["mean"]
        parts = [
            double_sqnorm(leaf, mean[name]) / (2 * variances[name]) for name, leaf in theta.items()
        ]
        return torch.stack(parts).sum(0)

    def theta_gradient(self, theta: Model, gamma: Tree) -> Model:
        """Divide the difference to the mean by the variance."""
        return self._over(sub(theta, gamma["mean"]))

    def add_gradient(self, grads: Model, theta: Model, gamma: Tree) -> Model:
        """Add the difference to the mean, times one over the variance, in two passes."""
        if type(self).theta_gradient is not GaussianPrior.theta_gradient:
            return super().add_gradient(grads, theta, gamma)  # it is another one's gradient
        variances, mean = self._variances(theta), gamma["mean"]
        return {
            name: g.add(theta[name] - mean[name], alpha=1 / variances[name]) if name in theta else g
            for name, g in grads.items()
        }

    def curvature(self, gamma: Tree) -> float:
        """Return one over the smallest variance."""
        found = self.variance
        return 1 / min(found.values() if isinstance(found, dict) else [found])

    def gamma_gradient(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        """Divide the difference of prior mean and clients' mean by the variance."""
        return {"mean": self._over(sub(gamma["mean"], weighted_mean(theta, weights)))}

    def closed_form(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        """Return the clients' weighted mean."""
        return {"mean": weighted_mean(theta, weights)}


@lru_cache(maxsize=32)
def _by_name(variances: tuple[tuple[str, float], ...], names: tuple[str, ...]) -> dict[str, float]:
    """Find the variance of the first pattern that matches each name."""
    return {
        name: next(value for pattern, value in variances if picks(pattern, name)) for name in names
    }


def _check_names(variances: Mapping[str, float], model: Mapping[str, Any]) -> None:
    left = list(model)
    for pattern in variances:
        rest = [name for name in left if not picks(pattern, name)]
        if len(rest) == len(left):
            raise ValueError(
                "Expected every name in `variance` to match a parameter that those before it "
                f"leave, but got {pattern!r} for {', '.join(sorted(model)[:8])}. Use one of these "
                "or a glob, and put '*' last."
            )
        left = rest
    if left:
        raise ValueError(
            "Expected `variance` to have a variance for every parameter under the prior, but got "
            f"{dict(variances)!r} without {', '.join(left[:5])}. End with '*' for all others."
        )
