"""Solvers and mathematics of several methods, and centralized solvers to compare with."""

from typing import TYPE_CHECKING

from lightning_pfl.core.lazy import lazy_names

if TYPE_CHECKING:
    from lightning_pfl.solvers.centralized.losses import ClientLosses, Losses
    from lightning_pfl.solvers.centralized.newtons_method import newton, proximal_newton
    from lightning_pfl.solvers.centralized.sum_of_norms import (
        Solution,
        SumOfNorms,
        regularization_path,
        solve_squared,
    )
    from lightning_pfl.solvers.pairs import Pairs

__all__ = [
    "ClientLosses",
    "Losses",
    "Pairs",
    "Solution",
    "SumOfNorms",
    "newton",
    "proximal_newton",
    "regularization_path",
    "solve_squared",
]

# Methods need few of them.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ClientLosses": "lightning_pfl.solvers.centralized.losses",
        "Losses": "lightning_pfl.solvers.centralized.losses",
        "Pairs": "lightning_pfl.solvers.pairs",
        "Solution": "lightning_pfl.solvers.centralized.sum_of_norms",
        "SumOfNorms": "lightning_pfl.solvers.centralized.sum_of_norms",
        "newton": "lightning_pfl.solvers.centralized.newtons_method",
        "proximal_newton": "lightning_pfl.solvers.centralized.newtons_method",
        "regularization_path": "lightning_pfl.solvers.centralized.sum_of_norms",
        "solve_squared": "lightning_pfl.solvers.centralized.sum_of_norms",
    },
)
