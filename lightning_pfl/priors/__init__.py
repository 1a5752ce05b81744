"""FedMAP's priors over the clients' parameters."""

from lightning_pfl.priors.base import Prior, sum_entries
from lightning_pfl.priors.diagonal import DiagonalGaussianPrior
from lightning_pfl.priors.gaussian import GaussianPrior
from lightning_pfl.priors.laplace import LaplacePrior

__all__ = ["DiagonalGaussianPrior", "GaussianPrior", "LaplacePrior", "Prior", "sum_entries"]
