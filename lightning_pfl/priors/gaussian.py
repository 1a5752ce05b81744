"""GaussianPrior: one variance for all parameters, a mean that is learned."""

from __future__ import annotations

from torch import Tensor

from lightning_pfl.layout import Spec
from lightning_pfl.priors.base import Prior, check_positive, sum_entries
from lightning_pfl.tree import Model, Tree, sub, tmap, weighted_mean


class GaussianPrior(Prior):
    r"""A Gaussian with a learned mean :math:`\gamma` and a fixed variance :math:`\sigma^2`.

    .. math::
        R(\theta, \gamma) = \frac{1}{2 \sigma^2} \lVert \theta - \gamma \rVert^2, \qquad
        \arg\min_\gamma \sum_k w_k R(\theta_k, \gamma) = \sum_k w_k \theta_k

    The closed form (equation 9) is equation 3 with the step :math:`\lambda = \sigma^2`.

    Args:
        variance: :math:`\sigma^2 > 0`; ``inf`` trains every client alone. Plain SGD needs ``lr * (L
            + 1 / variance) < 2``. In a round the mean moves by a share of about ``variance * L``,
            so for a small variance a larger ``prior_lr`` is faster than the closed form.
        parameters: Which trainable parameters are under the prior.

    Deviation from the paper: none.

    Example:
        >>> GaussianPrior(15.0)
        GaussianPrior(variance=15.0, parameters='all')

    References:
        Zhang et al. FedMAP. arXiv:2405.19000, equations 6, 7 and 9.
    """

    def __init__(self, variance: float = 15.0, parameters: Spec = "all") -> None:
        super().__init__(parameters)
        check_positive("variance", variance, "Use 15 as in the paper's code.", infinite=True)
        self.variance = variance

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        """Half the squared distance to the mean, over the variance."""
        squares = sum_entries(lambda t, m: (t - m).square(), theta, gamma["mean"])
        return squares / (2 * self.variance)

    def theta_gradient(self, theta: Model, gamma: Tree) -> Model:
        """The difference to the mean, over the variance."""
        return tmap(lambda t, m: (t - m) / self.variance, theta, gamma["mean"])

    def gamma_gradient(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        """The mean's difference to the clients' mean, over the variance."""
        change = sub(gamma["mean"], weighted_mean(theta, weights))
        return {"mean": tmap(lambda leaf: leaf / self.variance, change)}

    def closed_form(self, theta: Model, gamma: Tree, weights: Tensor) -> Tree:
        """The clients' weighted mean."""
        return {"mean": weighted_mean(theta, weights)}
