"""LaplacePrior: a smoothed Laplace density, for clients that differ in few parameters."""

from __future__ import annotations

from torch import Tensor

from lightning_pfl.core.checks import check_number
from lightning_pfl.core.parameters import ParameterSpec
from lightning_pfl.core.tree import Model, Tree
from lightning_pfl.priors.base import Prior, sum_entries


class LaplacePrior(Prior):
    r"""A smoothed Laplace density with a learned centre :math:`\gamma`.

    .. math::
        R(\theta, \gamma) = \frac1b \sum_i \Bigl(\sqrt{(\theta_i - \gamma_i)^2 + \delta^2} -
        \delta\Bigr)

    Near the centre it is a Gaussian of variance :math:`b \delta`; far from it the penalty is
    linear, so distant clients pull no harder on the centre, and a client pays little for one
    deviating parameter. :math:`\gamma` becomes a smoothed median of the clients, which has no
    closed form: the server takes the generic step (equation 3) and needs ``prior_lr``.

    Args:
        scale: :math:`b > 0`, the mean absolute deviation of the Laplace density; bounds the
            penalty's gradient by ``1 / scale`` per parameter.
        smoothing: :math:`\delta > 0`; steps need ``prior_lr < 2 * scale * smoothing``, and plain
            SGD ``lr * (L + 1 / (scale * smoothing)) < 2``.
        parameters: Trainable parameters under the prior.

    Deviation from the paper: not in the paper, whose theory covers it except for *strong*
    convexity, which fails far from the centre.

    Example:
        >>> LaplacePrior(scale=2.0)
        LaplacePrior(scale=2.0, smoothing=0.1, parameters='all')

    References:
        Zhang et al. FedMAP. arXiv:2405.19000, equations 2 and 3.
    """

    def __init__(
        self, scale: float = 1.0, smoothing: float = 0.1, parameters: ParameterSpec = "all"
    ) -> None:
        super().__init__(parameters)
        check_number("scale", scale, "Use 1, for example.", positive=True)
        check_number("smoothing", smoothing, "Use a tenth of the scale.", positive=True)
        self.scale, self.smoothing = scale, smoothing

    def regularizer(self, theta: Model, gamma: Tree) -> Tensor:
        """Divide the smoothed absolute deviations by the scale."""

        def deviation(t: Tensor, m: Tensor) -> Tensor:
            square = (t - m).square()
            # The difference of root and smoothing would cancel near the centre.
            return square / ((square + self.smoothing**2).sqrt() + self.smoothing)

        return sum_entries(deviation, theta, gamma["mean"]) / self.scale
